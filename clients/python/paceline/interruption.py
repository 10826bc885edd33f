"""What ends an asyncio client's waits for anything but gRPC, whose calls end by themselves."""

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
    """Ends what one reader waits for: at a time, when told to, and when the client is closed.

    Args:
        endpoints: The client's.
        check_wanted: Raises ClientCancelledError once nobody wants an answer any more.
    """

    def __init__(
        self, endpoints: Endpoints[AsyncConnection], *, check_wanted: Callable[[], None]
    ) -> None:
        self._endpoints = endpoints
        self._check_wanted = check_wanted
        self._limit: asyncio.Timeout | None = None

    def interrupt(self) -> None:
        """End the wait, if there is one; for tasks of the reader's loop."""
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(float("-inf"))

    async def rest(self, seconds: float) -> None:
        """Sleep."""
        with suppress(TimeoutError):
            async with self._limited(seconds):
                await asyncio.Event().wait()

    async def pairs(self, metadata: CallMetadata, own: Pairs, *, seconds: float) -> Pairs:
        """Return what goes along with a call, whose token may have to be waited for.

        Raises:
            ClientCancelledError: Nobody wants it any more.
            DeadlineError: There is no token after so many seconds.
            Exception: What the callbacks raise.
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
        """Bound what is awaited inside, which then raises TimeoutError."""
        loop = asyncio.get_running_loop()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop was closed, and with it who waited
                loop.call_soon_threadsafe(self.interrupt)

        with self._endpoints.waking(wake):
            self._check_wanted()
            async with asyncio.timeout(seconds) as self._limit:
                try:
                    yield self._limit
                finally:
                    self._limit = None
