"""One request's body, read in bounded time and space.

How large a body may be follows from what orchestrators take, which follows from their model's
context. A small body is read without asking; for a larger one the gateway has to know.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import ClientCancelledError
from paceline_gateway.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from starlette.types import Receive

__all__ = ["SMALL_BYTES", "TOO_SLOW", "BodyRules", "read_body"]

TOO_SLOW = 408
"""The status of a body that did not come in time."""

SMALL_BYTES = 1 << 20
"""What is read whatever the model is; and what a client has its time for, once more for each."""


@dataclass(frozen=True, slots=True)
class BodyRules:
    """What a body may take.

    Attributes:
        ceiling_bytes: What no body may exceed, whatever the model is.
        most_bytes: Tells what the model's context needs.
        keep: Called with numbers of bytes as they are kept; raises where there is no room.
        mebibyte_seconds: How long each mebibyte may take, a begun one included.
    """

    ceiling_bytes: int
    most_bytes: Callable[[], Awaitable[int]]
    keep: Callable[[int], None]
    mebibyte_seconds: float


async def read_body(receive: Receive, rules: BodyRules, *, headers: Mapping[str, str]) -> bytes:
    """Read a whole body.

    Raises:
        RequestError: It is too large, or came too slowly, or there is no room for it now.
        ClientCancelledError: The client left.
        PacelineError: It is no small one, and nobody could say how large it may be.
    """
    return await _Reader(receive, rules).read(headers)


class _Reader:
    """Reads one body."""

    def __init__(self, receive: Receive, rules: BodyRules) -> None:
        self._receive = receive
        self._rules = rules
        self._limit_bytes = min(SMALL_BYTES, rules.ceiling_bytes)
        self._is_told = False
        self._content = bytearray()

    async def read(self, headers: Mapping[str, str]) -> bytes:
        await self._allow(int(headers.get("content-length", "0")))
        received = 0
        seconds = self._rules.mebibyte_seconds
        try:
            async with asyncio.timeout(seconds) as limit:
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientCancelledError("the client went away")
                    piece: bytes = message.get("body", b"")
                    begun = received // SMALL_BYTES
                    received += len(piece)
                    if more := received // SMALL_BYTES - begun:
                        limit.reschedule((limit.when() or 0.0) + more * seconds)
                    await self._keep(piece)
                    if not message.get("more_body"):
                        return bytes(self._content)
        except TimeoutError:
            raise RequestError("the body did not come", status=TOO_SLOW, code="timeout") from None

    async def _keep(self, piece: bytes) -> None:
        await self._allow(len(self._content) + len(piece))
        self._rules.keep(len(piece))
        self._content += piece

    async def _allow(self, byte_count: int) -> None:
        """Refuse a body of so many bytes if it is too large; ask once what that is."""
        if byte_count > self._rules.ceiling_bytes:
            raise _too_large(self._rules.ceiling_bytes)
        if byte_count > self._limit_bytes and not self._is_told:
            self._limit_bytes = min(await self._rules.most_bytes(), self._rules.ceiling_bytes)
            self._is_told = True
        if byte_count > self._limit_bytes:
            raise _too_large(self._limit_bytes)


def _too_large(limit_bytes: int) -> RequestError:
    return RequestError(
        f"the body has more than {limit_bytes} bytes, the most that is taken here",
        status=413,
        code="too_large",
    )
