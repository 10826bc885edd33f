"""A long computation makes way for requests, and ends at once when it shall."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from paceline_orchestrator.fleet.row_prices import RowPrices
from paceline_orchestrator.planning.background_computation import (
    BackgroundComputation,
    ComputationEndedError,
)
from paceline_orchestrator.planning.prefill_broadcast import PrefillCase, is_better_broadcast
from paceline_orchestrator.planning.simulated_lookaheads import Setting, rehearse
from paceline_orchestrator.planning.simulated_shapes import ShapeCase, simulated_times
from paceline_protocol.methods import Strategy

SETTING = Setting(drafter_step=1000, call=0, target_count=3)
MS = 0.001
ANY = RowPrices()


class _Clock:
    def __init__(self):
        self.now, self.pauses = 0.0, []

    def pause(self, seconds):
        self.pauses.append(seconds)
        self.now += seconds


def test_beside_requests_it_computes_for_a_millisecond_and_rests_for_longer():
    clock = _Clock()
    computing = BackgroundComputation(clock=lambda: clock.now, pause=clock.pause)
    computing.share(with_requests=True)
    for _ in range(100):
        clock.now += 0.3 * MS
        computing.make_way()
    computed = 100 * 0.3 * MS
    assert len(clock.pauses) == 25, "after each fourth step, which is the first past 1 ms"
    assert sum(clock.pauses) > 3 * computed


def test_at_rest_it_does_not_pause():
    clock = _Clock()
    computing = BackgroundComputation(clock=lambda: clock.now, pause=clock.pause)
    computing.share(with_requests=True)
    computing.share(with_requests=False)
    for _ in range(100):
        clock.now += 1
        computing.make_way()
    assert clock.pauses == []


@pytest.mark.parametrize("with_requests", [True, False])
def test_what_is_to_end_does_so_with_its_present_step(with_requests):
    computing = BackgroundComputation()
    computing.share(with_requests=with_requests)
    computing.make_way()
    computing.end()
    with pytest.raises(ComputationEndedError):
        computing.make_way()


@pytest.mark.parametrize(
    "simulate",
    [
        lambda after_event: rehearse(SETTING, lookahead=2, after_event=after_event),
        lambda after_event: is_better_broadcast(
            PrefillCase(SETTING, first=50_000, lookahead=2, acceptance_percent=80),
            after_event=after_event,
        ),
        lambda after_event: simulated_times(
            ShapeCase(Strategy.SPECULATIVE, 3, SETTING, 3000, (4, 4, 4), ANY, ANY, 64, 64),
            after_event=after_event,
        ),
    ],
    ids=["a lookahead", "a start", "a form"],
)
def test_every_simulation_asks_after_each_event_whether_it_is_to_end(simulate):
    left = SimpleNamespace(events=20)

    def after_event():
        left.events -= 1
        if not left.events:
            raise ComputationEndedError

    with pytest.raises(ComputationEndedError):
        simulate(after_event)
    assert left.events == 0
