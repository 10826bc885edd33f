"""An answer that many requests want at the same moment."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Generic, TypeVar

from paceline.errors import PacelineError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

_T = TypeVar("_T")


class SharedAnswer(Generic[_T]):
    """Asked for once for all who want it, and kept for a while.

    Cancellation:
        Who waits no longer leaves the question to the others.

    Args:
        ask: Asks.
        tasks: Where questions run.
        fresh_seconds: How long an answer is kept.
        clock: A monotonic clock, in seconds.
    """

    def __init__(
        self,
        ask: Callable[[], Awaitable[_T]],
        *,
        tasks: asyncio.TaskGroup,
        fresh_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._tasks = tasks
        self._fresh_seconds = fresh_seconds
        self._clock = clock
        self._asking: asyncio.Task[_T | PacelineError] | None = None
        self._kept: tuple[float, _T] | None = None

    async def get(self) -> _T:
        """Return the answer that is kept, or the one to the question under way.

        Raises:
            PacelineError: There is none.
        """
        if self._kept is not None and self._clock() - self._kept[0] <= self._fresh_seconds:
            return self._kept[1]
        if self._asking is None:
            self._asking = self._tasks.create_task(self._outcome(), name="ask for all who wait")
        outcome = await asyncio.shield(self._asking)
        if isinstance(outcome, PacelineError):
            raise outcome
        return outcome

    def close(self) -> None:
        """Ask no more."""
        if self._asking is not None:
            self._asking.cancel()

    async def _outcome(self) -> _T | PacelineError:
        """Ask; an error is returned, since it is not the end of the tasks' owner."""
        try:
            answer = await self._ask()
        except PacelineError as error:
            return error
        else:
            self._kept = (self._clock(), answer)
            return answer
        finally:
            self._asking = None
