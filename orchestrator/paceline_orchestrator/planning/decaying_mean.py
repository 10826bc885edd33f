"""A decaying mean that starts from an assumed value."""

from __future__ import annotations

# The assumption counts for so many values; after so many new values the older ones count half.
_ASSUMED_COUNT = 20
_REMEMBERED_COUNT = 2000


class DecayingMean:
    """A mean in which later values count more."""

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
