"""Ends an asyncio client's waits for a token or a time; gRPC's calls end by themselves."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from paceline.errors import DeadlineError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from paceline.call_metadata import CallMetadata, Pairs
    from paceline.connection import AsyncConnection
    from paceline.endpoints import Endpoints


class Interruption:
    """Ends a reader's wait: at a time, on demand, and when the client is closed.

    Args:
        endpoints: The client's.
        check_wanted: Raises ClientCancelledError when the answer is no longer wanted.
    """

    def __init__(
        self, endpoints: Endpoints[AsyncConnection], *, check_wanted: Callable[[], None]
    ) -> None:
        self._endpoints = endpoints
        self._check_wanted = check_wanted
        self._limit: asyncio.Timeout | None = None

    def interrupt(self) -> None:
        """End the wait, if there is one. Only tasks of the reader's loop may call this."""
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(float("-inf"))

    async def rest(self, seconds: float) -> None:
        """Sleep."""
        with suppress(TimeoutError):
            async with self._limited(seconds):
                await asyncio.Event().wait()

    async def pairs(self, metadata: CallMetadata, own: Pairs, *, seconds: float) -> Pairs:
        """Return the metadata of a call; the token may be an awaitable.

        Raises:
            ClientCancelledError: The answer is no longer wanted.
            DeadlineError: The token did not come within the seconds.
            Exception: An exception of a callback.
        """
        try:
            async with self._limited(seconds) as limit:
                pairs = await metadata.pairs_async(own)
        except TimeoutError as late:
            self._check_wanted()
            if not limit.expired():
                raise  # the callback's own
            raise DeadlineError("the token did not come in time") from late
        self._check_wanted()  # the token may have taken a while
        return pairs

    @asynccontextmanager
    async def _limited(self, seconds: float) -> AsyncIterator[asyncio.Timeout]:
        """Limit the time of the awaits inside, which then raise TimeoutError."""
        loop = asyncio.get_running_loop()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop was closed, and the waiting task with it
                loop.call_soon_threadsafe(self.interrupt)

        with self._endpoints.waking(wake):
            self._check_wanted()
            async with asyncio.timeout(seconds) as self._limit:
                try:
                    yield self._limit
                finally:
                    self._limit = None
