"""One client's connection: reads the body, notices a client that leaves or does not read."""

from __future__ import annotations

import asyncio
import json
import math
import re
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.errors import ClientCancelledError
from paceline_gateway.http.request_body import TOO_SLOW, read_body

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from starlette.types import Message, Receive, Scope, Send

    from paceline_gateway.errors import RequestError
    from paceline_gateway.http.request_body import BodyRules

_T = TypeVar("_T")

# Valid in JSON, but many readers of a stream take these letters for line breaks.
_ESCAPES = {ord(it): f"\\u{ord(it):04x}" for it in "\x85\u2028\u2029"}

_PIECE_VALUES = 64
IGNORED_HEADER = "x-paceline-ignored"
"""The answer's header with the places of unknown fields, which were left out."""

_MOST_SHOWN, _MOST_SHOWN_CHARACTERS = 20, 128
_UNPRINTABLE = re.compile(r"[^A-Za-z0-9_.$\[\]-]")


class Connection:
    """Reads from a client and sends to it, in bounded time and space.

    Args:
        request_id: The request's id in answers and logs.
        stall_seconds: How long the client may read nothing.
        has_cut: Set when the gateway ends, and no longer waits for clients.

    Attributes:
        request_id: The same.
        status: The sent status; 0 before.
        charge: Called with numbers of tokens that were computed for the client.
        lane: The client's lane in the orchestrators' queues.
        ignored: The places of unknown fields in the body; None: such fields are refused.
        error_event: Turns an error's body into the last event of a stream, with its name.
        translate: Turns an error into the form of the request's interface.
        headers: Further headers of the answer.
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        request_id: str,
        stall_seconds: float,
        has_cut: asyncio.Event,
    ) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._stall_seconds = stall_seconds
        self._has_cut = has_cut
        self._is_read = False
        self.request_id = request_id
        self.status = 0
        self.ignored: list[str] | None = None
        self.charge: Callable[[int], None] = lambda _: None
        self.lane = ""
        self.error_event: Callable[[Mapping[str, Any]], tuple[Mapping[str, Any], str]]
        self.error_event = lambda body: (body, "")
        self.translate: Callable[[RequestError], RequestError] = lambda error: error
        self.headers: dict[str, str] = {}

    @property
    def path(self) -> str:
        """The request's path."""
        return str(self._scope["path"])

    @property
    def host(self) -> str:
        """The client's host; empty if it is not known."""
        return (self._scope.get("client") or ("", 0))[0]

    @property
    def has_body(self) -> bool:
        """Whether the request's method has a body."""
        return bool(self._scope["method"] == "POST")

    async def body(self, rules: BodyRules, *, headers: Mapping[str, str]) -> bytes:
        """Read the whole body; see `read_body`."""
        content = await read_body(self._receive, rules, headers=headers)
        self._is_read = True
        return content

    async def refuse(self, error: RequestError) -> None:
        """Answer with an error; in a stream that has begun, as its last event.

        A client may still be sending its body, and read nothing before the body's end. Closing the
        connection at once could lose the answer, so the rest of the body is read and dropped.
        """
        error = self.translate(error)
        if self.status:
            content, name = self.error_event(error.body)
            await self.event(content, name=name)
            await self.end_events()
            return
        reads_on = self.has_body and not self._is_read and error.status != TOO_SLOW
        await self.answer(error.body, status=error.status, headers=error.headers, ends=not reads_on)
        if reads_on:
            await self._drop_body()
            await self.end_events()

    async def _drop_body(self) -> None:
        """Wait for the body's end, as long as a client may stall, or until the gateway ends."""
        waits = [asyncio.ensure_future(it) for it in (self._read_off(), self._has_cut.wait())]
        try:
            await asyncio.wait(
                waits, timeout=self._stall_seconds, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for wait in waits:
                wait.cancel()

    async def _read_off(self) -> None:
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect" or not message.get("more_body"):
                return

    async def while_connected(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Do some work for the client, after its body was read.

        Cancellation:
            When the client leaves, the work is cancelled, also at the servers.

        Raises:
            ClientCancelledError: The client left.
        """

        async def watch() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            working.cancel()

        async def kept() -> _T | Exception:
            try:
                return await work
            except Exception as error:  # noqa: BLE001 - raised below, outside the group
                return error
            finally:
                watching.cancel()

        async with asyncio.TaskGroup() as tasks:
            # In this order, so that the work has begun when it is cancelled.
            working = tasks.create_task(kept(), name="answer a client")
            watching = tasks.create_task(watch(), name="watch a client")
        if working.cancelled():
            raise ClientCancelledError("the client went away")
        outcome = working.result()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def answer(
        self,
        content: Any,
        *,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
        ends: bool = True,
        is_large: bool = False,
    ) -> None:
        """Send an answer as JSON; with `ends=False`, `end_events` ends it.

        Args:
            is_large: Whether it takes so long to write it that a thread has to.
        """
        text = await asyncio.to_thread(_large_json, content) if is_large else _json(content)
        body = text.encode("utf-8", "replace")
        await self._start(
            status,
            {
                "content-type": "application/json",
                "content-length": str(len(body)),
                **(headers or {}),
            },
        )
        await self._put({"type": "http.response.body", "body": body, "more_body": not ends})

    async def begin_events(self) -> None:
        """Begin an answer of server-sent events."""
        # nginx would buffer events.
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        await self._start(200, {"content-type": "text/event-stream; charset=utf-8", **headers})

    async def event(self, content: Any, *, name: str = "") -> None:
        """Send one event."""
        text = content if isinstance(content, str) else _json(content)
        head = f"event: {name}\n" if name else ""
        body = f"{head}data: {text}\n\n".encode("utf-8", "replace")
        await self._put({"type": "http.response.body", "body": body, "more_body": True})

    async def end_events(self) -> None:
        """End the answer."""
        await self._put({"type": "http.response.body", "body": b""})

    @property
    def shown_ignored(self) -> str:
        """The first places of unknown fields, as a header can have them."""
        return ", ".join(map(_shown, (self.ignored or [])[:_MOST_SHOWN]))

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        told = {"x-request-id": self.request_id, **self.headers}
        if self.ignored:
            told[IGNORED_HEADER] = self.shown_ignored
        pairs = {**told, **headers}.items()
        encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs]
        await self._put({"type": "http.response.start", "status": status, "headers": encoded})

    async def _put(self, message: Message) -> None:
        """Send a message, and wait while the client's buffers are full.

        Raises:
            ClientCancelledError: The client read nothing for too long.
        """
        try:
            async with asyncio.timeout(self._stall_seconds):
                await self._send(message)
        except (TimeoutError, OSError) as error:
            raise ClientCancelledError("the client does not read") from error


def _shown(place: str) -> str:
    """Return a field's place as a header can have it."""
    return _UNPRINTABLE.sub("?", place)[:_MOST_SHOWN_CHARACTERS]


def _json(content: Any) -> str:
    """Write JSON that every parser reads, in one line.

    Python's own words for NaN and infinities are not JSON.
    """
    try:
        text = json.dumps(content, ensure_ascii=False, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(content), ensure_ascii=False, allow_nan=False)
    return text.translate(_ESCAPES)


def _large_json(content: Any) -> str:
    """Write the same in pieces: the library lets no other thread run while it writes one."""
    match content:
        case dict():
            fields = (f"{_json(name)}: {_large_json(value)}" for name, value in content.items())
            return "{" + ", ".join(fields) + "}"
        case list() if len(content) > _PIECE_VALUES:
            starts = range(0, len(content), _PIECE_VALUES)
            pieces = (_json(content[start : start + _PIECE_VALUES])[1:-1] for start in starts)
            return "[" + ", ".join(pieces) + "]"
        case list():
            return "[" + ", ".join(map(_large_json, content)) + "]"
        case _:
            return _json(content)


def _finite(content: Any) -> Any:
    """Return the content with null for NaN and infinities."""
    match content:
        case float():
            return content if math.isfinite(content) else None
        case dict():
            return {name: _finite(value) for name, value in content.items()}
        case list() | tuple():
            return [_finite(value) for value in content]
        case _:
            return content
