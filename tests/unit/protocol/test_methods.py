"""The table of methods: complete, in step with the wire, and all that a new method has to join."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from functools import partial

import pytest

import paceline
from paceline.v1 import orchestrator_service_pb2 as pb
from paceline_bench.plan.forecast import forecast
from paceline_bench.plan.jobs import forecast_jobs
from paceline_bench.plan.tables import json_rows
from paceline_bench.protocol_runs import Setup, run_protocol
from paceline_bench.simulated_servers import SimulatedServers
from paceline_orchestrator.planning.forecasts import FORECASTS
from paceline_orchestrator.planning.measurements import Measurements
from paceline_orchestrator.planning.planner import DrafterKind, Planner, Wish
from paceline_protocol.laboratory.simulation import ServerLatency
from paceline_protocol.laboratory.spans import SpanKind
from paceline_protocol.messages import CapacityChanged
from paceline_protocol.methods import METHODS, Strategy
from paceline_protocol.task import DecodingTask
from unit.protocol.trace import played
from unit.protocol.world import Models, Weather, run_world


def test_every_strategy_has_a_row_and_a_forecast():
    assert METHODS.keys() == FORECASTS.keys() == set(Strategy)


def test_the_wire_and_the_client_have_the_same_strategies_by_the_same_names():
    unspecified, auto, *named = pb.Strategy.keys()
    assert (unspecified, auto) == ("STRATEGY_UNSPECIFIED", "STRATEGY_AUTO")
    assert sorted(named) == sorted(f"STRATEGY_{strategy.name}" for strategy in METHODS)
    for strategy, method in METHODS.items():
        assert paceline.Strategy(strategy.value).abbreviation == method.label


# --- methods that nobody has heard of: a member, a file, two rows --------------------------------


class More(Enum):
    """What a new method adds to the enum."""

    LAST_TARGET = "last_target"


class LastTargetDecoding:
    """A method that there is, at the last target there is."""

    def __init__(self, known, task, capacity):
        self.known = known(task, _from_behind(capacity))

    @property
    def statistics(self):
        return self.known.statistics

    def start(self):
        return self.known.start()

    def handle(self, event):
        return self.known.handle(
            _from_behind(event) if isinstance(event, CapacityChanged) else event
        )

    def stop(self):
        return self.known.stop()


def _from_behind(capacity):
    return replace(capacity, targets=capacity.targets[::-1])


KNOWN = (Strategy.AUTOREGRESSIVE, Strategy.SPECULATIVE)
LAST = More.LAST_TARGET


@pytest.fixture(params=KNOWN, ids=lambda it: it.value)
def known(request, monkeypatch):
    """What the new method is like: one without a drafter, or one with."""
    row = METHODS[request.param]
    create = partial(LastTargetDecoding, row.create)
    monkeypatch.setitem(METHODS, LAST, replace(row, label="last", create=create))
    forecast_known = FORECASTS[request.param]
    monkeypatch.setitem(FORECASTS, LAST, lambda case: replace(forecast_known(case), strategy=LAST))
    return request.param


@pytest.mark.parametrize("seed", range(20))
def test_a_new_method_is_held_to_the_invariants_of_its_row(known, seed):
    world = run_world(
        LAST,
        DecodingTask((1,), 12),
        models=Models(seed, 0.8),
        weather=Weather(failure=0.1, ghosts=0.1, capacity_change=0.1),
        seed=seed,
        target_count=3,
    )
    assert isinstance(world.method.method.known, METHODS[known].create)


def test_a_new_method_runs_on_the_virtual_clock(known):
    def run(strategy):
        step = ServerLatency(10, 10)
        setup = Setup(strategy, step, ServerLatency(1, 1), lookahead=2, target_count=3)
        return run_protocol(setup, acceptance_rate=0.5, max_tokens=7)

    assert run(LAST).total_time == run(known).total_time
    assert {span.server for span in run(LAST).spans if span.kind is not SpanKind.DRAFT} == {2}


@pytest.mark.parametrize("drafter", [None, *DrafterKind])
def test_a_new_method_is_weighed_by_the_planner(known, drafter):
    measured = Measurements(30_000_000, 30_000_000, 3_000_000, 0.8, target_count=4)

    def plan(strategy):
        wish, planner = Wish(strategy=strategy, drafter=drafter), Planner()
        if drafter is not None and not drafter.has_servers:
            return planner.choose_for_text(measured, wish, by_text=measured)
        return planner.choose(measured, wish)

    chosen, old = plan(LAST), plan(known)
    assert replace(chosen, strategy=known, note="") == replace(old, note="")
    assert chosen.note.startswith("last")
    assert "; last" in plan(None).note


def test_a_new_method_has_a_line_in_the_benchmarks(known):
    step = ServerLatency(10, 10)
    node = SimulatedServers(target=step, drafter=step, acceptance_rate=0.5, target_count=2)
    jobs = forecast_jobs(node, token_count=4, repeats=1)
    (own,) = (forecast(job) for job in jobs if job.strategy is LAST)
    assert own.mean_ns > 0
    assert json_rows([own])[0]["name"] == "last"


def test_a_new_method_can_be_traced(known):
    trace = "given last, 3 targets\nstart\n"
    assert played(trace).startswith(trace + "  -> d")


def test_who_drafts_has_the_same_words_on_the_wire():
    unspecified, *named = pb.DrafterKind.keys()
    assert unspecified == "DRAFTER_KIND_UNSPECIFIED"
    assert named == [f"DRAFTER_KIND_{kind.name}" for kind in DrafterKind]


class MoreKinds(Enum):
    """What another way to guess from the text adds to the enum."""

    ECHO = "echo"


@pytest.mark.parametrize("strategy", [it for it, method in METHODS.items() if method.drafts])
def test_a_new_way_to_guess_from_the_text_stays_what_the_plan_says(strategy):
    measured = Measurements(30_000_000, 30_000_000, 3_000_000, 0.8, target_count=4)
    wish = Wish(strategy=strategy, drafter=MoreKinds.ECHO)
    plan = Planner().choose_for_text(measured, wish, by_text=measured)
    assert plan.drafter is MoreKinds.ECHO
