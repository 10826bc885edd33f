"""Simulations on a thread, by which plans become better than their formulas say."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from paceline_orchestrator.planning.background_computation import (
    Allowance,
    BackgroundComputation,
    ComputationEndedError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline_orchestrator.planning.planner import Planner

_log = logging.getLogger(__name__)

# Plans may wait this long for a moment at rest in which to be refined.
_PATIENCE_SECONDS = 10.0


class Refinement:
    """Lets the planner simulate what it was lately asked for, one computation at a time.

    Args:
        planner: Knows what was asked for, and keeps what the simulations find.
        clock: In seconds.
        thread_clock: CPU time of the thread that asks, in seconds.
    """

    def __init__(
        self,
        planner: Planner,
        *,
        clock: Callable[[], float],
        thread_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._planner = planner
        self._clock = clock
        self._thread_clock = thread_clock
        self._allowance = Allowance(clock)
        self._running: asyncio.Task[None] | None = None
        self._computing = BackgroundComputation()
        self._missing_since: float | None = None
        self._is_ending = False

    def begin_at_rest(self, tasks: asyncio.TaskGroup) -> None:
        """Begin to simulate, if there is something to simulate: no request runs.

        Cancellation:
            Ends its thread, too, within some milliseconds; so does `end`.
        """
        self._begin(tasks, with_requests=False)

    def note_request(self, tasks: asyncio.TaskGroup) -> None:
        """Note that a request runs: simulations make way for it from now on.

        A simulation begins beside requests only if one has been due for ten seconds without a
        moment in which no request ran.
        """
        self._computing.share(with_requests=True)
        if not self._planner.is_missing_some:
            self._missing_since = None
        elif self._missing_since is None:
            self._missing_since = self._clock()
        elif self._clock() - self._missing_since >= _PATIENCE_SECONDS:
            self._missing_since = None
            self._begin(tasks, with_requests=True)

    def end(self) -> None:
        """Let the planner's thread end, and begin no other: the process is about to stop."""
        self._is_ending = True
        self._computing.end()

    def _begin(self, tasks: asyncio.TaskGroup, *, with_requests: bool) -> None:
        self._computing.share(with_requests=with_requests)
        if self._is_ending or (self._running is not None and not self._running.done()):
            return
        if not self._allowance.is_left():
            return  # plans stay as they are meanwhile
        self._computing = BackgroundComputation()
        self._computing.share(with_requests=with_requests)
        self._running = tasks.create_task(self._refine(self._computing), name="refine the plan")

    async def _refine(self, computing: BackgroundComputation) -> None:
        try:
            await asyncio.to_thread(self._compute, computing)
        except Exception:  # noqa: BLE001 - requests can do without it, and must not end with it
            _log.exception("the planner failed")
        finally:
            computing.end()  # a thread goes on where its task was cancelled

    def _compute(self, computing: BackgroundComputation) -> None:
        """Refine, on a thread, and note what it took, also where it failed."""
        began = self._thread_clock()
        try:
            with suppress(ComputationEndedError):
                self._planner.refine(computing.make_way)
        finally:
            self._allowance.spend(self._thread_clock() - began)
