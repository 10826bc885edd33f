"""How many examples a property is tested with."""

from __future__ import annotations

from hypothesis import settings

SAME, DRAWN = "same", "random"
"""The profiles: the same examples each time, and others (`make test-random`)."""


def examples(count: int) -> int:
    """Return `count` where examples are drawn anew, and else a third of it.

    Examples that are the same each time show only what a change has broken: fewer are enough.
    """
    drawn = settings.get_current_profile_name() == DRAWN
    return count if drawn else max(20, count // 3)
