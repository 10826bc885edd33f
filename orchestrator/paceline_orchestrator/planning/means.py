"""Means that forget: what was measured lately counts, and what is assumed where nothing was."""

from __future__ import annotations

# As many values do the assumptions count for; and after so many new ones the older count half.
_ASSUMED_COUNT = 20
_REMEMBERED_COUNT = 2000


class Mean:
    """A mean that forgets."""

    def __init__(self, assumed: float) -> None:
        self._sum = assumed * _ASSUMED_COUNT
        self._count = float(_ASSUMED_COUNT)

    @property
    def value(self) -> float:
        """What a value is expected to be."""
        return self._sum / self._count

    def add(self, amount: float, *, count: int) -> None:
        """Take in the sum of so many values."""
        if self._count > _REMEMBERED_COUNT:
            self._sum /= 2
            self._count /= 2
        self._sum += amount
        self._count += count
