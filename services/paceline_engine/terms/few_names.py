"""Names for a message, of which a file may have a hundred thousand."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_MOST_NAMES = 3
_MOST_CHARACTERS = 120  # of a name


def few_names(names: Iterable[str]) -> str:
    """Return the first names, in their order, and how many more there are."""
    ordered = sorted(names)
    told = ", ".join(each[:_MOST_CHARACTERS] for each in ordered[:_MOST_NAMES])
    more = len(ordered) - _MOST_NAMES
    return f"{told} and {more} more" if more > 0 else told
