"""The caller's side of CallService: RPCs that travel as messages of one stream, where they can.

Generated stubs accept an `ExchangingChannel` as a channel. A call of an exchanged method is sent on
the channel's stream. The first such call opens the stream, and the calls of one turn of the event
loop leave in one message. A call is an RPC of its own if its method is another one, if its request
is so large that other calls would wait behind it, or if the server has not said that it serves
CallService.

Callers handle a call on the stream like a call of grpc.aio: they await it or iterate over it, they
can cancel it, and it fails with AioRpcError.
"""

from __future__ import annotations

import asyncio
from contextvars import Context
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

from paceline.v1.call_service_pb2 import (
    CallMessage,
    ExchangeCallsRequest,
    ExchangeCallsResponse,
)
from paceline_contract.limits import MOST_EXCHANGED_BYTES, MOST_EXCHANGED_CALLS
from paceline_serving import tracing
from paceline_serving.interceptors import reading_quietly
from paceline_serving.multiplexed_calls import (
    MultiplexedCall,
    UnaryStreamCall,
    UnaryUnaryCall,
    failure,
)
from paceline_serving.wire_format import check_field_count

if TYPE_CHECKING:
    from collections.abc import Callable

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
# A stream takes new calls for so long: see `_current`.
_STREAM_SECONDS = 60.0
# With these codes a stream ends if an older server has come to the address, or if a proxy on the
# way lets no stream through. Calls are RPCs then.
_NO_STREAM = {
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
}
_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined] # the stubs do not know it


class ExchangingChannel:
    """A channel whose calls share a stream, once its server is known to serve CallService.

    Args:
        channel: Makes the RPCs.
        methods: The methods whose calls may go on the stream.
        may_exchange: Whether any call may go on a stream.

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
        self._stream: _SharedStream | None = None
        self._running: set[asyncio.Task[None]] = set()
        self.exchanges = False

    def unary_unary(self, method: str, *codecs: Any, **options: Any) -> Callable[..., Any]:
        """Make a method's stub; see grpc.aio.Channel."""
        return self._stub(method, self._channel.unary_unary, UnaryUnaryCall, *codecs, **options)

    def unary_stream(self, method: str, *codecs: Any, **options: Any) -> Callable[..., Any]:
        """Make a method's stub; see grpc.aio.Channel."""
        return self._stub(method, self._channel.unary_stream, UnaryStreamCall, *codecs, **options)

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
        kind: type[MultiplexedCall],
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

    def _current(self) -> _SharedStream:
        """Return the stream for a new call.

        A stream takes new calls for a minute. So a renewed certificate and a connection that its
        server is about to end concern no new call after that.
        """
        now = asyncio.get_running_loop().time()
        if self._stream is not None and now - self._stream.opened_at > _STREAM_SECONDS:
            self._stream.retire()
        if self._stream is None or self._stream.is_over:
            # In a context of its own: it outlives the request that opens it, and would keep its
            # context, also by a callback alone.
            self._stream = Context().run(self._begin_stream, now)
        return self._stream

    def _begin_stream(self, now: float) -> _SharedStream:
        stream = _SharedStream(opened_at=now)
        task = asyncio.get_running_loop().create_task(self._run(stream), name="exchange calls")
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        # A task that is cancelled before its first step runs no `finally`.
        task.add_done_callback(lambda _: stream.end())
        return stream

    async def _run(self, stream: _SharedStream) -> None:
        try:
            await stream.run(self._open)
        except grpc.aio.AioRpcError as error:
            if error.code() in _NO_STREAM:
                self.exchanges = False
        except grpc.aio.UsageError:
            pass  # the channel was closed: `run` has failed its calls


class _SharedStream:
    """One stream, and the calls that wait for answers on it.

    Attributes:
        opened_at: When it was opened, on the loop's clock.
        is_over: Whether it takes no new call.
    """

    def __init__(self, *, opened_at: float) -> None:
        self.opened_at = opened_at
        self._calls: dict[int, MultiplexedCall] = {}
        self._outbox: dict[int, CallMessage] = {}
        self._ready = asyncio.Event()
        self._newest = 0
        self.is_over = False

    def begin(self, call: MultiplexedCall, message: CallMessage) -> None:
        """Send a call in one message with the others of this turn of the event loop."""
        self._newest += 1
        message.number = self._newest
        if (served := tracing.current()) is not None:
            message.traceparent, message.request_id = served.traceparent, served.request_id
        call.when_given_up(partial(self.forget, self._newest))
        self._calls[self._newest] = call
        self._post(message)

    def forget(self, number: int) -> None:
        """Withdraw a call that is not over. In the outbox the cancel takes the call's place."""
        if self._calls.pop(number, None) is not None:
            self._post(CallMessage(number=number, cancel=True))

    def retire(self) -> None:
        """Take no new call, and end with the last one."""
        self.is_over = True
        self._ready.set()

    async def run(self, open_rpc: Callable[[], Any]) -> None:
        """Carry calls and answers until the RPC ends; then fail the calls that wait.

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
            # To its calls a stream that ended is a lost connection, since its status is not about
            # them. A server that stops ends its calls with CANCELLED, and so the stream.
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
        """Fail the calls that wait, and take no new call. It can be called again."""
        self.is_over = True
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.finish(failure(code, "the stream of calls has ended"))

    def _spoil(self) -> None:
        """Answer the calls that wait with None, as if each answer could not be decoded."""
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
                if self.is_over and not self._calls:
                    await rpc.done_writing()
                    return
        except (grpc.RpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            rpc.cancel()  # the stream has ended; its reader fails the calls

    def _dated(self, message: CallMessage) -> CallMessage:
        """Give a message the time that its call has left."""
        call = self._calls.get(message.number)
        if call is not None:
            message.timeout_ns = max(1, round(call.seconds_left * 1e9))
        return message

    def _take(self, answer: AnswerMessage) -> None:
        """Hand an answer to its call. The answer to a withdrawn call is dropped.

        Raises:
            DecodeError: No call ever had that number.
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
