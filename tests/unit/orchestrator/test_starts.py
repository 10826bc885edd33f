"""How a long prompt comes to DSI's targets: the better of two ways, by simulation."""

from __future__ import annotations

import pytest

from paceline_orchestrator.planning import starts
from paceline_orchestrator.planning.rehearsal import VERIFICATION, Setting
from paceline_orchestrator.planning.starts import Start, Starts, is_better_broadcast


def a_start(*, drafter_step=660, first=5.36, lookahead=2, percent=65, targets=7):
    """By default Vicuna-13B on CNN-DM, the first row of the paper's Table 2."""
    setting = Setting(drafter_step=drafter_step, call=0, target_count=targets)
    return Start(setting, round(first * VERIFICATION), lookahead, percent)


def test_with_a_fast_drafter_each_target_begins_with_draft_tokens():
    assert not is_better_broadcast(a_start())


def test_with_a_slow_drafter_the_targets_do_not_wait_for_draft_tokens():
    """Phi3-14B on CNN-DM: a draft token takes two thirds of a verification."""
    slow = a_start(drafter_step=6600, first=4.77, percent=93, targets=2)
    assert is_better_broadcast(slow)


def test_until_it_was_simulated_no_prompt_is_broadcast():
    known, slow = Starts(), a_start(drafter_step=6600, first=4.77, percent=93, targets=2)
    assert not known.broadcasts(slow)
    known.simulate_missing()
    assert known.broadcasts(slow)


def test_what_can_make_no_difference_is_not_simulated(monkeypatch):
    monkeypatch.setattr(starts, "is_better_broadcast", lambda *_, **__: pytest.fail("simulated"))
    known = Starts()
    assert not known.broadcasts(a_start(targets=1))
    assert not known.broadcasts(a_start(first=1))
    known.simulate_missing()


def test_a_start_is_simulated_once_however_often_it_is_asked_for(monkeypatch):
    simulated = []
    monkeypatch.setattr(starts, "is_better_broadcast", lambda it, **_: simulated.append(it) or True)
    known = Starts()
    for _ in range(3):
        known.broadcasts(a_start())
        known.simulate_missing()
        known.broadcasts(a_start())
    assert simulated == [a_start()]


def test_a_start_whose_simulation_failed_is_forgotten_until_it_is_asked_for_again(monkeypatch):
    outcomes = [MemoryError("once")]

    def simulate(_, **__):
        if outcomes:
            raise outcomes.pop()
        return True

    monkeypatch.setattr(starts, "is_better_broadcast", simulate)
    known = Starts()
    known.broadcasts(a_start())
    with pytest.raises(MemoryError):
        known.simulate_missing()
    known.simulate_missing()
    assert not known.broadcasts(a_start())
    known.simulate_missing()
    assert known.broadcasts(a_start())
