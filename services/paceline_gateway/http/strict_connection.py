"""One connection of a gateway's HTTP server: its limits of time, and its strict parsing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import h11
from starlette.responses import JSONResponse
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from paceline_gateway.errors import RequestError
from paceline_gateway.http.request_head import HeadError, check_head, end_of_head, path_of

if TYPE_CHECKING:
    import asyncio

    from paceline_serving.listener import Place

_EMPTY_LINE = b"\r\n"
_PROBES = "/health"
_TRANSFER_ENCODING = b"transfer-encoding"


class HttpConnection(H11Protocol):
    """A connection that a client cannot hold without a request.

    Args:
        place: The connection's place at the listener. In a spare place only probes are answered,
            so that a full gateway is not taken for a dead one.
        head_seconds: Most seconds of a request's head, from its first byte or, for the first
            request, from the connection on; also of the rest of a body that was answered early.
        options: uvicorn's arguments of a connection.
    """

    def __init__(self, place: Place, *, head_seconds: float, **options: Any) -> None:
        super().__init__(**options)
        self._place = place
        self._head_seconds = head_seconds
        self._head_timer: asyncio.TimerHandle | None = None
        self._strict = _StrictConnection(h11.SERVER)
        self.conn = self._strict
        self._served, self.app = self.app, self._answer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first head."""
        super().connection_made(transport)
        self._follow_head()

    def data_received(self, data: bytes) -> None:
        """Parse bytes, which may begin a head or end it.

        Some clients send an empty line after a body; it does not begin a head.
        """
        if data == _EMPTY_LINE and self.timeout_keep_alive_task is not None:
            return
        super().data_received(data)
        self._follow_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        super().connection_lost(exc)
        self._stop_timer()
        self._place.leave()

    def on_response_complete(self) -> None:
        """Wait for the next head, which may have been received already."""
        super().on_response_complete()
        self._follow_head()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not a request, and end the connection, since its rest is unknown.

        For a request that is being answered, the client has left.
        """
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            self._refuse(msg)
        self.transport.close()

    def _refuse(self, msg: str) -> None:
        refusal = self._strict.refusal
        error = RequestError(str(refusal or msg), status=refusal.status if refusal else 400)
        body = json.dumps(error.body).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            CLOSE_HEADER,
        ]
        reason = STATUS_PHRASES[error.status]
        for event in (
            h11.Response(status_code=error.status, headers=headers, reason=reason),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: a client that offers another protocol is answered in HTTP."""

    def _follow_head(self) -> None:
        """Let the timer run while no request is served.

        Between two requests uvicorn has a timer of its own, until the first byte.
        """
        if self.conn.our_state not in {h11.IDLE, h11.DONE}:
            self._stop_timer()
            self._place.speaks()
            return
        self._place.falls_silent()
        if self._head_timer is None and self.timeout_keep_alive_task is None:
            self._head_timer = self.loop.call_later(self._head_seconds, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        if self._place.is_spare and not scope["path"].startswith(_PROBES):
            await _full()(scope, receive, send)
        elif any(name == _TRANSFER_ENCODING for name, _ in scope["headers"]):
            await self._served(scope, receive, _ending_with(send))
        else:
            await self._served(scope, receive, send)


class _StrictConnection(h11.Connection):
    """h11, for heads that can be read in one way only.

    One empty line before a head is skipped, as the standard wants; only one, since a client could
    send empty lines for ever.

    Attributes:
        refusal: The reason for which a head was refused.
    """

    refusal: HeadError | None = None
    _has_passed_a_line = False

    def next_event(self) -> Any:
        """Return the next event.

        Raises:
            RemoteProtocolError: The bytes are not HTTP, or can be read in two ways.
        """
        try:
            if self.their_state is h11.IDLE:
                received = self.trailing_data[0]
                if received.startswith(_EMPTY_LINE) and not self._has_passed_a_line:
                    self._has_passed_a_line = True
                    self._receive_buffer.maybe_extract_at_most(len(_EMPTY_LINE))
                    received = self.trailing_data[0]
                check_head(received[: end_of_head(received)])
            event = super().next_event()
            if isinstance(event, h11.Request):
                self._has_passed_a_line = False
                event = _with_path(event)
            return event
        except HeadError as error:
            self.refusal = error
            raise h11.RemoteProtocolError(str(error)) from None
        except h11.RemoteProtocolError as error:
            self.refusal = HeadError(str(error), status=error.error_status_hint)
            raise


def _with_path(request: h11.Request) -> h11.Request:
    """Return a request whose target is its path."""
    path = path_of(request.target)
    if path == request.target:
        return request
    return h11.Request(
        method=request.method,
        target=path,
        headers=request.headers.raw_items(),
        http_version=request.http_version,
    )


def _full() -> JSONResponse:
    error = RequestError(
        "too many connections are open here",
        status=503,
        kind="server_error",
        code="overloaded",
        retry_after_seconds=1,
    )
    headers = {**error.headers, "connection": "close"}
    return JSONResponse(error.body, status_code=error.status, headers=headers)


def _ending_with(send: Any) -> Any:
    """Make an answer the connection's last one.

    A chunked body contains its own end. If a proxy and h11 read that end differently, another
    client's request could begin inside the body.
    """

    async def send_last(message: Any) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), CLOSE_HEADER]}
        await send(message)

    return send_last
