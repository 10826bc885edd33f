from __future__ import annotations

import pytest

from paceline_engine.latencies import ForwardLatency, LatencyMeter, measure
from unit.engine.conftest import NEVER, instant


def test_medians_are_kept_by_the_nearest_power_of_two():
    meter = LatencyMeter()
    for row_count, time in [(1, 10), (1, 30), (1, 20), (5, 50), (11, 80), (500, 9)]:
        meter.record(row_count, time)
    assert meter.latencies().forwards == (
        ForwardLatency(1, 20),
        ForwardLatency(4, 50),
        ForwardLatency(8, 80),
    )


def test_only_the_last_forwards_count():
    meter = LatencyMeter()
    for time in [1000] * 100 + [10] * 64:
        meter.record(1, time)
    assert meter.latencies().forwards == (ForwardLatency(1, 10),)


@pytest.mark.parametrize(
    ("short", "long", "fixed", "per_token"),
    [
        ((10, 150), (110, 1150), 50, 10),
        ((10, 200), (110, 100), 200, 0),
        ((10, 50), (110, 1050), 0, 10),
    ],
)
def test_prefill_is_a_line_that_is_nowhere_negative(short, long, fixed, per_token):
    meter = LatencyMeter()
    meter.record_prefills(short, long)
    found = meter.latencies()
    assert (found.prefill_fixed_ns, found.prefill_ns_per_token) == (fixed, per_token)


@pytest.mark.parametrize("context_length", [1, 40, 100_000])
def test_any_model_can_be_measured(context_length):
    meter = LatencyMeter()
    backend = instant(context_length=context_length, vocabulary_size=2)
    measure(backend, meter, rounds=1, interrupt=NEVER)
    rows = [forward.rows for forward in meter.latencies().forwards]
    assert rows[0] == 1
    assert rows[-1] == (16 if context_length > 100 else 8 if context_length > 1 else 1)
