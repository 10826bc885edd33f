"""The server's side of CallService: calls that come as messages of one stream.

ADR 42 has the reasons, and bench/LOG.md the costs. A call that comes as a message passes the same
guard as an RPC (`EdgeInterceptor`): it is parsed, counted, bounded in time and traced alike,
and the same handler serves it. `_CallContext` stands for an RPC's context.

    caller ══ ExchangeCalls ══► Exchange.run ──► a task for each call ──► guard ──► servicer
           ◄═════ batches ═════ _write_answers ◄── outbox ◄── _CallContext.write, abort
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from google.protobuf.message import DecodeError
from google.rpc.status_pb2 import Status

from paceline import status
from paceline.errors import (
    DeadlineError,
    InternalError,
    InvalidFieldError,
    MalformedRequestError,
    OverloadedError,
    PacelineError,
    SlowConsumerError,
    UnsupportedError,
)
from paceline.v1.call_service_pb2 import (
    AnswerMessage,
    CallMessage,
    ExchangeCallsRequest,
    ExchangeCallsResponse,
)
from paceline_contract.limits import MOST_EXCHANGED_BYTES, MOST_EXCHANGED_CALLS
from paceline_serving.transport import MOST_POD_CALLS
from paceline_serving.wire_format import check_field_count

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Callable, Mapping, Sequence

    from paceline_serving.interceptors import EdgeInterceptor

_log = logging.getLogger(__name__)

SERVICE = "paceline.v1.CallService"

# The most bytes of the answers in one message, unless a single answer has more. An orchestrator's
# channel takes messages of 4 MiB.
_BATCH_BYTES = 1 << 20
# The most bytes of answers that wait for the caller to read. Beyond it streamed answers wait in
# their calls, and no new calls are read.
_MOST_WAITING_BYTES = 4 << 20


class _Handlers:
    """Collects the handlers that generated code would add to a server."""

    def __init__(self) -> None:
        self.by_method: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, _handlers: Sequence[Any]) -> None:
        """Ignore these: `add_registered_method_handlers` is given the same handlers by name."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Keep a service's handlers."""
        self.by_method.update({f"/{service}/{name}": it for name, it in handlers.items()})


def add_call_service(
    server: grpc.aio.Server,
    add_servicer: Callable[[Any], None],
    *,
    edge: EdgeInterceptor,
    write_stall_seconds: float = 30.0,
    most_running: int = MOST_POD_CALLS,
) -> None:
    """Serve CallService: the calls of other services, as messages of a stream.

    Args:
        add_servicer: Adds the other services' servicers to a server, as generated code does.
        edge: The guard around each call.
        write_stall_seconds: How long a caller may leave answers unread.
        most_running: How many calls of one stream may run at once.
    """
    collected = _Handlers()
    add_servicer(collected)
    guarded = {
        method: edge.guard(method, handler) for method, handler in collected.by_method.items()
    }

    async def exchange(requests: AsyncIterable[bytes], context: Any) -> None:
        stream = Exchange(
            guarded, context, write_stall_seconds=write_stall_seconds, most_running=most_running
        )
        await stream.run(requests)

    handlers = {"ExchangeCalls": grpc.stream_stream_rpc_method_handler(exchange)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


class Exchange:
    """One stream: its running calls, and the answers that wait to be sent.

    Args:
        handlers: The handler of each method; a handler is given the bytes of a request.
        context: The context of the stream.
        write_stall_seconds: How long the caller may leave answers unread.
        most_running: How many calls may run at once.

    Invariants:
        A call's answers are sent in the order in which its handler gave them, its end last.
        When `run` returns or raises, no call runs any more.
    """

    def __init__(
        self,
        handlers: Mapping[str, Any],
        context: Any,
        *,
        write_stall_seconds: float,
        most_running: int = MOST_POD_CALLS,
    ) -> None:
        self._handlers = handlers
        self._context = context
        self._write_stall_seconds = write_stall_seconds
        self._most_running = most_running
        self.peer_identity = context.auth_context()
        self.metadata = tuple(context.invocation_metadata() or ())
        self._running: dict[int, asyncio.Task[None]] = {}
        self._newest = 0
        self._outbox: list[AnswerMessage] = []
        self._waiting_bytes = 0
        self._ready = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._has_sent_all = asyncio.Event()
        self._has_sent_all.set()

    async def run(self, requests: AsyncIterable[bytes]) -> None:
        """Serve calls until the caller has sent the last one and all calls are answered.

        Raises:
            MalformedRequestError: A message breaks the rules.
            SlowConsumerError: Answers are not read.
        """
        # A status after a stalled first message would send the metadata again: gRPC refuses that.
        await self._context.send_initial_metadata(())
        try:
            async with asyncio.TaskGroup() as tasks:
                writing = tasks.create_task(self._write_answers(), name="write answers")
                async for raw in requests:
                    await self._has_room.wait()
                    for message in _parsed(raw).calls:
                        self._take(message, tasks)
                while self._running:
                    await asyncio.wait(self._running.values())
                await self._has_sent_all.wait()
                writing.cancel()
        except* (PacelineError, grpc.aio.BaseError) as group:  # the latter: the caller has left
            raise group.exceptions[0] from None

    def _take(self, message: CallMessage, tasks: asyncio.TaskGroup) -> None:
        """Begin a call, or withdraw one."""
        if message.cancel:
            task = self._running.get(message.number)
            if task is not None:
                task.cancel()
            return
        if message.number <= self._newest:
            raise MalformedRequestError("calls.number does not increase")
        self._newest = message.number
        call = _CallContext(self, message)
        if len(self._running) >= self._most_running:
            call.refuse(OverloadedError("too many calls run on this stream", retry_after_seconds=1))
            return
        handler = self._handlers.get(message.method)
        task = tasks.create_task(call.serve(handler), name=message.method)
        self._running[message.number] = task
        task.add_done_callback(lambda _: self._running.pop(message.number, None))

    async def send(self, answer: AnswerMessage) -> None:
        """Append an answer to the outbox, once the outbox has room."""
        while not self._has_room.is_set():
            await self._has_room.wait()
        self.post(answer)

    def post(self, answer: AnswerMessage) -> None:
        """Append an answer to the outbox, even beyond its limit: a call has one last answer."""
        self._outbox.append(answer)
        self._waiting_bytes += answer.ByteSize()
        if self._waiting_bytes > _MOST_WAITING_BYTES:
            self._has_room.clear()
        self._ready.set()
        self._has_sent_all.clear()

    async def _write_answers(self) -> None:
        while True:
            await self._ready.wait()
            batch = self._next_batch()
            try:
                async with asyncio.timeout(self._write_stall_seconds):
                    await self._context.write(batch.SerializeToString())
            except TimeoutError:
                raise SlowConsumerError(
                    f"nothing was read for {self._write_stall_seconds:g} s"
                ) from None
            if not self._outbox:
                self._has_sent_all.set()

    def _next_batch(self) -> ExchangeCallsResponse:
        """Take as many answers out of the outbox as one message may have."""
        size = count = 0
        for answer in self._outbox[:MOST_EXCHANGED_CALLS]:
            answer_size = answer.ByteSize()
            if count and size + answer_size > _BATCH_BYTES:
                break
            size += answer_size
            count += 1
        batch = ExchangeCallsResponse(answers=self._outbox[:count])
        del self._outbox[:count]
        self._waiting_bytes -= size
        self._has_room.set()
        if not self._outbox:
            self._ready.clear()
        return batch


class _CallContext:
    """One call. Its handler is given this object as the context of an RPC.

    Attributes:
        bounds_writes: Tells the guard to set no time limit on a write: the stream has one.
    """

    bounds_writes = True

    def __init__(self, exchange: Exchange, message: CallMessage) -> None:
        self._exchange = exchange
        self._message = message
        self._number = message.number
        self._serialize: Callable[[Any], bytes] = bytes
        self._loop = asyncio.get_running_loop()
        self._ends_at = self._loop.time() + message.timeout_ns / 1e9
        self._status = Status()

    async def serve(self, handler: Any) -> None:
        """Run the handler, and send the call's last answer.

        Cancellation:
            No answer is sent to a call that was withdrawn, or whose stream has ended.
        """
        task = asyncio.current_task()
        assert task is not None
        timer = self._loop.call_at(self._ends_at, task.cancel)
        try:
            self._check(handler)
            last = await self._handled(handler)
        except grpc.aio.AbortError:
            last = self._last(status=self._status.SerializeToString())
        except PacelineError as error:
            last = self._failed(error)
        except asyncio.CancelledError:
            if self.time_remaining() > 0:
                raise
            last = self._failed(DeadlineError("the call's time was over"))
        except Exception as bug:  # noqa: BLE001 - it must not end the calls of others
            # The guard masks the handler's exceptions. A response may still not serialize.
            _log.exception("an answer could not be written", exc_info=bug)
            last = self._failed(InternalError("the answer could not be written"))
        finally:
            timer.cancel()
        self._exchange.post(last)

    def refuse(self, error: PacelineError) -> None:
        """Answer with an error instead of running the handler."""
        self._exchange.post(self._failed(error))

    async def _handled(self, handler: Any) -> AnswerMessage:
        """Run the handler, and return the last answer."""
        self._serialize = handler.response_serializer
        if handler.unary_unary is None:
            await handler.unary_stream(self._message.request, self)
            return self._last()
        response = await handler.unary_unary(self._message.request, self)
        return self._last(response=self._serialize(response))

    def _failed(self, error: PacelineError) -> AnswerMessage:
        return self._last(status=status.encode(error).SerializeToString())

    def _last(self, **content: bytes) -> AnswerMessage:
        return AnswerMessage(number=self._number, ended=True, **content)

    def _check(self, handler: Any) -> None:
        if handler is None:
            raise UnsupportedError(f"{self._message.method[:64]!r} is no method for a stream here")
        if not self._message.timeout_ns:
            raise InvalidFieldError.of("calls.timeout_ns", "is required")
        if len(self._message.request) > MOST_EXCHANGED_BYTES:
            raise InvalidFieldError.of(
                "calls.request",
                f"has {len(self._message.request)} bytes, at most {MOST_EXCHANGED_BYTES} are"
                " allowed on a stream",
            )

    # --- the context of an RPC ----------------------------------------------------------------

    def auth_context(self) -> Mapping[str, Any]:
        """Return the properties of the caller's certificate."""
        identity: Mapping[str, Any] = self._exchange.peer_identity
        return identity

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """Return the stream's metadata with the call's own trace and request id."""
        return (
            *self._exchange.metadata,
            ("traceparent", self._message.traceparent),
            ("x-request-id", self._message.request_id),
        )

    def time_remaining(self) -> float:
        """Return the seconds until the call's end."""
        return max(0.0, self._ends_at - self._loop.time())

    def code(self) -> int:
        """Return the code that the call was aborted with; 0 if it was not."""
        return int(self._status.code)

    async def write(self, response: Any) -> None:
        """Send a message of the answer."""
        answer = AnswerMessage(number=self._number, response=self._serialize(response))
        await self._exchange.send(answer)

    async def abort(
        self,
        code: grpc.StatusCode,
        details: str = "",
        trailing_metadata: Sequence[tuple[str, bytes]] = (),
    ) -> NoReturn:
        """End the call with an error.

        Raises:
            AbortError: Always, as gRPC does: it ends the handler.
        """
        found = dict(trailing_metadata).get(status.DETAILS_KEY)
        number: int = code.value[0]
        self._status = Status.FromString(found) if found else Status(code=number, message=details)
        raise grpc.aio.AbortError


def _parsed(raw: bytes) -> ExchangeCallsRequest:
    try:
        check_field_count(raw, most=MOST_EXCHANGED_CALLS)
        return ExchangeCallsRequest.FromString(raw)
    except DecodeError:
        raise MalformedRequestError(
            f"the bytes are not the request message, with at most {MOST_EXCHANGED_CALLS} calls"
        ) from None
