"""Guessed tokens: what became of each, also where some came too late."""

from __future__ import annotations

import pytest

from paceline_orchestrator.decoding.guesses import Guesses

PROMPT = (1, 2, 3)


def rights(guesses: Guesses, token_ids: list[int]) -> list[list[bool]]:
    """Let tokens become final; return of each whether the guesses at its place were right."""
    return [[it.is_right for it in guesses.finalize(token_id)] for token_id in token_ids]


def test_a_chain_is_right_up_to_the_first_token_that_is_not():
    guesses = Guesses(len(PROMPT))
    guesses.add(PROMPT, [4, 5, 0, 7], are_marked=[True] * 4)
    assert rights(guesses, [4, 5, 6, 7]) == [[True], [True], [False], []]


@pytest.mark.parametrize("late", [1, 2])
def test_of_a_chain_that_comes_late_the_rest_counts(late):
    guesses = Guesses(len(PROMPT))
    assert rights(guesses, [4, 5][:late]) == [[]] * late
    guesses.add(PROMPT, [4, 5, 6, 7], are_marked=[True, False, True, False])
    verdicts = [guesses.finalize(it) for it in [4, 5, 6, 0][late:]]
    marks = [it for [it] in verdicts]
    assert marks == [(True, True), (True, False), (True, True), (False, False)][-len(marks) :]


@pytest.mark.parametrize("chain", [[4], [4, 5], [4, 0, 6, 7], [0, 5, 6, 7]])
def test_a_chain_that_is_whole_too_late_or_about_another_text_counts_nowhere(chain):
    guesses = Guesses(len(PROMPT))
    rights(guesses, [4, 5])
    guesses.add(PROMPT, chain, are_marked=[True] * len(chain))
    assert rights(guesses, [6, 7]) == [[], []]
