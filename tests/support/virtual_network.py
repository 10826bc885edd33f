"""gRPC without sockets: calls go to handlers in this process, later by a drawn delay.

What generated stubs call is here, with the semantics of `paceline_serving.transport.pod_channel`
(tests/unit/orchestrator/test_virtual_network.py holds both to the same). Messages are serialised,
the order within a call is kept, and calls can overtake each other. Every call is recorded.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

from paceline import errors, status
from paceline_serving.transport import POD_CHANNEL_OPTIONS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Generator, Mapping

# A peer that answers no pings is noticed; see POD_CHANNEL_OPTIONS.
_FROZEN_SECONDS = 2.0
HEALTH = "/grpc.health.v1.Health/Watch"
_MOST_BYTES = dict(POD_CHANNEL_OPTIONS)["grpc.max_receive_message_length"]


@dataclass(eq=False)
class CallRecord:
    """A call, as its client and its server saw it. Times are the loop's.

    Attributes:
        number: In the order in which they were sent to this server.
        server: Its name.
        method: Such as "Verify".
        request: The message.
        standing: What the orchestrator thought of the server then: None is ready.
        sent_at: When the client made it.
        withdrawn_at: When the client cancelled it, if only after its end.
        ended_at: When the client knew how it ended.
        end: "answered", "withdrawn", or the error's reason or code.
        messages: What the client got, and when.
        arrived_at: When its handler began.
        left_at: When its handler ended.
        left: "answered", "cancelled" (also by the connection's end), or a reason.
    """

    number: int
    server: str
    method: str
    request: Any
    standing: str | None
    sent_at: float
    withdrawn_at: float | None = None
    ended_at: float | None = None
    end: str = ""
    messages: list[tuple[float, Any]] = field(default_factory=list)
    arrived_at: float | None = None
    left_at: float | None = None
    left: str = ""

    @property
    def session_id(self) -> str:
        """The session that it is about."""
        call = getattr(self.request, "call", self.request)
        return str(getattr(call, "session_id", ""))


class Link:
    """The way to one server, and what is wrong with it.

    Args:
        name: The server's.
        seed: Draws the delays.

    Attributes:
        delay_seconds: The least and the most that a message takes.
        is_up: Whether the server can be reached.
        held: Methods, such as "Verify", whose calls do not get through for now. They do later.
        records: The calls, in the order in which they were sent, without health streams.
        watch_count: How many health streams were begun.
        bugs: What handlers raised that no handler should.
    """

    def __init__(self, name: str, *, seed: int = 0) -> None:
        self.name = name
        self.delay_seconds = (0.0002, 0.0004)
        self.is_up = True
        self.held: set[str] = set()
        self.records: list[CallRecord] = []
        self.watch_count = 0
        self.bugs: list[BaseException] = []
        self.handlers: dict[str, Any] = {}
        self._random = Random(f"{seed} {name}")
        self._connected: set[VirtualCall] = set()
        self._changed = asyncio.Event()
        self._is_frozen = False
        self._backlog: list[Callable[[], None]] = []

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Take a service's handlers; called by generated code."""
        self.handlers.update({f"/{service}/{name}": it for name, it in handlers.items()})

    def add_generic_rpc_handlers(self, _handlers: object) -> None:
        """Take them in their other form; called by generated code."""

    def hold(self, *methods: str) -> None:
        """Let calls of these methods wait at the door."""
        self.held.update(methods)

    def release(self) -> None:
        """Let all through, also what waits at the door."""
        self.held.clear()
        self.tell()

    def freeze(self) -> None:
        """Let nothing through either way; after a while the connection breaks."""
        self._is_frozen = True
        asyncio.get_running_loop().call_later(_FROZEN_SECONDS, self._break_if_frozen)

    def thaw(self) -> None:
        """Go on: what is on its way arrives."""
        self._is_frozen = False
        backlog, self._backlog = self._backlog, []
        for deliver in backlog:
            deliver()
        self.restore()

    def break_off(self) -> None:
        """Break the connection, and refuse others."""
        self.is_up = False
        for call in tuple(self._connected):
            call.lose_server()
        self.tell()

    def restore(self) -> None:
        """Accept connections."""
        self.is_up = True
        self.tell()

    def tell(self) -> None:
        """Let those look again who wait in `until`."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return once a condition holds; looked at after each `tell`."""
        while not condition():
            await self._changed.wait()

    # --- for its calls ------------------------------------------------------------------------

    def delay(self) -> float:
        """Draw how long a message takes."""
        return self._random.uniform(*self.delay_seconds)

    def lets_in(self, method: str) -> bool:
        """Whether a call gets to the server."""
        return method not in self.held and not self._is_frozen

    def deliver(self, action: Callable[[], None]) -> None:
        """Do something at the other end, unless nothing gets there for now."""
        if self._is_frozen:
            self._backlog.append(action)
        else:
            action()

    def connect(self, call: VirtualCall) -> None:
        """Note a call that ends with the connection."""
        self._connected.add(call)

    def disconnect(self, call: VirtualCall) -> None:
        """Forget it; again is fine."""
        self._connected.discard(call)

    def _break_if_frozen(self) -> None:
        if self._is_frozen:
            self._backlog.clear()
            self.break_off()


class VirtualChannel:
    """What stubs call. It stands for `pod_channel`.

    Args:
        link: To the server.
        standing: Tells what the orchestrator thinks of the server.
    """

    def __init__(self, link: Link, *, standing: Callable[[], str | None] = lambda: None) -> None:
        self._link = link
        self._standing = standing
        self._calls: set[VirtualCall] = set()
        self._is_closed = False

    def unary_unary(
        self, method: str, request_serializer: Any, response_deserializer: Any, **_options: Any
    ) -> Callable[..., VirtualCall]:
        """Make a method's stub; see grpc.aio.Channel."""

        def begin(
            request: Any, *, timeout: float | None = None, wait_for_ready: bool = False
        ) -> VirtualCall:
            if timeout is None:
                raise ValueError(f"{method!r} was called without a timeout")
            if self._is_closed:
                raise errors.ConnectionLostError("the channel is closed")
            record = self._record(method, request)
            call = VirtualCall(
                self._link,
                record,
                self._link.handlers[method],
                request=request_serializer(request),
                read=response_deserializer,
                timeout_seconds=timeout,
                wait_for_ready=wait_for_ready,
            )
            self._calls.add(call)
            call.when_over(self._calls.discard)
            return call

        return begin

    unary_stream = unary_unary

    async def close(self, grace: float | None = None) -> None:
        """Close the channel, and cancel its calls."""
        self._is_closed = True
        for call in tuple(self._calls):
            call.cancel()

    def _record(self, method: str, request: Any) -> CallRecord:
        records = self._link.records
        record = CallRecord(
            number=len(records),
            server=self._link.name,
            method=method.rpartition("/")[2],
            request=request,
            standing=self._standing(),
            sent_at=asyncio.get_running_loop().time(),
        )
        if method == HEALTH:
            self._link.watch_count += 1
        else:
            records.append(record)
        return record


class VirtualCall:
    """The client's end of a call, and what carries it to its handler and back.

    Await it, or iterate over it, once; see grpc.aio's UnaryUnaryCall and UnaryStreamCall.
    """

    def __init__(
        self,
        link: Link,
        record: CallRecord,
        handler: Any,
        *,
        request: bytes,
        read: Callable[[bytes], Any],
        timeout_seconds: float,
        wait_for_ready: bool,
    ) -> None:
        loop = self._loop = asyncio.get_running_loop()
        self._link = link
        self._record = record
        self._handler = handler
        self._request = request
        self._read = read
        self._waits_for_ready = wait_for_ready
        self._inbox: deque[Any] = deque()
        self._news = asyncio.Event()
        self._is_over = False
        self._failure: BaseException | None = None
        self._callbacks: list[Callable[[VirtualCall], object]] = []
        self._latest_arrival = 0.0
        self._is_under_way = self._is_unwanted = self._is_served = False
        self._timer = loop.call_later(timeout_seconds, self._end_late)
        self._serving = loop.create_task(
            self._carry(), name=f"network: {record.method} at {link.name}"
        )

    # --- the client's end ---------------------------------------------------------------------

    def __await__(self) -> Generator[Any, None, Any]:
        return self._answer().__await__()

    async def __aiter__(self) -> AsyncIterator[Any]:
        try:
            while self._inbox or not self._is_over:
                if self._inbox:
                    yield self._inbox.popleft()
                else:
                    await self._wait()
        finally:
            self._end("withdrawn", asyncio.CancelledError())
        if self._failure is not None:
            raise self._failure

    def cancel(self) -> bool:
        """End it, unless it has ended; tell whether it had not. What was not yet read is lost."""
        if self._record.withdrawn_at is None:
            self._record.withdrawn_at = self._loop.time()
        if self._is_over:
            if self._inbox and self._handler.unary_stream:
                self._inbox.clear()
                self._failure = asyncio.CancelledError()
            return False
        self._inbox.clear()
        self._end("withdrawn", asyncio.CancelledError())
        return True

    def when_over(self, callback: Callable[[VirtualCall], object]) -> None:
        """Have it called when the client knows how it ended."""
        self._callbacks.append(callback)

    async def _answer(self) -> Any:
        try:
            while not self._is_over:
                await self._wait()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if self._failure is not None:
            raise self._failure
        return self._inbox.popleft()

    async def _wait(self) -> None:
        self._news.clear()
        await self._news.wait()

    def _end(self, end: str, failure: BaseException | None = None) -> None:
        if self._is_over:
            return
        self._is_over, self._failure = True, failure
        self._record.ended_at, self._record.end = self._loop.time(), end
        self._timer.cancel()
        self._news.set()
        for callback in self._callbacks:
            callback(self)
        if self._is_served:
            self._link.disconnect(self)
        else:
            self._loop.call_later(self._link.delay(), self._link.deliver, self._withdraw)

    def _end_late(self) -> None:
        self._fail(errors.DeadlineError("Deadline Exceeded"))

    def _take(self, message: bytes) -> None:
        if self._is_over:
            return
        if len(message) > _MOST_BYTES:
            too_large = (
                f"CLIENT: Received message larger than max ({len(message)} vs. {_MOST_BYTES})"
            )
            self._end("too large", _status(grpc.StatusCode.RESOURCE_EXHAUSTED, too_large))
            return
        try:
            self._inbox.append(self._read(message))
        except DecodeError:
            self._inbox.append(None)  # so does our channel
        else:
            self._record.messages.append((self._loop.time(), self._inbox[-1]))
        self._news.set()

    def _fail(self, error: errors.PacelineError) -> None:
        self._end(error.reason or error.code, _rpc_error(error))

    # --- the server's end ---------------------------------------------------------------------

    def lose_server(self) -> None:
        """The connection breaks: the client hears of it, and the handler is cancelled."""
        self._serving.cancel()
        lost = errors.ConnectionLostError("the connection broke")
        self._loop.call_later(self._link.delay(), self._fail, lost)

    def _withdraw(self) -> None:
        """A cancel arrives: on no account before what it cancels."""
        if self._is_under_way:
            self._is_unwanted = True
        else:
            self._serving.cancel()

    async def _carry(self) -> None:
        link, record = self._link, self._record
        if not link.is_up and not self._waits_for_ready:
            await asyncio.sleep(link.delay())
            self._is_served = True
            self._fail(errors.ConnectionLostError("failed to connect"))
            return
        await link.until(lambda: link.is_up)
        link.connect(self)
        try:
            self._is_under_way = True
            await asyncio.sleep(link.delay())
            await link.until(lambda: link.lets_in(record.method))
            self._is_under_way = False
            record.arrived_at = self._loop.time()
            if self._is_unwanted:  # begun all the same, and cancelled where it first waits
                self._loop.call_soon(self._serving.cancel)
            await self._serve()
        finally:
            self._is_served = True
            if self._is_over:
                link.disconnect(self)

    async def _serve(self) -> None:
        try:
            await self._handle()
        except asyncio.CancelledError:
            self._leave("cancelled")
            raise
        except _AbortedError as end:
            self._leave(end.error.code().name)
            self._send(partial(self._end, end.error.code().name, end.error))
        except errors.PacelineError as error:
            self._leave(error.reason)
            self._send(partial(self._fail, error))
        except Exception as bug:  # noqa: BLE001 - told by whoever looks at `bugs`
            self._link.bugs.append(bug)
            self._leave("a bug")
            self._send(partial(self._fail, errors.InternalError(repr(bug))))
        else:
            self._leave("answered")
            self._send(partial(self._end, "answered"))

    async def _handle(self) -> None:
        request = self._handler.request_deserializer(self._request)
        context = SimpleNamespace(invocation_metadata=lambda: (), abort=_abort)
        if self._handler.unary_unary:
            self._answer_with(await self._handler.unary_unary(request, context))
            return
        async with aclosing(self._handler.unary_stream(request, context)) as answers:
            async for answer in answers:
                self._answer_with(answer)

    def _answer_with(self, message: Any) -> None:
        serialise = self._handler.response_serializer  # none: these are bytes
        self._send(partial(self._take, serialise(message) if serialise else message))

    def _leave(self, left: str) -> None:
        self._record.left_at, self._record.left = self._loop.time(), left

    def _send(self, action: Callable[[], None]) -> None:
        """Let it happen at the client's end, after what was sent before."""
        at = max(self._latest_arrival + 1e-9, self._loop.time() + self._link.delay())
        self._latest_arrival = at
        self._loop.call_at(at, self._link.deliver, action)


class _AbortedError(Exception):
    """A handler ended its call with a status of its own words."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        super().__init__(error)
        self.error = error


async def _abort(code: grpc.StatusCode, details: str, trailers: Any = ()) -> None:
    """End a call; see grpc.aio.ServicerContext."""
    raise _AbortedError(_status(code, details, trailers))


def _rpc_error(error: errors.PacelineError) -> grpc.aio.AioRpcError:
    """Say it as the wire does."""
    encoded = status.encode(error)
    details = encoded.SerializeToString() if error.reason else b""
    trailers = ((status.DETAILS_KEY, details),)
    return _status(grpc.StatusCode[error.code], encoded.message, trailers)


def _status(code: grpc.StatusCode, text: str, trailers: Any = ()) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(
        code,
        initial_metadata=grpc.aio.Metadata(),
        trailing_metadata=grpc.aio.Metadata(*trailers),
        details=text,
    )
