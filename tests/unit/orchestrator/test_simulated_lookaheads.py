"""DSI on the virtual clock, and what follows from it for any acceptance rate."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from itertools import product

import pytest

from paceline_orchestrator.planning import background_computation
from paceline_orchestrator.planning.measurements import Measurements
from paceline_orchestrator.planning.simulated_lookaheads import (
    VERIFICATION,
    Setting,
    SimulatedLookaheads,
    expected_token_time,
    rehearse,
    setting_of,
)
from paceline_protocol.laboratory.oracles import AgreementOracle
from paceline_protocol.laboratory.simulation import ServerLatency, simulate
from paceline_protocol.messages import CapacityChanged
from paceline_protocol.methods import Strategy, create_method
from paceline_protocol.task import DecodingTask


def test_a_call_costs_its_time_once_and_a_draft_pays_it_for_all_its_tokens():
    oracle = AgreementOracle(1.0, seed=0, length=20)
    task = DecodingTask(oracle.prompt(1), 9, lookahead=3)
    method = create_method(
        Strategy.SPECULATIVE, task, capacity=CapacityChanged(targets=(0,), drafters=(0,))
    )
    target, drafter = ServerLatency(10, 10, call=2), ServerLatency(1, 1, call=5)
    result = simulate(method, oracle, targets=[target], drafters=[drafter])
    # 4 tokens in each of two rounds; in the third the target's own, without a draft.
    assert result.total_time == 2 * ((5 + 3 * 1) + (2 + 10)) + (2 + 10)


def test_a_rehearsal_withdraws_nothing_so_what_withdrawn_work_does_makes_no_new_one():
    measured = Measurements(
        target_step_ns=100,
        target_first_ns=100,
        drafter_step_ns=10,
        acceptance_rate=0.5,
        target_count=2,
    )
    runs_on = replace(measured, targets_run_on=True, drafter_runs_on=True)
    assert setting_of(measured, 2) == setting_of(runs_on, 2)


def test_a_rehearsal_lets_others_have_the_interpreter_again_and_again(monkeypatch):
    released = []
    monkeypatch.setattr(background_computation.time, "sleep", released.append)
    times = rehearse(Setting(drafter_step=1000, call=0, target_count=3), lookahead=2)
    assert len(released) > len(times)


def test_with_many_targets_and_a_sure_drafter_dsi_is_as_quick_as_the_drafter():
    times = rehearse(Setting(drafter_step=1000, call=0, target_count=10), lookahead=1)
    # A token is verified when its draft token is there: one after the other, and all beside.
    assert times == [VERIFICATION + 1000 * index for index in range(len(times))]


def test_a_call_delays_every_token_but_the_first_which_needs_no_draft():
    near, far = (
        rehearse(Setting(drafter_step=1000, call=call, target_count=10), lookahead=2)[:50]
        for call in (0, 700)  # one for the first window of draft tokens
    )
    assert [later - sooner for sooner, later in zip(near, far, strict=True)] == [0] + 49 * [700]


# What takes least.
SHORT = ((0.0, 10), (0.3, 1), (0.8, 3))


@pytest.mark.parametrize(
    ("acceptance_rate", "lookahead"),
    [
        pytest.param(*case, marks=[] if case in SHORT else pytest.mark.long)
        for case in product((0.0, 0.3, 0.6, 0.8), (1, 3, 10))
    ],
)
def test_the_expectation_is_what_the_protocol_takes_on_average(acceptance_rate, lookahead):
    """20 x 400 tokens, drawn from fixed seeds, so there is no false alarm.

    A generation's last stretch is cut short, which is less than a hundredth here.
    """
    setting = Setting(drafter_step=1300, call=200, target_count=3)
    expected = expected_token_time(rehearse(setting, lookahead=lookahead), acceptance_rate)
    times = []
    for seed in range(20):
        oracle = AgreementOracle(acceptance_rate, seed=seed, length=401)
        task = DecodingTask(oracle.prompt(1), 400, lookahead=lookahead)
        method = create_method(
            Strategy.DISTRIBUTED, task, capacity=CapacityChanged(targets=(0, 1, 2), drafters=(0,))
        )
        target = ServerLatency(VERIFICATION, VERIFICATION)
        drafter = ServerLatency(1300, 1300, call=200)
        result = simulate(method, oracle, targets=[target] * 3, drafters=[drafter])
        times.append(float(result.total_time) / 400)
    error = statistics.stdev(times) / math.sqrt(len(times))
    assert statistics.mean(times) == pytest.approx(expected, rel=0.01, abs=5 * error)


@pytest.mark.parametrize("drafter_step", [6530, 9000])
def test_what_was_rehearsed_near_by_is_told_for_what_was_measured(drafter_step):
    """Between two settings, where simulated time alone is 2 % off."""
    measured = Measurements(VERIFICATION, VERIFICATION, drafter_step, 0.93, target_count=2)
    known = SimulatedLookaheads()
    known.ask_for(measured, 2)
    known.simulate_missing()
    exactly = rehearse(Setting(drafter_step, call=0, target_count=2), lookahead=1)
    expected = expected_token_time(exactly, 0.93)
    assert known.times(measured, 2)[1] == pytest.approx(expected, rel=0.005)


def test_a_run_longer_than_was_rehearsed_counts_as_if_it_ended_there():
    assert expected_token_time([10, 11, 12], 1.0) == 12 / 3
    assert expected_token_time([10, 11, 12], 0.0) == 10
    # Ends after 0, 1 or 2 accepted tokens: 1/2, 1/4, 1/4; tokens 1 + 1/2 + 1/4.
    assert expected_token_time([10, 11, 12], 0.5) == (5 + 11 / 4 + 3) / 1.75
