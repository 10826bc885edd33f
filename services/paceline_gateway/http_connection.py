"""One connection of a gateway's HTTP server: how long it may be silent, and beside how many."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import h11
from uvicorn.protocols.http.flow_control import service_unavailable
from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    import asyncio

__all__ = ["HttpConnection"]

_log = logging.getLogger(__name__)

_PROBES = "/health/"


class HttpConnection(H11Protocol):
    """A connection that no client can hold without asking for something.

    Args:
        head_seconds: How long a request's head may take from its first byte on, or the first one's
            from the connection on; and the rest of a body that was answered before it was there.
        limit: With so many connections requests are refused. Probes are answered all the same: a
            gateway that is full is no dead one.
        options: What uvicorn makes connections with.
    """

    def __init__(self, *, head_seconds: float, limit: int, **options: Any) -> None:
        super().__init__(**options)
        self._head_seconds = head_seconds
        self._limit = limit
        self._head_timer: asyncio.TimerHandle | None = None
        self._served, self.app = self.app, self._answer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first head."""
        super().connection_made(transport)
        self._follow_head()

    def data_received(self, data: bytes) -> None:
        """Take what came, which may begin a head or end it."""
        super().data_received(data)
        self._follow_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing more."""
        super().connection_lost(exc)
        self._stop_timer()

    def _follow_head(self) -> None:
        """Let the timer run while nothing is served.

        Between two requests uvicorn has a timer of its own, until the first byte.
        """
        if self.conn.our_state not in {h11.IDLE, h11.DONE}:
            self._stop_timer()
        elif self._head_timer is None and self.timeout_keep_alive_task is None:
            self._head_timer = self.loop.call_later(self._head_seconds, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        if len(self.connections) < self._limit or scope["path"].startswith(_PROBES):
            await self._served(scope, receive, send)
        else:
            _log.warning("a request is refused: there are %d connections", len(self.connections))
            await service_unavailable(scope, receive, send)
