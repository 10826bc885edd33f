"""The edge of every RPC: an interceptor for servers, a channel for clients.

The interceptor parses the request inside its guard, checks the peer's role and key, limits the
call's time, and counts the call. It turns each exception of a handler into a status: a
`PacelineError` into its `google.rpc.Status`, any other one into INTERNAL without internals.

The channel refuses a call without a timeout, and adds the trace's header.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError, Message

from paceline import status
from paceline.errors import (
    ConnectionLostError,
    DeadlineError,
    InternalError,
    InvariantViolatedError,
    MalformedRequestError,
    OverloadedError,
    PacelineError,
    SlowConsumerError,
)
from paceline.panics import taking_panics
from paceline_contract.shares import FairShares
from paceline_serving import lanes, tracing
from paceline_serving.keys import authorization_of, counted_reason, current_caller
from paceline_serving.security import peer_name

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from paceline_serving.keys import Keys
    from paceline_serving.renewed_channel import RenewedChannel
    from paceline_serving.security import AccessPolicy
    from paceline_serving.telemetry import RpcMetrics

_log = logging.getLogger(__name__)

# Time for the status that ends the call of a peer that does not read.
_ABORT_SECONDS = 5.0
# gRPC's timer may end a call a little before its deadline.
_DEADLINE_SLACK_SECONDS = 0.01
# Unread answers of all clients together, and from which size on they are counted.
_UNREAD_BYTES, _LARGE_BYTES = 128 << 20, 4096
# gRPC's own services: they need no key.
_STANDARD = frozenset({"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"})
# Services whose calls last as long as the client wants.
_LASTING = _STANDARD | {"paceline.v1.CallService"}


class EdgeInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """The guard around every handler of a server.

    Args:
        access: The allowed callers of each service; None without client certificates.
        keys: The keys of allowed callers, except of health and reflection; None: no key is needed.
        inspect: Called with a request's bytes and its peer's name before the bytes are parsed;
            raises an error to refuse them.
        call_limit_seconds: The longest time of a call, whatever its deadline.
        write_stall_seconds: How long a client may leave a streamed message unread.
        unbounded: Services without the limit of time, besides those whose calls always last. Their
            calls are not traced either.
        spans: Makes the calls' spans; None: calls are not traced.

    Cancellation:
        A client's cancel or deadline, or the server's stop, reaches the handler as CancelledError
        and passes through. A CancelledError of an inner task can leak out of the handler; gRPC
        would then never send a status, so it becomes INTERNAL.
    """

    def __init__(
        self,
        metrics: RpcMetrics,
        *,
        access: AccessPolicy | None = None,
        keys: Keys | None = None,
        inspect: Callable[[bytes, str], None] | None = None,
        call_limit_seconds: float = 600.0,
        write_stall_seconds: float = 30.0,
        unbounded: Iterable[str] = (),
        spans: tracing.Spans | None = None,
    ) -> None:
        self._metrics = metrics
        self._spans = spans
        self._access = access
        self._keys = keys
        self._inspect = inspect
        self._call_limit_seconds = call_limit_seconds
        self._write_stall_seconds = write_stall_seconds
        self._unbounded = _LASTING.union(unbounded)
        self._guarded: dict[str, Any] = {}  # handlers by method
        self._unread = _UnreadAnswers()

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Return the method's handler with the guard around it; None if there is no such method."""
        method: str = handler_call_details.method
        if method not in self._guarded:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None
            self._guarded[method] = self.guard(method, handler)
        return self._guarded[method]

    def guard(self, method: str, handler: Any) -> Any:
        """Return a method's handler with the guard around it."""
        if handler.stream_stream:  # its requests are parsed by gRPC, or by the handler
            return grpc.stream_stream_rpc_method_handler(
                self._stream(method, handler.stream_stream, lambda requests, _: requests),
                request_deserializer=handler.request_deserializer,
                response_serializer=handler.response_serializer,
            )
        parse = self._parser(handler.request_deserializer)
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(
                self._stream(method, handler.unary_stream, parse),
                response_serializer=handler.response_serializer,
            )
        assert handler.unary_unary, f"{method}: no other kind of handler is in use"
        return grpc.unary_unary_rpc_method_handler(
            self._unary(method, handler.unary_unary, parse),
            response_serializer=handler.response_serializer,
        )

    def _unary(
        self, method: str, behavior: Callable[..., Awaitable[Any]], parse: Callable[..., Any]
    ) -> Callable[..., Awaitable[Any]]:
        async def guarded(raw: bytes, context: Any) -> Any:
            async def work() -> Any:
                response = await behavior(parse(raw, context), context)
                self._unread.count(response, context)
                return response

            return await self._run(method, context, work)

        return guarded

    def _stream(
        self, method: str, behavior: Callable[..., Any], parse: Callable[..., Any]
    ) -> Callable[..., Awaitable[Any]]:
        async def guarded(raw: Any, context: Any) -> None:
            async def work() -> None:
                request = parse(raw, context)
                if not inspect.isasyncgenfunction(behavior):
                    await behavior(request, context)
                    return
                # Closed at once: the handler's `finally` must not wait for the garbage collector.
                async with aclosing(behavior(request, context)) as responses:
                    async for response in responses:
                        await self._write(context, response)

            await self._run(method, context, work)

        return guarded

    def _parser(self, deserialize: Callable[[bytes], Any] | None) -> Callable[..., Any]:
        """Parse inside the guard: gRPC would answer bad bytes with UNKNOWN and the exception."""

        def parse(raw: bytes, context: Any) -> Any:
            if self._inspect is not None:
                self._inspect(raw, peer_name(context.auth_context()))
            if deserialize is None:
                return raw
            try:
                return deserialize(raw)
            except DecodeError:
                raise MalformedRequestError("the bytes are not the request message") from None

        return parse

    async def _write(self, context: Any, response: Any) -> None:
        if getattr(context, "bounds_writes", False):
            await context.write(response)
            return
        try:
            async with asyncio.timeout(self._write_stall_seconds):
                await context.write(response)
        except TimeoutError:
            raise SlowConsumerError(
                f"nothing was read for {self._write_stall_seconds:g} s"
            ) from None

    async def _run(self, method: str, context: Any, work: Callable[[], Awaitable[Any]]) -> Any:
        """Do the work; turn its end into the client's status, log records and metrics."""
        spans = None if method.split("/")[1] in self._unbounded else self._spans
        call = tracing.enter(method, context.invocation_metadata() or (), spans=spans)
        with self._metrics.rpc(method) as outcome, call.recorded(lambda: outcome.code):
            try:
                with taking_panics():
                    return await self._bounded(method, context, work)
            except grpc.aio.BaseError:  # the handler aborted by itself, or its peer is gone
                outcome.code = _name(context.code()) or _end_code(context)
                raise
            except asyncio.CancelledError as cancelled:
                if _is_sent_to_this_task():
                    outcome.code = _end_code(context)
                    raise
                error = _masked(cancelled)
            except Exception as unexpected:  # noqa: BLE001 - the edge: all exceptions end here
                error = _masked(unexpected)
            outcome.code, outcome.reason = error.code, counted_reason(error)
            error.metadata = {**error.metadata, "request_id": call.request_id}
            return await _abort(context, error)

    async def _bounded(self, method: str, context: Any, work: Callable[[], Awaitable[Any]]) -> Any:
        service = method.split("/")[1]
        if self._access is not None:
            self._access.check(service, context.auth_context())
        if self._keys is not None and service not in _STANDARD:
            self._keys.enter(authorization_of(context.invocation_metadata()))
        limit = None if service in self._unbounded else self._call_limit_seconds
        remaining = context.time_remaining()
        if limit is None or (remaining is not None and remaining <= limit):
            return await work()  # gRPC itself ends it in time
        try:
            async with asyncio.timeout(limit) as timeout:
                return await work()
        except TimeoutError:
            if timeout.expired():
                raise DeadlineError(f"a call may take at most {limit:g} s here") from None
            raise


class _UnreadAnswers:
    """Bounds what is in memory of answers that their clients have not read.

    gRPC keeps an answer until its client lets it be sent, or the connection ends. Nothing of a call
    runs then any more, so no other limit would count it.
    """

    def __init__(self) -> None:
        self._bytes = FairShares(_UNREAD_BYTES)

    def count(self, response: Any, context: Any) -> None:
        """Count a large answer until its call is over.

        Raises:
            OverloadedError: Its client has left too much unread.
        """
        when_over = getattr(context, "add_done_callback", None)
        size = response.ByteSize() if isinstance(response, Message) else 0
        if when_over is None or size < _LARGE_BYTES:
            return
        share = lanes.client_of(context, current_caller())
        if not self._bytes.allows(share, size):
            raise OverloadedError(
                f"answers of {self._bytes.held_by(share)} bytes have not been read by this client",
                retry_after_seconds=1.0,
            )
        self._bytes.take(share, size)
        when_over(lambda _: self._bytes.give_back(share, size))


def _masked(error: BaseException) -> PacelineError:
    """Return the client's error for an exception, and log the exception if it is a bug."""
    if (
        isinstance(error, PacelineError)
        and error.reason
        and not isinstance(error, InternalError | InvariantViolatedError)
    ):
        return error
    _log.error("a call failed unexpectedly", exc_info=error)
    if isinstance(error, InvariantViolatedError):
        return error
    return InternalError("internal error; the server's log has it under the request id")


async def _abort(context: Any, error: PacelineError) -> None:
    encoded = status.encode(error)
    try:
        async with asyncio.timeout(_ABORT_SECONDS):
            await context.abort(
                grpc.StatusCode[error.code],
                encoded.message,
                trailing_metadata=((status.DETAILS_KEY, encoded.SerializeToString()),),
            )
    except TimeoutError:
        # The peer does not read the status either. gRPC takes this exception for the end of the
        # call; it would log any other one as a bug, with a traceback for each stream.
        raise asyncio.CancelledError from None


def _is_sent_to_this_task() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _end_code(context: Any) -> str:
    """Tell a passed deadline from a cancel: both arrive as CancelledError."""
    remaining = context.time_remaining()
    is_over = remaining is not None and remaining < _DEADLINE_SLACK_SECONDS
    return "DEADLINE_EXCEEDED" if is_over else "CANCELLED"


def _name(code: grpc.StatusCode | int | None) -> str:
    """Name the code that a handler set; empty if it set none (0 stands for that, too)."""
    if isinstance(code, grpc.StatusCode):
        return "" if code is grpc.StatusCode.OK else code.name
    return next((known.name for known in grpc.StatusCode if code and known.value[0] == code), "")


class TracedChannel:
    """A channel whose stubs refuse a call without a timeout, and add the trace's header.

    An answer that cannot be decoded is None.

    Generated stubs accept it as a channel. It replaces gRPC's client interceptors, which cost a
    task and several loop turns for each call, and so for each token.

    Args:
        channel: Makes the calls.
    """

    def __init__(self, channel: grpc.aio.Channel | RenewedChannel) -> None:
        self._channel = channel

    def unary_unary(self, method: str, *codecs: Any, **options: Any) -> Callable[..., Any]:
        """Make a method's stub; see grpc.aio.Channel."""
        stub = self._channel.unary_unary(method, *codecs, **_quietly(options))
        return _traced(method, stub)

    def unary_stream(self, method: str, *codecs: Any, **options: Any) -> Callable[..., Any]:
        """Make a method's stub; see grpc.aio.Channel."""
        stub = self._channel.unary_stream(method, *codecs, **_quietly(options))
        return _traced(method, stub)

    def stream_stream(self, method: str) -> Callable[..., Any]:
        """Make the stub of a stream of bytes, which lasts; see grpc.aio.Channel."""
        return self._channel.stream_stream(method, None, None)

    async def close(self, grace: float | None = None) -> None:
        """Close the channel; its calls end after the grace."""
        await self._channel.close(grace)


def _quietly(options: dict[str, Any]) -> dict[str, Any]:
    deserialize = options.get("response_deserializer")
    if deserialize is None:
        return options
    return {**options, "response_deserializer": reading_quietly(deserialize)}


def reading_quietly(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Make bytes that are not a message None, as grpc.aio does, but without a traceback."""

    def read(raw: bytes) -> Any:
        try:
            return deserialize(raw)
        except DecodeError:
            return None

    return read


def _traced(method: str, stub: Callable[..., Any]) -> Callable[..., Any]:
    def begin(
        request: Any,
        *,
        timeout: float | None = None,
        metadata: Sequence[tuple[str, str]] = (),
        **options: Any,
    ) -> Any:
        # Deadlines do not propagate by themselves, and without one a hung server is not noticed.
        if timeout is None:
            raise ValueError(f"{method!r} was called without a timeout")
        traced = (*metadata, *tracing.outgoing_metadata())
        try:
            return stub(request, timeout=timeout, metadata=traced, **options)
        except grpc.aio.UsageError:
            raise ConnectionLostError("the channel is closed") from None

    return begin
