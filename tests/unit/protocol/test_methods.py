"""The table of methods: complete, in step with the wire, and all that a new method has to join."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

import pytest

import paceline
from paceline.v1 import orchestrator_service_pb2 as pb
from paceline_bench.node import SimulatedNode
from paceline_bench.plan.forecast import forecast, forecast_jobs
from paceline_bench.plan.tables import table_rows
from paceline_bench.protocol_runs import Setup, run_protocol
from paceline_orchestrator.planning.estimates import Measurements
from paceline_orchestrator.planning.forecasts import FORECASTS
from paceline_orchestrator.planning.planner import Planner, Wish
from paceline_protocol.autoregressive import AutoregressiveDecoding
from paceline_protocol.messages import CapacityChanged
from paceline_protocol.methods import METHODS, Method, Strategy
from paceline_protocol.simulation import ServerLatency
from paceline_protocol.task import DecodingTask
from unit.protocol.trace import played
from unit.protocol.world import Models, Weather, run_world


def test_every_strategy_has_a_row_and_a_forecast():
    assert list(METHODS) == list(FORECASTS) == list(Strategy)


def test_the_wire_and_the_client_have_the_same_strategies_by_the_same_names():
    unspecified, auto, *named = pb.Strategy.keys()
    assert (unspecified, auto) == ("STRATEGY_UNSPECIFIED", "STRATEGY_AUTO")
    assert named == [f"STRATEGY_{strategy.name}" for strategy in METHODS]
    for strategy, method in METHODS.items():
        assert paceline.Strategy(strategy.value).abbreviation == method.label


# --- a method that nobody has heard of: a member, a file, two rows ------------------------------


class More(Enum):
    """What a new method adds to the enum."""

    LAST_TARGET = "last_target"


class LastTargetDecoding:
    """Plain decoding at the last target there is."""

    def __init__(self, task, capacity):
        self._plain = AutoregressiveDecoding(task, _from_behind(capacity))

    @property
    def statistics(self):
        return self._plain.statistics

    def start(self):
        return self._plain.start()

    def handle(self, event):
        return self._plain.handle(
            _from_behind(event) if isinstance(event, CapacityChanged) else event
        )

    def stop(self):
        return self._plain.stop()


def _from_behind(capacity):
    return replace(capacity, targets=capacity.targets[::-1])


@pytest.fixture
def last(monkeypatch):
    row = Method(label="last", create=LastTargetDecoding, drafts=False, overlaps=False)
    monkeypatch.setitem(METHODS, More.LAST_TARGET, row)
    monkeypatch.setitem(
        FORECASTS,
        More.LAST_TARGET,
        lambda case: replace(FORECASTS[Strategy.AUTOREGRESSIVE](case), strategy=More.LAST_TARGET),
    )
    return More.LAST_TARGET


@pytest.mark.parametrize("seed", range(20))
def test_a_new_method_is_held_to_the_invariants_of_its_row(last, seed):
    world = run_world(
        last,
        DecodingTask((1,), 12),
        models=Models(seed, 0.8),
        weather=Weather(failure=0.1, ghosts=0.1, capacity_change=0.1),
        seed=seed,
        target_count=3,
    )
    assert isinstance(world.method.method, LastTargetDecoding)


def test_a_new_method_runs_on_the_virtual_clock(last):
    step = ServerLatency(10, 10)
    result = run_protocol(
        Setup(last, step, step, target_count=3), acceptance_rate=0.5, max_tokens=7
    )
    assert result.total_time == 70
    assert {span.server for span in result.spans} == {2}


def test_a_new_method_is_weighed_by_the_planner(last):
    measured = Measurements(30_000_000, 30_000_000, 3_000_000, 0.8, target_count=4)
    plan = Planner().choose(measured, Wish(strategy=last))
    assert (plan.strategy, plan.target_count, plan.token_ns) == (last, 1, 30_000_000)
    assert plan.note.startswith("last: 30.0 ms per token (non-SI: ")
    assert "; last: 30.0 ms per token" in Planner().choose(measured).note


def test_a_new_method_has_a_line_in_the_benchmarks(last):
    step = ServerLatency(10, 10)
    node = SimulatedNode(target=step, drafter=step, acceptance_rate=0.5, target_count=2)
    jobs = forecast_jobs(node, token_count=4, repeats=1)
    plain, own = (forecast(job) for job in jobs if job.strategy in (Strategy.AUTOREGRESSIVE, last))
    assert own.mean_ns == plain.mean_ns
    assert table_rows([plain, own])[1][0] == "last"


def test_a_new_method_can_be_traced(last):
    trace = "given last, 3 targets\nstart\n"
    assert played(trace) == trace + "  -> decode 1 at target 2: [prompt] and at most 20 more\n"
