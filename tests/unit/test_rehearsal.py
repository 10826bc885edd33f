"""DSI beside SI on the virtual clock."""

from __future__ import annotations

import pytest

from paceline_orchestrator.protocol.messages import CapacityChanged
from paceline_orchestrator.protocol.strategy import Strategy, create_method
from paceline_orchestrator.protocol.task import DecodingTask
from paceline_orchestrator.rehearsal import VERIFICATION, Setting, rehearse
from paceline_orchestrator.simulation import AgreementOracle, ServerLatency, simulate


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


def test_with_many_targets_and_a_sure_drafter_dsi_is_as_quick_as_the_drafter():
    setting = Setting(drafter_step=1000, call=0, acceptance_rate=1.0, target_count=10)
    times = rehearse(setting, speculative_lookahead=9, lookaheads=[1])
    # SI: 9 drafts and a verification for 10 tokens. DSI: a draft for each, and one verification.
    tokens = 160
    assert times == {
        1: pytest.approx(
            (tokens * 1000 + VERIFICATION) / (tokens / 10 * (9000 + VERIFICATION)), 0.02
        )
    }


def test_dsi_hides_the_calls_that_si_waits_for():
    near = Setting(drafter_step=1000, call=0, acceptance_rate=0.8, target_count=5)
    far = Setting(drafter_step=1000, call=1000, acceptance_rate=0.8, target_count=5)
    near_time, far_time = (
        rehearse(it, speculative_lookahead=4, lookaheads=[2])[2] for it in (near, far)
    )
    assert far_time < near_time < 1


def test_each_lookahead_has_its_time():
    setting = Setting(drafter_step=500, call=100, acceptance_rate=0.5, target_count=2)
    times = rehearse(setting, speculative_lookahead=2, lookaheads=[2, 10])
    assert times.keys() == {2, 10}
    assert times[2] < times[10]
