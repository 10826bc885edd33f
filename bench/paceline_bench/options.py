"""Options of the benchmarks that take several values: numbers, or names of what there is."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pydantic import AfterValidator, BeforeValidator

from paceline_protocol.ranks import LLAMA_SHARES, runner_up_shares

if TYPE_CHECKING:
    from collections.abc import Iterable

_LLAMA = "llama"


def numbers_to(most: int) -> BeforeValidator:
    """Read "1-3,8", or a list from a file, as 1, 2, 3 and 8; each from 1 to `most`."""

    def read(value: object) -> tuple[int, ...]:
        parts = value if isinstance(value, list | tuple) else [value]
        numbers: set[int] = set()
        for part in (part for each in parts for part in str(each).split(",")):
            found = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
            if found is None:
                raise ValueError(f"{part!r} is no number and no range such as 1-10")
            first, last = int(found[1]), int(found[2] or found[1])
            if first > last:
                raise ValueError(f"{part!r} goes down; write it as {last}-{first}")
            if first < 1 or last > most:
                raise ValueError(f"{part!r} is not within 1 to {most}")
            numbers.update(range(first, last + 1))
        if not numbers:
            raise ValueError("give at least one number")
        return tuple(sorted(numbers))

    return BeforeValidator(read)


def names_of(known: Iterable[str], *, kind: str, needed: bool = False) -> AfterValidator:
    """Check that a StringList has known names only, and if it is `needed` one or more."""
    names = tuple(known)

    def check(words: tuple[str, ...]) -> tuple[str, ...]:
        if needed and not words:
            raise ValueError(f"name at least one of {', '.join(names)}")
        for word in words:
            if word not in names:
                raise ValueError(f"there is no {kind} {word!r}; there are {', '.join(names)}")
        return words

    return AfterValidator(check)


def check_rank_decay(decay: object) -> str:
    """Check that a rank decay is a number in (0, 1], or the name of a published vector."""
    words = str(decay)
    if words != _LLAMA:
        try:
            number = float(words)
        except ValueError:
            number = 0.0
        if not 0 < number <= 1:
            raise ValueError(f"{words!r} is neither above 0 and at most 1 nor {_LLAMA!r}")
    return words


def shares_of(decay: str) -> tuple[float, ...]:
    """Return how likely each runner-up is right where the first token is wrong."""
    return LLAMA_SHARES if decay == _LLAMA else runner_up_shares(float(decay))
