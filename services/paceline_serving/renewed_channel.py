"""A channel whose next connection uses the current certificates."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.credentials import Credentials

# Time for the running calls of a connection that its server is ending.
_COURTESY_SECONDS = 60.0
# A channel that works, and one that was closed: calls on it get an error that says so.
_KEPT = frozenset({grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.SHUTDOWN})


class RenewedChannel:
    """Acts as a gRPC channel, and opens another one after certificates were renewed.

    gRPC binds a channel to its credentials for ever. A working connection is kept: TLS uses
    certificates only at the beginning, and a server may get its renewed one later than this
    process.

    Generated stubs accept it as a channel.

    Args:
        open_channel: Opens a channel with credentials.
        credentials: The current credentials; the channel is replaced if its own differ.
    """

    def __init__(
        self,
        open_channel: Callable[[grpc.ChannelCredentials], grpc.aio.Channel],
        credentials: Credentials,
    ) -> None:
        self._open_channel = open_channel
        self._credentials = credentials
        self._used = credentials.current()
        self._channel = open_channel(self._used)
        self._leaving: dict[asyncio.Task[None], grpc.aio.Channel] = {}

    def unary_unary(self, method: str, *codecs: Any, **options: Any) -> Callable[..., Any]:
        """Make a method's stub; see grpc.aio.Channel."""
        return self._stub("unary_unary", method, *codecs, **options)

    def unary_stream(self, method: str, *codecs: Any, **options: Any) -> Callable[..., Any]:
        """Make a method's stub; see grpc.aio.Channel."""
        return self._stub("unary_stream", method, *codecs, **options)

    def stream_stream(self, method: str, *codecs: Any, **options: Any) -> Callable[..., Any]:
        """Make a method's stub; see grpc.aio.Channel."""
        return self._stub("stream_stream", method, *codecs, **options)

    async def close(self, grace: float | None = None) -> None:
        """Close the channel; its calls end after the grace."""
        for task, channel in tuple(self._leaving.items()):
            task.cancel()
            await channel.close(None)
        await self._channel.close(grace)

    def _stub(self, kind: str, *arguments: Any, **options: Any) -> Callable[..., Any]:
        """Make a stub that is made again with the channel."""
        channel: grpc.aio.Channel | None = None
        stub: Callable[..., Any]

        def begin(*request: Any, **call: Any) -> Any:
            nonlocal channel, stub
            if (current := self._current()) is not channel:
                channel, stub = current, getattr(current, kind)(*arguments, **options)
            return stub(*request, **call)

        return begin

    def _current(self) -> grpc.aio.Channel:
        """Return the channel for a new call: the same while it is connected."""
        if self._channel.get_state() not in _KEPT:
            renewed = self._credentials.current()
            if renewed is not self._used:
                self._leave(self._channel)
                self._used, self._channel = renewed, self._open_channel(renewed)
        return self._channel

    def _leave(self, channel: grpc.aio.Channel) -> None:
        task = asyncio.get_running_loop().create_task(_close_later(channel), name="leave a channel")
        self._leaving[task] = channel
        task.add_done_callback(self._leaving.pop)


async def _close_later(channel: grpc.aio.Channel) -> None:
    await asyncio.sleep(_COURTESY_SECONDS)
    await channel.close(None)
