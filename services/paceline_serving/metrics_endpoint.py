"""The metrics port: `/metrics`, and JSON pages such as `/debug/calls`, over HTTP.

The endpoint has a thread and an event loop of its own. A page takes milliseconds, for which no
token has to wait, and pages are answered while the server's loop hangs. The standard library's
server would give each connection a thread without a limit of time; a web framework would be a
dependency for one kind of answer. The endpoint understands the HTTP of scrapers: one GET for each
connection.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from paceline_serving.listener import Listener
from paceline_serving.sockets import bound_address, listen

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from prometheus_client import CollectorRegistry

    from paceline_serving.listener import Place

_log = logging.getLogger(__name__)

# More than a cluster has scrapers, and few, since descriptors are scarce.
_CONNECTION_LIMIT = 32
# Descriptors in reserve: for a connection, and for the files that a page reads.
_SPARE_DESCRIPTORS = 4
# Prometheus gives up after 10 s, too.
_CONNECTION_SECONDS = 10.0
_REQUEST_BYTES = 8192


class MetricsEndpoint:
    """Serves pages until it is closed.

    Each connection has 10 s in all. With more than 32, the longest open one is dropped, so silent
    ones cannot keep a scraper out. Some descriptors are kept for it.

    Args:
        address: HOST:PORT; port 0 is any free one.
        registry: The metrics of `/metrics`.
        pages: Path to a function whose result is sent as JSON; called on the endpoint's thread.

    Raises:
        OSError: The port cannot be bound, or there are no descriptors for the loop.

    Attributes:
        address: The bound address.
    """

    def __init__(
        self,
        address: str,
        *,
        registry: CollectorRegistry,
        pages: Mapping[str, Callable[[], Any]],
    ) -> None:
        self._registry = registry
        self._pages = pages
        self._socket = listen(address)
        self.address = bound_address(self._socket)
        started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(started,), name="paceline-metrics", daemon=True
        )
        self._thread.start()
        try:
            self._loop, self._closing = started.result()
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        """Stop listening, and drop open connections."""
        with suppress(RuntimeError):  # it is closed already
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    def _run(self, started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]) -> None:
        """Serve on the thread's loop; tell the starter if there cannot be one."""
        try:
            with asyncio.Runner() as runner:
                runner.run(self._serve(started))
        except BaseException as failure:
            if started.done():
                raise
            started.set_exception(failure)

    async def _serve(
        self, started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]
    ) -> None:
        self._listener = Listener(
            self._socket, self._protocol, limit=_CONNECTION_LIMIT, reserve=_SPARE_DESCRIPTORS
        )
        closing = asyncio.Event()
        started.set_result((asyncio.get_running_loop(), closing))
        await closing.wait()
        self._listener.close()
        for place in tuple(self._listener.places):
            place.abort()

    def _protocol(self, place: Place) -> asyncio.StreamReaderProtocol:
        """Make a connection's protocol. The connection counts as silent, so the oldest one goes."""
        return asyncio.StreamReaderProtocol(
            asyncio.StreamReader(limit=_REQUEST_BYTES), partial(self._connected, place)
        )

    async def _connected(
        self, place: Place, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        # A peer that leaves, says too much, or nothing.
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(_CONNECTION_SECONDS):
                request = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(request))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        writer.transport.abort()
        place.leave()

    def _answer(self, request: bytes) -> bytes:
        method, _, target = request.partition(b"\r\n")[0].partition(b" ")
        path = target.decode("latin-1").partition(" ")[0].partition("?")[0]
        if method != b"GET":
            return _response(HTTPStatus.METHOD_NOT_ALLOWED)
        try:
            if path == "/metrics":
                with self._listener.lent_descriptor():  # some numbers are read from files
                    content = generate_latest(self._registry)
                return _response(HTTPStatus.OK, CONTENT_TYPE_LATEST, content)
            if path in self._pages:
                content = json.dumps(self._pages[path]()).encode()
                return _response(HTTPStatus.OK, "application/json", content)
        except Exception:  # noqa: BLE001 - a page is the application's code; the port goes on
            _log.exception("the page %s failed", path)
            return _response(HTTPStatus.INTERNAL_SERVER_ERROR)
        return _response(HTTPStatus.NOT_FOUND)


def _response(status: HTTPStatus, content_type: str = "text/plain", body: bytes = b"") -> bytes:
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\n"
        f"Content-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + body
