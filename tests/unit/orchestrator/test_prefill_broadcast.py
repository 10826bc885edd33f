"""How a long prompt comes to DSI's targets: the better of two ways, by simulation."""

from __future__ import annotations

import pytest

from paceline_orchestrator.planning import prefill_broadcast
from paceline_orchestrator.planning.prefill_broadcast import (
    PrefillBroadcasts,
    PrefillCase,
    is_better_broadcast,
)
from paceline_orchestrator.planning.simulated_lookaheads import VERIFICATION, Setting


def a_start(*, drafter_step=660, first=5.36, lookahead=2, percent=65, targets=7):
    """By default Vicuna-13B on CNN-DM, the first row of the paper's Table 2."""
    setting = Setting(drafter_step=drafter_step, call=0, target_count=targets)
    return PrefillCase(setting, round(first * VERIFICATION), lookahead, percent)


def test_with_a_fast_drafter_each_target_begins_with_draft_tokens():
    assert not is_better_broadcast(a_start())


def test_with_a_slow_drafter_the_targets_do_not_wait_for_draft_tokens():
    """Phi3-14B on CNN-DM: a draft token takes two thirds of a verification."""
    slow = a_start(drafter_step=6600, first=4.77, percent=93, targets=2)
    assert is_better_broadcast(slow)


def test_until_it_was_simulated_no_prompt_is_broadcast():
    known, slow = PrefillBroadcasts(), a_start(drafter_step=6600, first=4.77, percent=93, targets=2)
    assert not known.is_better(slow)
    known.simulate_missing()
    assert known.is_better(slow)


def test_what_can_make_no_difference_is_not_simulated(monkeypatch):
    monkeypatch.setattr(
        prefill_broadcast, "is_better_broadcast", lambda *_, **__: pytest.fail("simulated")
    )
    known = PrefillBroadcasts()
    assert not known.is_better(a_start(targets=1))
    assert not known.is_better(a_start(first=1))
    known.simulate_missing()
