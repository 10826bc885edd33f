"""Guesses of how a text goes on, until its final tokens say which of them were right."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class Verdict(NamedTuple):
    """What became of a guessed token, and whether it was marked."""

    is_right: bool
    is_marked: bool


@dataclass(slots=True)
class _Guess:
    """Tokens after a text; whether each is marked."""

    prefix: Sequence[int]
    token_ids: list[int]
    are_marked: list[bool]


class Guesses:
    """Guessed tokens that are not all final yet.

    Args:
        length: How many tokens of the text are final.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._final = array("I")  # the tokens that have become final here
        self._waiting: list[_Guess] = []

    def add(
        self, prefix: Sequence[int], token_ids: Sequence[int], *, are_marked: Sequence[bool]
    ) -> None:
        """Add a chain of guesses after a prefix, without those of tokens that are final already."""
        if late := max(self._length - len(prefix), 0):
            passed = token_ids[:late]
            if late >= len(token_ids) or [*passed] != [*self._final[-late:]]:
                return
            prefix, token_ids, are_marked = (*prefix, *passed), token_ids[late:], are_marked[late:]
        last = self._waiting[-1] if self._waiting else None
        if last is not None and list(prefix[len(last.prefix) :]) == last.token_ids:
            last.token_ids += token_ids
            last.are_marked += are_marked
        else:
            self._waiting.append(_Guess(prefix, [*token_ids], [*are_marked]))

    def finalize(self, token_id: int) -> list[Verdict]:
        """Let a token become final, and return what became of the guesses at its place."""
        place = self._length
        self._length += 1
        self._final.append(token_id)
        waiting: list[_Guess] = []
        verdicts: list[Verdict] = []
        for guess in self._waiting:
            offset = place - len(guess.prefix)
            if offset < 0:
                if guess.prefix[place] == token_id:  # else it was about another text
                    waiting.append(guess)
                continue
            is_right = guess.token_ids[offset] == token_id
            verdicts.append(Verdict(is_right, guess.are_marked[offset]))
            if is_right and offset + 1 < len(guess.token_ids):
                waiting.append(guess)
        self._waiting = waiting
        return verdicts
