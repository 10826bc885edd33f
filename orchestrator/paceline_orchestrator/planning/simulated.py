"""Answers that take a simulation: those that are known, and those that are still to be found."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Simulated"]

_Case = TypeVar("_Case")
_Answer = TypeVar("_Answer")

_MOST_MISSING = 8
_MOST_KNOWN = 256


class Simulated(Generic[_Case, _Answer]):
    """What was simulated lately, and what is still to be.

    Concurrency:
        `simulate_missing` computes for long, on a worker thread; `get` is cheap, and may run
        meanwhile.

    Args:
        simulate: Finds the answer to a case.
    """

    def __init__(self, simulate: Callable[[_Case], _Answer]) -> None:
        self._simulate = simulate
        self._known: OrderedDict[_Case, _Answer] = OrderedDict()  # oldest first
        self._missing: deque[_Case] = deque(maxlen=_MOST_MISSING)

    def get(self, case: _Case) -> _Answer | None:
        """Return what is known of a case; None, and it will be simulated."""
        known = self._known.get(case)
        if known is None and case not in self._missing:
            self._missing.append(case)
        return known

    def forget_missing(self) -> None:
        """Simulate nothing that was asked for before now."""
        self._missing.clear()

    def simulate_missing(self) -> None:
        """Simulate what was asked for; what fails is forgotten, and will be asked for again."""
        while self._missing:
            case = self._missing[-1]
            try:
                self._known[case] = self._simulate(case)
            finally:
                self._missing.remove(case)
            while len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)
