"""A long computation on a thread that shares the interpreter with the event loop."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# Beside requests: of each 5 ms the interpreter is theirs for 4, and never waits for more than one.
_STEP_SECONDS = 0.001
_PAUSE_SECONDS = 0.004
# At first there is enough for all cases of a new system. Then a twentieth of a core: on a machine
# whose latencies swing, each request brings cases that were not simulated yet.
_FIRST_SECONDS, _SHARE = 10.0, 0.05


class Allowance:
    """How much may be computed in the background: so many seconds, which grow again with time.

    Args:
        clock: In seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._left = _FIRST_SECONDS
        self._seen = clock()

    def is_left(self) -> bool:
        """Add what has grown since the last question, and tell whether any is left."""
        now = self._clock()
        self._left = min(_FIRST_SECONDS, self._left + (now - self._seen) * _SHARE)
        self._seen = now
        return self._left > 0

    def spend(self, seconds: float) -> None:
        """Note what was computed, also beyond what was left."""
        self._left -= seconds


class ComputationEndedError(Exception):
    """The computation was told to end."""


class BackgroundComputation:
    """A long computation: when it pauses for requests, and when it ends.

    Concurrency:
        `make_way` is for the computing thread; all else may be called from any.

    Args:
        clock: In seconds.
        pause: Waits for so many seconds, or until the computation is to end; None: really.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.perf_counter,
        pause: Callable[[float], object] | None = None,
    ) -> None:
        self._clock = clock
        self._ended = threading.Event()
        self._pause = pause or self._ended.wait
        self._has_company = False
        self._began = clock()

    def share(self, *, with_requests: bool) -> None:
        """Compute in short steps from here on, since requests run; or without pauses."""
        self._has_company = with_requests

    def end(self) -> None:
        """Have the computation end with its present step."""
        self._ended.set()

    def make_way(self) -> None:
        """Let others run, if it is their turn; to be called at least each millisecond or so.

        Raises:
            ComputationEndedError: It is to end.
        """
        if not self._has_company:
            let_others_run()
        elif self._clock() - self._began >= _STEP_SECONDS:
            self._pause(_PAUSE_SECONDS)
            self._began = self._clock()
        if self._ended.is_set():
            raise ComputationEndedError


def let_others_run() -> None:
    """Release the interpreter, which a computing thread else keeps from the event loop for 5 ms."""
    time.sleep(0)
