from __future__ import annotations

import pytest

from paceline_engine.scheduling.latencies import LatencyMeter, measure
from paceline_engine.terms.latencies import ForwardLatency
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


def test_measuring_a_model_with_a_long_context_reserves_little_of_it(monkeypatch):
    backend = instant(context_length=100_000)
    new_cache, reserved = backend.new_cache, []

    def counted(spec):
        reserved.append(spec.reserve_length)
        return new_cache(spec)

    monkeypatch.setattr(backend, "new_cache", counted)
    measure(backend, LatencyMeter(), rounds=1, interrupt=NEVER)
    assert 0 < max(reserved) <= 4097


@pytest.mark.parametrize(
    ("read_us", "row_us", "longest"),
    [
        (0, 200, 256),  # a CPU: each row takes its time
        (6_000, 10, 1024),  # a GPU: up to 600 rows take as long as reading the weights
        (6_000, 2, 4096),
        (60_000, 40, 256),  # a forward of 256 rows takes long enough as it is
    ],
)
def test_a_rows_time_is_measured_where_rows_take_time(read_us, row_us, longest, monkeypatch):
    backend = instant(context_length=100_000)
    now, rows, run = [0], [], backend.run

    def timed(items, interrupt, **how):
        answers = run(items, interrupt, **how)
        rows.append(sum(answer.row_count for answer in answers))
        now[0] += 1000 * max(read_us, row_us * rows[-1])
        return answers

    monkeypatch.setattr(backend, "run", timed)
    meter = LatencyMeter()
    measure(backend, meter, rounds=1, interrupt=NEVER, clock_ns=lambda: now[0])
    assert max(rows) == longest
    per_token = meter.latencies().prefill_ns_per_token
    if read_us < 60_000:
        assert 0.3 * row_us * 1000 <= per_token <= row_us * 1000


SECOND = 1_000_000_000


def uncut_ns(meter: LatencyMeter, length: int) -> int | None:
    """The patience with a forward that computes a whole prompt alone."""
    return meter.patience_ns(length, most_rows=length)


def test_before_the_first_forward_patience_has_no_end():
    assert LatencyMeter().patience_ns(1, most_rows=1) is None


def test_patience_is_ten_times_what_the_longest_prompt_lets_expect():
    meter = LatencyMeter()
    meter.record_prefills((64, SECOND), (256, 2 * SECOND))
    assert uncut_ns(meter, 1) == uncut_ns(meter, 256) == 20 * SECOND
    assert uncut_ns(meter, 1024) == 16 * 20 * SECOND
    meter.record(1024, 9 * SECOND)
    assert uncut_ns(meter, 1024) == 90 * SECOND


def test_patience_grows_with_the_rows_of_a_forward_and_with_its_text():
    meter = LatencyMeter()
    meter.record(1000, 2 * SECOND)
    assert meter.patience_ns(8000, most_rows=900) == 8 * 20 * SECOND
    assert meter.patience_ns(900, most_rows=3000) == 3 * 20 * SECOND
    assert meter.patience_ns(8000, most_rows=3000) == 24 * 20 * SECOND


def test_a_model_that_hangs_in_a_part_of_a_long_prompt_is_found_out_in_minutes():
    meter = LatencyMeter()
    meter.record(1000, SECOND // 10)
    assert meter.patience_ns(131_072, most_rows=2000) < 300 * SECOND


def test_patience_is_never_less_than_ten_seconds():
    meter = LatencyMeter()
    meter.record(256, 1000)
    assert uncut_ns(meter, 1) == 10 * SECOND


def test_slow_short_forwards_count_too():
    meter = LatencyMeter()
    meter.record(256, 1000)
    for _ in range(3):
        meter.record(1, 4 * SECOND)
    assert uncut_ns(meter, 1) == 40 * SECOND


def test_a_forward_that_hung_teaches_no_patience():
    meter = LatencyMeter()
    meter.record(256, SECOND)
    meter.record(256, 3600 * SECOND)
    assert uncut_ns(meter, 256) == 10 * SECOND


@pytest.mark.parametrize("coefficients", [(1, 1, 0), (0, 0, 1), (100, 3, 0.01), (1e6, 1, 1e-6)])
def test_no_prompt_of_a_healthy_model_uses_patience_up(coefficients):
    fixed, linear, quadratic = coefficients

    def takes(rows: int) -> int:
        return round(1e5 * (fixed + linear * rows + quadratic * rows**2))

    meter = LatencyMeter()
    meter.record_prefills((64, takes(64)), (256, takes(256)))
    for rows in (1, 100, 300, 5000, 20, 131_072, 4096):
        assert takes(rows) <= uncut_ns(meter, rows) / 5
        meter.record(rows, takes(rows))


@pytest.mark.parametrize("coefficients", [(1, 1, 0), (0, 0, 1), (100, 3, 0.01), (1e6, 1, 1e-6)])
def test_no_part_of_a_healthy_models_prompt_uses_patience_up(coefficients):
    fixed, linear, quadratic = coefficients

    def takes(rows: int, length: int) -> int:
        return round(1e5 * (fixed + linear * rows + quadratic * rows * length))

    meter = LatencyMeter()
    meter.record_prefills((64, takes(64, 64)), (256, takes(256, 256)))
    for rows, length in [(100, 131_072), (1000, 1000), (1000, 131_072), (8, 131_072), (1024, 64)]:
        assert takes(rows, length) <= meter.patience_ns(length, most_rows=rows) / 5
        meter.record(rows, takes(rows, length))
