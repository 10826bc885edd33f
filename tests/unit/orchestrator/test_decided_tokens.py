"""What was likely at a token's place: what was said of the very text that became final."""

from __future__ import annotations

import pytest

from paceline.errors import InvariantViolatedError
from paceline_orchestrator.decoding.decided_tokens import LikeliestByPosition

PROMPT = (1, 2)
A, B, C, D = (((token, -0.5),) for token in (10, 11, 12, 13))


def test_each_place_has_what_was_said_of_it():
    kept = LikeliestByPosition(2)
    kept.add(PROMPT, (10, 11), likeliest=(A, B))
    assert kept.finalize((10,)) == (A,)
    kept.add((*PROMPT, 10, 11), (12,), likeliest=(C,))
    assert kept.finalize((11, 12)) == (B, C)


def test_what_was_said_under_another_assumption_does_not_count():
    kept = LikeliestByPosition(2)
    kept.add((*PROMPT, 99), (11,), likeliest=(D,))
    kept.add((*PROMPT, 10), (11,), likeliest=(B,))
    kept.add(PROMPT, (10,), likeliest=(A,))
    assert kept.finalize((10, 11)) == (A, B)


def test_a_later_word_on_the_same_text_changes_nothing():
    kept = LikeliestByPosition(2)
    kept.add(PROMPT, (10,), likeliest=(A,))
    kept.add(PROMPT, (10,), likeliest=(D,))
    assert kept.finalize((10,)) == (A,)
    kept.add(PROMPT, (10, 11), likeliest=(D, B))  # of the first place it comes too late
    assert kept.finalize((11,)) == (B,)


def test_a_token_of_which_nobody_has_said_it_does_not_leave():
    kept = LikeliestByPosition(2)
    kept.add((*PROMPT, 99), (11,), likeliest=(D,))
    with pytest.raises(InvariantViolatedError):
        kept.finalize((10,))
