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
# Nobody reads slowly here: what is left unread is a server's flood.
_MOST_UNREAD_BYTES = 8 << 20
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
        apart: Callable[..., Any] = make(
            method,
            request_serializer=request_serializer,
            response_deserializer=response_deserializer,
            **options,
        )
        if method not in self._methods:
            return apart
        serialize = request_serializer or bytes
        deserialize = reading_quietly(response_deserializer or bytes)

        def begin(request: Any, *, timeout: float | None = None, **others: Any) -> Any:
            if self.exchanges and timeout is not None and not others:
                raw: bytes = serialize(request)
                if len(raw) <= MOST_EXCHANGED_BYTES:
                    message = CallMessage(
                        method=method, request=raw, timeout_ns=max(1, round(timeout * 1e9))
                    )
                    call = kind(deserialize)
                    self._current().begin(call, message, seconds=timeout)
                    return call
            return apart(request, timeout=timeout, **others)

        return begin

    def _current(self) -> _CallStream:
        """Return the stream for a new call, which is another one after the end of the last."""
        if self._stream is None or self._stream.is_over:
            stream = self._stream = _CallStream()
            task = asyncio.get_running_loop().create_task(
                self._run(stream), name="exchange calls", context=Context()
            )
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            # A task that is cancelled before it began runs no `finally`.
            task.add_done_callback(lambda _: stream.end())
        return self._stream

    async def _run(self, stream: _CallStream) -> None:
        try:
            await stream.run(self._open)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                self.exchanges = False  # an older server has come to this address
        except grpc.aio.UsageError:
            pass  # the channel was closed: calls are told by their failure


class _CallStream:
    """One stream, and the calls that wait for answers on it.

    Attributes:
        is_over: Whether no call can begin any more.
    """

    def __init__(self) -> None:
        self._calls: dict[int, _Call] = {}
        self._outbox: dict[int, CallMessage] = {}
        self._ready = asyncio.Event()
        self._newest = 0
        self.is_over = False

    def begin(self, call: _Call, message: CallMessage, *, seconds: float) -> None:
        """Send a call, together with all that begin in this turn of the event loop."""
        self._newest += 1
        message.number = self._newest
        if (served := tracing.current()) is not None:
            message.traceparent, message.request_id = served.traceparent, served.request_id
        self._calls[self._newest] = call
        self._post(message)
        call.begin(partial(self.forget, self._newest), seconds=seconds)

    def forget(self, number: int, *, is_told: bool) -> None:
        """Let a call go that may not be over, and tell the server so, if it knows of the call."""
        if self._calls.pop(number, None) is None:
            return
        if self._outbox.pop(number, None) is None and is_told:
            self._post(CallMessage(number=number, cancel=True))

    async def run(self, open_rpc: Callable[[], Any]) -> None:
        """Carry calls and answers until the RPC ends; then the calls that wait fail.

        Raises:
            AioRpcError: What the stream ended with.
            UsageError: The channel is closed.
        """
        failure: Exception | None = None
        rpc = writing = None
        try:
            rpc = open_rpc()
            loop = asyncio.get_running_loop()
            writing = loop.create_task(self._write_calls(rpc), name="write calls")
            while (raw := await rpc.read()) is not _EOF:
                for answer in ExchangeCallsResponse.FromString(raw).answers:
                    self._take(answer)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                failure = error
            raise
        except DecodeError:
            failure = _failure(grpc.StatusCode.INTERNAL, "an answer cannot be decoded")
        finally:
            if rpc is not None:
                rpc.cancel()
            if writing is not None:
                writing.cancel()
            self.end(failure)

    def end(self, failure: Exception | None = None) -> None:
        """Fail the calls that wait, and take no more; again is fine."""
        self.is_over = True
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.fail(
                failure or _failure(grpc.StatusCode.UNAVAILABLE, "the stream of calls has ended")
            )

    def _post(self, message: CallMessage) -> None:
        self._outbox[message.number] = message
        self._ready.set()

    async def _write_calls(self, rpc: Any) -> None:
        try:
            while True:
                await self._ready.wait()
                numbers = list(islice(self._outbox, MOST_EXCHANGED_CALLS))
                batch = ExchangeCallsRequest(calls=[self._outbox.pop(it) for it in numbers])
                if not self._outbox:
                    self._ready.clear()
                if numbers:  # they may all have been withdrawn
                    await rpc.write(batch.SerializeToString())
        except (grpc.RpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            return  # the stream has ended, as its reader hears, too

    def _take(self, answer: AnswerMessage) -> None:
        """Hand an answer to its call, unless it was withdrawn."""
        call = self._calls.get(answer.number)
        if call is None:
            return
        if answer.ended:
            del self._calls[answer.number]
        call.take(answer)


class _Call:
    """A call on a stream, which looks like grpc.aio's.

    Args:
        deserialize: Reads an answer.
    """

    def __init__(self, deserialize: Callable[[bytes], Any]) -> None:
        self._deserialize = deserialize
        self._loop = asyncio.get_running_loop()
        self._answers: deque[Any] = deque()
        self._unread_bytes = 0
        self._end: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    def begin(self, forget: Callable[..., None], *, seconds: float) -> None:
        """Begin to wait.

        Args:
            forget: Takes it off its stream.
            seconds: How long it may take.
        """
        self._forget = forget
        self._timer = self._loop.call_later(seconds, self._expire)

    async def next(self) -> Any:
        """Wait for the next answer.

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
        self._unread_bytes = 0
        return self._answers.popleft()

    def done(self) -> bool:
        """Whether nothing more comes."""
        return self._end is not None

    def cancel(self) -> bool:
        """Withdraw it; return whether there was something to withdraw."""
        if self._end is not None:
            return False
        self._forget(is_told=True)
        self._answers.clear()
        self._finish(asyncio.CancelledError())
        return True

    def take(self, answer: AnswerMessage) -> None:
        """Take an answer in, or the end."""
        if answer.HasField("response"):
            self._answers.append(self._deserialize(answer.response))
            self._unread_bytes += len(answer.response)
        if self._unread_bytes > _MOST_UNREAD_BYTES:
            self._forget(is_told=True)
            self._finish(_failure(grpc.StatusCode.INTERNAL, "answers come faster than any is read"))
        elif not answer.ended:
            self._wake()
        elif answer.status:
            self._finish(_read_failure(answer.status))
        else:
            self._finish(StopAsyncIteration())

    def fail(self, failure: BaseException) -> None:
        """End with a failure."""
        self._finish(failure)

    def _expire(self) -> None:
        if self._end is None:
            self._forget(is_told=False)  # the server has a clock, too
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


class _StreamedCall(_Call):
    """A call of a method that answers with a stream."""

    def __aiter__(self) -> _StreamedCall:
        return self

    async def __anext__(self) -> Any:
        return await self.next()


def _read_failure(raw: bytes) -> grpc.aio.AioRpcError:
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
