"""A gRPC server that passes every call on to another one, and can be well and not answer.

It stands between an orchestrator and a model server. Per method, and at any time, it keeps calls
without an answer, delays or fails them, or changes what is answered. Pings are answered and all
other methods, such as health, go through: so looks a stuck GPU, or a stopped process behind a
sidecar.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import grpc

from paceline.errors import PacelineError
from paceline.status import DETAILS_KEY, encode
from paceline_serving.exchanged_calls import Exchange
from support.ports import free_address

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    Metadata = tuple[tuple[str, str | bytes], ...]

# Only what the relay must not limit: a server that it stands before has limits of its own.
_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_retries", 0),
    ("grpc.so_reuseport", 0),
    # An orchestrator pings every 2 s, also without calls; a stricter server hangs up on it.
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.keepalive_permit_without_calls", 1),
    # A restarted server is found again at once.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
)
_A_WRITE_FAILED = "Internal error from Core"
_EXCHANGE = "/paceline.v1.CallService/ExchangeCalls"
# Of each connection, not of the call: gRPC sets its own.
_OWN_METADATA = "user-agent"


@dataclass(frozen=True)
class _Fault:
    """What happens to calls of a method: other answers, an end with a status, or else a wait."""

    change: Callable[[bytes], bytes] | None = None
    delay_seconds: float = 0.0
    status: grpc.StatusCode | None = None
    trailers: Metadata = ()
    lifted: asyncio.Event = field(default_factory=asyncio.Event)


class CallRelay:
    """Passes calls on, whatever their method; use it as an asynchronous context manager.

    Methods are named by their last part, such as "Verify". A fault also meets calls that run
    already: before each answer, their fault is looked up again. What waits when the fault is lifted
    goes on.

    Concurrency: `hang`, `delay`, `fail`, `change` and `heal` may be called from any thread.

    Args:
        upstream: The server's address.

    Attributes:
        address: Where the relay listens.
        calls: How many calls came, by method.
        hits: How often a call met a fault, at its beginning or before an answer.
        running: Calls that have not ended.
    """

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream
        self.address = ""
        self.calls: Counter[str] = Counter()
        self.hits: Counter[str] = Counter()
        self.running: Counter[str] = Counter()
        self._faults: dict[str, _Fault] = {}

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._channel = grpc.aio.insecure_channel(self.upstream, _OPTIONS)
        self._server = grpc.aio.server(options=_OPTIONS)
        self._server.add_generic_rpc_handlers((_EveryMethod(self._relay),))
        self.address = free_address()
        self._server.add_insecure_port(self.address)
        await self._server.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.heal()
        await self._server.stop(0)
        await self._channel.close()

    def hang(self, *methods: str) -> None:
        """Accept calls and never answer."""
        self._set(methods, lambda: _Fault())

    def delay(self, *methods: str, seconds: float) -> None:
        """Keep each call, and each answer of a stream, for so long."""
        self._set(methods, lambda: _Fault(delay_seconds=seconds))

    def fail(self, *methods: str, how: grpc.StatusCode | PacelineError) -> None:
        """End calls as the server did not: as a proxy would, or with an error of ours."""
        if isinstance(how, PacelineError):
            status = grpc.StatusCode[how.code]
            trailers = ((DETAILS_KEY, encode(how).SerializeToString()),)
            self._set(methods, lambda: _Fault(status=status, trailers=trailers))
        else:
            self._set(methods, lambda: _Fault(status=how))

    def change(self, *methods: str, how: Callable[[bytes], bytes]) -> None:
        """Pass on other answers than the server gave."""
        self._set(methods, lambda: _Fault(change=how))

    def heal(self, *methods: str) -> None:
        """Let everything through again, or these methods."""
        for method in methods or tuple(self._faults):
            fault = self._faults.pop(method, None)
            if fault is not None:
                self._loop.call_soon_threadsafe(fault.lifted.set)

    def _set(self, methods: tuple[str, ...], make: Any) -> None:
        assert methods, "which methods?"
        for method in methods:
            before, self._faults[method] = self._faults.get(method), make()
            if before is not None:
                self._loop.call_soon_threadsafe(before.lifted.set)

    async def _relay(
        self, path: str, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> None:
        """Pass one call on; its deadline and its cancel, too."""
        method = path.rpartition("/")[2]
        self.calls[method] += 1
        self.running[method] += 1
        try:
            await self._meet_fault(method, context)
            await self._pass_on(path, requests, context)
        finally:
            self.running[method] -= 1

    async def _pass_on(
        self, path: str, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> None:
        method = path.rpartition("/")[2]
        call = self._channel.stream_stream(path)(
            requests,
            timeout=context.time_remaining(),
            metadata=_passed(context.invocation_metadata()),
        )
        try:
            # Without an answer to wait for there may still be metadata, and a status.
            with suppress(grpc.RpcError):
                await context.send_initial_metadata(_passed(await call.initial_metadata()))
                while (answer := await call.read()) is not grpc.aio.EOF:
                    await self._meet_fault(method, context)
                    await context.write(self._changed(method, answer))
            await _end_alike(context, call)
        finally:
            call.cancel()

    async def _meet_fault(self, method: str, context: grpc.aio.ServicerContext) -> None:
        """Wait, or end the call, as long as there is a fault for its method."""
        met = False
        while (fault := self._faults.get(method)) is not None and fault.change is None:
            self.hits[method] += not met
            met = True
            if fault.status is not None:
                await context.abort(fault.status, "a relay says so", fault.trailers)
            try:
                await asyncio.wait_for(fault.lifted.wait(), fault.delay_seconds or None)
            except TimeoutError:
                return

    def _changed(self, method: str, answer: bytes) -> bytes:
        fault = self._faults.get(method)
        if fault is None or fault.change is None:
            return answer
        self.hits[method] += 1
        return fault.change(answer)


class _EveryMethod(grpc.GenericRpcHandler):
    """On the wire every call is a stream both ways, so one handler serves all kinds."""

    def __init__(self, relay: Any) -> None:
        self._relay = relay

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        if handler_call_details.method == _EXCHANGE:
            return grpc.stream_stream_rpc_method_handler(self._exchange)

        async def handler(requests: Any, context: Any) -> None:  # gRPC tells it by its kind
            await self._relay(handler_call_details.method, requests, context)

        return grpc.stream_stream_rpc_method_handler(handler)

    async def _exchange(self, requests: Any, context: Any) -> None:
        """Take calls off a stream: each meets its method's faults, and goes on as an RPC."""
        handlers = _Exchanged(self._relay)
        await Exchange(handlers, context, write_stall_seconds=60).run(requests)


class _Exchanged(dict[str, Any]):
    """The handlers of all methods whose calls can come on a stream."""

    def __init__(self, relay: Any) -> None:
        self._relay = relay

    def get(self, method: str, default: Any = None) -> Any:
        async def handler(raw: bytes, call: Any) -> None:
            context = _ContextOfAMessage(call)
            await self._relay(method, _only(raw), context)
            await context.end()

        return grpc.unary_stream_rpc_method_handler(handler, response_serializer=bytes)


class _ContextOfAMessage:
    """What an RPC's context can do beyond a message's."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._code: Any = grpc.StatusCode.OK
        self._details = ""
        self._trailers: Any = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    async def send_initial_metadata(self, metadata: Any) -> None:
        """Messages have none."""

    def set_code(self, code: Any) -> None:
        self._code = code

    def set_details(self, details: str) -> None:
        self._details = details

    def set_trailing_metadata(self, metadata: Any) -> None:
        self._trailers = metadata

    async def end(self) -> None:
        if self._code is not grpc.StatusCode.OK:
            await self._call.abort(self._code, self._details, self._trailers)


async def _only(raw: bytes) -> AsyncIterator[bytes]:
    yield raw


def _passed(metadata: Any) -> Metadata:
    return tuple((key, value) for key, value in metadata or () if key != _OWN_METADATA)


async def _end_alike(context: grpc.aio.ServicerContext, call: Any) -> None:
    """End a call with the status, the words and the trailers of another.

    Where a request's message fails since its connection is gone, grpc.aio puts INTERNAL over the
    status (grpc/grpc#36066). This concerns streams of requests; the relay's callers send few.
    """
    code, details = await call.code(), await call.details()
    was_lost = code is grpc.StatusCode.INTERNAL and details == _A_WRITE_FAILED
    context.set_trailing_metadata(_passed(await call.trailing_metadata()))
    context.set_code(grpc.StatusCode.UNAVAILABLE if was_lost else code)
    context.set_details(details)
