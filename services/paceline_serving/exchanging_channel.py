"""The caller's side of CallService: RPCs that travel as messages of one stream, where they can.

Generated stubs take an `ExchangingChannel` for a channel. A call of an exchanged method becomes a
message of the channel's stream, which is opened with the first one; calls that are made in one turn
of the event loop leave in one message. All others are RPCs of their own: those of other methods, a
request that is too large to let others wait behind it, and all while the server has not said that
it knows CallService.

A call looks like grpc.aio's own: awaited or iterated over, cancelled, and failing with AioRpcError.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextvars import Context
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc.status_pb2 import Status

from paceline.status import DETAILS_KEY
from paceline.v1.call_service_pb2 import (
    CallMessage,
    ExchangeCallsRequest,
    ExchangeCallsResponse,
)
from paceline_contract.limits import MOST_EXCHANGED_BYTES, MOST_EXCHANGED_CALLS
from paceline_serving import tracing
from paceline_serving.interceptors import reading_quietly
from paceline_serving.wire_format import check_field_count

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from paceline.v1.call_service_pb2 import AnswerMessage
    from paceline_serving.interceptors import TracedChannel

_METHOD = "/paceline.v1.CallService/ExchangeCalls"
EXCHANGED_METHODS = frozenset(
    {
        "/paceline.v1.DrafterService/Draft",
        "/paceline.v1.TargetService/Decode",
        "/paceline.v1.TargetService/Verify",
    }
)
# A stream takes no new call after this: see `_current`.
_STREAM_SECONDS = 60.0
# A call whose time is over is withdrawn so much later, so that the server's own clock comes first.
_EXPIRED_SECONDS = 1.0
# Nobody reads slowly here: what is left unread is a server's flood. An answer takes some bytes more
# than it has.
_MOST_UNREAD_BYTES = 8 << 20
_ANSWER_BYTES = 64
# As of an RPC's trailers.
_MOST_STATUS_BYTES = 8 << 10
_NO_STREAM = {
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
}
_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined] # the stubs do not know it
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class ExchangingChannel:
    """A channel whose calls share a stream, as soon as its server is known to serve one.

    Args:
        channel: Makes the RPCs.
        methods: The methods whose calls may go on the stream.
        may_exchange: Whether any may.

    Attributes:
        exchanges: Whether the server serves CallService, as far as is known.
    """

    def __init__(
        self,
        channel: TracedChannel,
        *,
        methods: frozenset[str] = EXCHANGED_METHODS,
        may_exchange: bool = True,
    ) -> None:
        self._channel = channel
        self._methods = methods if may_exchange else frozenset()
        self._open = channel.stream_stream(_METHOD)
        self._stream: _CallStream | None = None
        self._running: set[asyncio.Task[None]] = set()
        self.exchanges = False

    def unary_unary(self, method: str, *codecs: Any, **options: Any) -> Callable[..., Any]:
        """Make a method's stub; see grpc.aio.Channel."""
        return self._stub(method, self._channel.unary_unary, _UnaryCall, *codecs, **options)

    def unary_stream(self, method: str, *codecs: Any, **options: Any) -> Callable[..., Any]:
        """Make a method's stub; see grpc.aio.Channel."""
        return self._stub(method, self._channel.unary_stream, _StreamedCall, *codecs, **options)

    async def close(self, grace: float | None = None) -> None:
        """Close the channel; its calls end after the grace."""
        await self._channel.close(grace)
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)

    def _stub(
        self,
        method: str,
        make: Callable[..., Any],
        kind: type[_Call],
        request_serializer: Any = None,
        response_deserializer: Any = None,
        **options: Any,
    ) -> Callable[..., Any]:
        if method not in self._methods:
            unchanged: Callable[..., Any] = make(
                method,
                request_serializer=request_serializer,
                response_deserializer=response_deserializer,
                **options,
            )
            return unchanged
        serialize = request_serializer or bytes
        deserialize = reading_quietly(response_deserializer or bytes)
        # Serialized once: a long prompt takes milliseconds.
        begin_rpc: Callable[..., Any] = make(
            method, request_serializer=None, response_deserializer=response_deserializer, **options
        )

        def begin(request: Any, *, timeout: float | None = None, **others: Any) -> Any:
            raw: bytes = serialize(request)
            is_small = len(raw) <= MOST_EXCHANGED_BYTES
            if self.exchanges and is_small and timeout is not None and not others:
                call = kind(deserialize, seconds=timeout)
                self._current().begin(call, CallMessage(method=method, request=raw))
                return call
            return begin_rpc(raw, timeout=timeout, **others)

        return begin

    def _current(self) -> _CallStream:
        """Return the stream for a new call.

        A stream takes new calls for a minute. The next one is opened by a channel with the
        certificates of then, and on a connection that its server is not about to end.
        """
        loop = asyncio.get_running_loop()
        stream = self._stream
        if stream is not None and loop.time() - stream.opened_at > _STREAM_SECONDS:
            stream.retire()
        if stream is None or stream.is_over:
            stream = self._stream = _CallStream(opened_at=loop.time())
            ended = stream.end
            task = loop.create_task(self._run(stream), name="exchange calls", context=Context())
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            # A task that is cancelled before it began runs no `finally`.
            task.add_done_callback(lambda _: ended())
        return stream

    async def _run(self, stream: _CallStream) -> None:
        try:
            await stream.run(self._open)
        except grpc.aio.AioRpcError as error:
            # An older server has come to this address, or what lies between lets no stream through.
            if error.code() in _NO_STREAM:
                self.exchanges = False
        except grpc.aio.UsageError:
            pass  # the channel was closed: calls are told by their failure


class _CallStream:
    """One stream, and the calls that wait for answers on it.

    Args:
        opened_at: The loop's time.

    Attributes:
        opened_at: The same.
        is_over: Whether no call can begin any more.
    """

    def __init__(self, *, opened_at: float) -> None:
        self.opened_at = opened_at
        self._calls: dict[int, _Call] = {}
        self._outbox: dict[int, CallMessage] = {}
        self._ready = asyncio.Event()
        self._newest = 0
        self._is_retired = False
        self.is_over = False

    def begin(self, call: _Call, message: CallMessage) -> None:
        """Send a call, together with all that begin in this turn of the event loop."""
        self._newest += 1
        message.number = self._newest
        if (served := tracing.current()) is not None:
            message.traceparent, message.request_id = served.traceparent, served.request_id
        call.when_given_up(partial(self.forget, self._newest))
        self._calls[self._newest] = call
        self._post(message)

    def forget(self, number: int) -> None:
        """Withdraw a call, if it is not over: one that was not sent yet never is."""
        if self._calls.pop(number, None) is None:
            return
        if self._outbox.pop(number, None) is None:
            self._post(CallMessage(number=number, cancel=True))
        self._ready.set()

    def retire(self) -> None:
        """Take no call any more, and end with the last one."""
        self._is_retired = self.is_over = True
        self._ready.set()

    async def run(self, open_rpc: Callable[[], Any]) -> None:
        """Carry calls and answers until the RPC ends; then the calls that wait fail.

        Raises:
            AioRpcError: What the stream ended with.
            UsageError: The channel is closed.
        """
        code = grpc.StatusCode.UNAVAILABLE
        rpc = writing = None
        try:
            rpc = open_rpc()
            loop = asyncio.get_running_loop()
            writing = loop.create_task(self._write_calls(rpc), name="write calls")
            while (raw := await rpc.read()) is not _EOF:
                check_field_count(raw, most=MOST_EXCHANGED_CALLS)
                for answer in ExchangeCallsResponse.FromString(raw).answers:
                    self._take(answer)
        except grpc.aio.AioRpcError as error:
            # A stream's own end is a lost connection to its calls, whatever it says: what it says
            # is not about them. A server that stops says CANCELLED.
            if error.code() is grpc.StatusCode.CANCELLED:
                code = grpc.StatusCode.CANCELLED
            raise
        except DecodeError:
            self._spoil()
        finally:
            if rpc is not None:
                rpc.cancel()
            if writing is not None:
                writing.cancel()
            self.end(code)

    def end(self, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> None:
        """Fail the calls that wait, and take no more; again is fine."""
        self.is_over = True
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.fail(_failure(code, "the stream of calls has ended"))

    def _spoil(self) -> None:
        """Answer the calls that wait with what cannot be decoded: so is what the server sent."""
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.spoil()

    def _post(self, message: CallMessage) -> None:
        self._outbox[message.number] = message
        self._ready.set()

    async def _write_calls(self, rpc: Any) -> None:
        try:
            while True:
                await self._ready.wait()
                self._ready.clear()
                while self._outbox:
                    numbers = list(islice(self._outbox, MOST_EXCHANGED_CALLS))
                    calls = [self._dated(self._outbox.pop(number)) for number in numbers]
                    await rpc.write(ExchangeCallsRequest(calls=calls).SerializeToString())
                if self._is_retired and not self._calls:
                    await rpc.done_writing()
                    return
        except (grpc.RpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            rpc.cancel()  # the stream has ended, as its reader hears, too

    def _dated(self, message: CallMessage) -> CallMessage:
        """Give a message the time that its call has left."""
        call = self._calls.get(message.number)
        if call is not None:
            message.timeout_ns = max(1, round(call.seconds_left * 1e9))
        return message

    def _take(self, answer: AnswerMessage) -> None:
        """Hand an answer to its call, unless it was withdrawn.

        Raises:
            DecodeError: No call has that number.
        """
        if answer.number > self._newest:
            raise DecodeError("an answer to no call")
        call = self._calls.get(answer.number)
        if call is None:
            return
        if answer.ended:
            del self._calls[answer.number]
            self._ready.set()
        call.take(answer)


class _Call:
    """A call on a stream, which looks like grpc.aio's.

    Args:
        deserialize: Reads an answer.
        seconds: How long it may take.
    """

    def __init__(self, deserialize: Callable[[bytes], Any], *, seconds: float) -> None:
        self._deserialize = deserialize
        self._loop = asyncio.get_running_loop()
        self._ends_at = self._loop.time() + seconds
        self._timer = self._loop.call_at(self._ends_at, self._expire)
        self._forget: Callable[[], None] = lambda: None
        self._answers: deque[bytes | None] = deque()
        self._unread_bytes = 0
        self._end: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def seconds_left(self) -> float:
        """How long it may still take."""
        return self._ends_at - self._loop.time()

    def when_given_up(self, forget: Callable[[], None]) -> None:
        """Have this called when nobody waits for it any more."""
        self._forget = forget

    async def next(self) -> Any:
        """Wait for the next answer; None if it cannot be decoded.

        Raises:
            StopAsyncIteration: There is no other.
            AioRpcError: What the server or the transport said.
            CancelledError: The call was withdrawn.
        """
        while not self._answers:
            if self._end is not None:
                raise self._end
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:  # of the task that waits
                self.cancel()
                raise
            finally:
                self._waiter = None
        raw = self._answers.popleft()
        if raw is None:
            return None
        self._unread_bytes -= len(raw) + _ANSWER_BYTES
        return self._deserialize(raw)

    def done(self) -> bool:
        """Whether nothing more comes."""
        return self._end is not None

    def cancel(self) -> bool:
        """Withdraw it; return whether there was something to withdraw."""
        if self._end is not None:
            return False
        self._forget()
        self._answers.clear()
        self._finish(asyncio.CancelledError())
        return True

    def take(self, answer: AnswerMessage) -> None:
        """Take an answer in, or the end."""
        if answer.HasField("response"):
            self._answers.append(answer.response)
            self._unread_bytes += len(answer.response) + _ANSWER_BYTES
        if self._unread_bytes > _MOST_UNREAD_BYTES:
            self._forget()
            self._finish(_failure(grpc.StatusCode.INTERNAL, "answers come faster than any is read"))
        elif not answer.ended:
            self._wake()
        elif answer.status:
            self._finish(_read_failure(answer.status))
        else:
            self._finish(StopAsyncIteration())

    def spoil(self) -> None:
        """End with an answer that cannot be decoded."""
        self._answers.append(None)
        self._finish(StopAsyncIteration())

    def fail(self, failure: BaseException) -> None:
        """End with a failure."""
        self._finish(failure)

    def _expire(self) -> None:
        if self._end is None:
            # The server has a clock, too, and hears of it in case it began later.
            self._loop.call_later(_EXPIRED_SECONDS, self._forget)
            self._finish(_failure(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    def _finish(self, end: BaseException) -> None:
        self._end = end
        self._timer.cancel()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _UnaryCall(_Call):
    """A call of a method that answers once."""

    is_unary = True

    def __await__(self) -> Generator[Any, None, Any]:
        return self._only().__await__()

    async def _only(self) -> Any:
        try:
            return await self.next()
        except StopAsyncIteration:
            return None  # as of an answer that cannot be decoded
        finally:
            self.cancel()  # nothing more is waited for, whether its server ends it or not


class _StreamedCall(_Call):
    """A call of a method that answers with a stream."""

    def __aiter__(self) -> _StreamedCall:
        return self

    async def __anext__(self) -> Any:
        return await self.next()


def _read_failure(raw: bytes) -> grpc.aio.AioRpcError:
    if len(raw) > _MOST_STATUS_BYTES:
        return _failure(grpc.StatusCode.INTERNAL, "a status is larger than any may be")
    try:
        status = Status.FromString(raw)
    except DecodeError:
        return _failure(grpc.StatusCode.INTERNAL, "a status cannot be decoded")
    code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    return _failure(code, status.message, (DETAILS_KEY, raw))


def _failure(
    code: grpc.StatusCode, details: str, *trailers: tuple[str, bytes]
) -> grpc.aio.AioRpcError:
    none, told = grpc.aio.Metadata(), grpc.aio.Metadata(*trailers)
    return grpc.aio.AioRpcError(code, none, told, details=details, debug_error_string=None)
