"""Answers of simulations: the known ones, and the cases that wait to be simulated."""

from __future__ import annotations

from collections import OrderedDict, deque
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from paceline_orchestrator.planning.background_computation import let_others_run

if TYPE_CHECKING:
    from collections.abc import Callable

_Case = TypeVar("_Case")
_Answer = TypeVar("_Answer")
_CaseIn = TypeVar("_CaseIn", contravariant=True)
_AnswerOut = TypeVar("_AnswerOut", covariant=True)


class Simulation(Protocol[_CaseIn, _AnswerOut]):
    """Finds the answer to a case."""

    def __call__(self, case: _CaseIn, /, *, after_event: Callable[[], None]) -> _AnswerOut:
        """Return the answer, unless what is called between events ends it with an exception."""


class SimulationCache(Generic[_Case, _Answer]):
    """Answers of late simulations, and cases that wait for one.

    Concurrency:
        `simulate_missing` computes for long, on a worker thread; all else is cheap, and may run
        meanwhile. The lock is held for moments: cases are compared by Python code, in the middle of
        which the other thread may get its turn.

    Args:
        simulate: Finds the answer to a case.
        most_missing: Cases that are left to be simulated: those asked for last.
        most_known: Answers that are kept: those used last.
    """

    def __init__(
        self,
        simulate: Simulation[_Case, _Answer],
        *,
        most_missing: int = 8,
        most_known: int = 256,
    ) -> None:
        self._simulate = simulate
        self._most_known = most_known
        self._known: OrderedDict[_Case, _Answer] = OrderedDict()  # the one used last comes last
        self._missing: deque[_Case] = deque(maxlen=most_missing)
        self._lock = Lock()

    def known(self, case: _Case) -> _Answer | None:
        """Return what is known of a case, if anything is."""
        with self._lock:
            if case in self._known:
                self._known.move_to_end(case)
            return self._known.get(case)

    def simulate_later(self, case: _Case) -> None:
        """Have a case simulated, unless it was, or will be."""
        with self._lock:
            if case not in self._known and case not in self._missing:
                self._missing.append(case)

    def get(self, case: _Case) -> _Answer | None:
        """Return what is known of a case; None, and it will be simulated."""
        answer = self.known(case)
        if answer is None:
            self.simulate_later(case)
        return answer

    @property
    def is_missing_some(self) -> bool:
        """Whether something was asked for that is still to be simulated."""
        return bool(self._missing)

    def forget_missing(self) -> None:
        """Simulate nothing that was asked for before now."""
        with self._lock:
            self._missing.clear()

    def simulate_missing(self, after_event: Callable[[], None] = let_others_run) -> bool:
        """Simulate what was asked for, the last first; return whether there was anything.

        What fails is forgotten, and will be simulated when it is asked for again.

        Args:
            after_event: Called between events; may end it with an exception.
        """
        was_asked = bool(self._missing)
        while self._missing:
            case = self._missing[-1]  # and it stays there: it must not be asked for again meanwhile
            try:
                self._learn(case, self._simulate(case, after_event=after_event))
            finally:
                with self._lock, suppress(ValueError):  # newer ones may have pushed it out
                    self._missing.remove(case)
        return was_asked

    def _learn(self, case: _Case, answer: _Answer) -> None:
        with self._lock:
            self._known[case] = answer
            while len(self._known) > self._most_known:
                self._known.popitem(last=False)
