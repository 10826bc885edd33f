"""An answer that many requests need at the same time."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

_T = TypeVar("_T")


class SharedAnswer(Generic[_T]):
    """An answer that is asked for once for all waiting requests, and kept for a while.

    Cancellation:
        A cancelled request leaves the question to the other waiting requests.

    Args:
        ask: Asks for the answer.
        tasks: Owns the tasks of questions.
        fresh_seconds: Seconds for which an answer is kept.
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
        self._asking: asyncio.Task[_T | Exception] | None = None
        self._kept: tuple[float, _T] | None = None

    async def get(self) -> _T:
        """Return the kept answer, or the answer to the running question.

        Raises:
            Exception: The question failed, for all that wait.
        """
        if self._kept is not None and self._clock() - self._kept[0] <= self._fresh_seconds:
            return self._kept[1]
        if self._asking is None:
            self._asking = self._tasks.create_task(self._outcome(), name="ask for all who wait")
        outcome = await asyncio.shield(self._asking)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def close(self) -> None:
        """Ask no more."""
        if self._asking is not None:
            self._asking.cancel()

    async def _outcome(self) -> _T | Exception:
        """Ask; return an error instead of raising it, which would end the tasks' owner."""
        try:
            answer = await self._ask()
        except Exception as error:  # noqa: BLE001 - each request that waits raises it
            return error
        else:
            self._kept = (self._clock(), answer)
            return answer
        finally:
            self._asking = None
