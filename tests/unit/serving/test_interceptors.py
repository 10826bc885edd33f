"""One interceptor chain, the whole of it, and every way in which a call can end."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import BytesValue, StringValue
from prometheus_client import CollectorRegistry

from paceline import errors
from paceline.status import decode
from paceline_orchestrator.fleet.wire import answers
from paceline_serving import exchanged_calls, interceptors, tracing
from paceline_serving.exchanging_channel import ExchangingChannel
from paceline_serving.interceptors import EdgeInterceptor, TracedChannel
from paceline_serving.keys import Caller, Key
from paceline_serving.telemetry import RpcMetrics
from paceline_serving.transport import POD_CHANNEL_OPTIONS, POD_SERVER_OPTIONS, pod_channel
from support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

CANARY = "a secret prompt"
UNARY, STREAM, WRITES = "/test.Service/Unary", "/test.Service/Stream", "/test.Service/Writes"
METHODS = [UNARY, STREAM, WRITES]


RPCS_ONLY = pytest.mark.parametrize("way", ["RPCs"], indirect=True)


@pytest.fixture(params=["RPCs", "messages"], autouse=True)
def way(request, monkeypatch) -> None:
    """How calls travel: what a call means must not depend on it."""
    monkeypatch.setattr(Server, "on_a_stream", request.param == "messages")


class Server:
    """A service whose methods all do the same, as a unary, a generator, and with context.write.

    Attributes:
        on_a_stream: Whether calls travel as messages of one stream, and not as RPCs.
    """

    on_a_stream = False

    def __init__(self, behavior: Callable[[Any], Any]) -> None:
        self._behavior = behavior
        self.registry = CollectorRegistry()
        self.ended = asyncio.Event()
        self.address = ""

    @asynccontextmanager
    async def running(self, **settings: Any) -> AsyncIterator[grpc.aio.Channel]:
        edge = EdgeInterceptor(RpcMetrics(self.registry), **settings)
        server = grpc.aio.server(interceptors=[edge], options=POD_SERVER_OPTIONS)
        server.add_generic_rpc_handlers((self._handlers(),))
        exchanged_calls.add_call_service(server, self._add_to, edge=edge)
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        channel = pod_channel(self.address, credentials=None)
        if self.on_a_stream:
            channel = ExchangingChannel(
                TracedChannel(grpc.aio.insecure_channel(self.address, POD_CHANNEL_OPTIONS)),
                methods=frozenset(METHODS),
            )
            channel.exchanges = True
        try:
            yield channel
        finally:
            await channel.close()
            await server.stop(0)

    def _add_to(self, server: Any) -> None:
        server.add_registered_method_handlers("test.Service", self._methods())

    def _handlers(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler("test.Service", self._methods())

    def _methods(self) -> dict[str, Any]:
        codec = {
            "request_deserializer": StringValue.FromString,
            "response_serializer": BytesValue.SerializeToString,
        }
        return {
            "Unary": grpc.unary_unary_rpc_method_handler(self._unary, **codec),
            "Stream": grpc.unary_stream_rpc_method_handler(self._stream, **codec),
            "Writes": grpc.unary_stream_rpc_method_handler(self._writes, **codec),
        }

    async def _unary(self, request: StringValue, context: Any) -> BytesValue:
        try:
            await self._behavior(request)
            return BytesValue(value=b"1")
        finally:
            self.ended.set()

    async def _stream(self, request: StringValue, context: Any) -> AsyncIterator[BytesValue]:
        try:
            yield BytesValue(value=b"1")
            await self._behavior(request)
            yield BytesValue(value=b"2")
        finally:
            self.ended.set()

    async def _writes(self, request: StringValue, context: Any) -> None:
        try:
            await context.write(BytesValue(value=b"1"))
            await self._behavior(request)
            await context.write(BytesValue(value=b"2"))
        finally:
            self.ended.set()

    def count(self, method: str, code: str, reason: str = "") -> float:
        labels = {"method": method.lstrip("/"), "code": code, "reason": reason}
        return self.registry.get_sample_value("paceline_rpcs_total", labels) or 0.0

    async def is_idle(self, method: str) -> None:
        """Wait for the end of all calls, which the client can hear of before they are counted."""
        labels = {"method": method.lstrip("/")}
        await until(
            lambda: self.registry.get_sample_value("paceline_rpcs_in_flight", labels) == 0,
            what="no call is in flight",
        )


def begin(channel: grpc.aio.Channel, method: str, **call: Any) -> Any:
    kind = channel.unary_unary if method == UNARY else channel.unary_stream
    stub = kind(method, StringValue.SerializeToString, BytesValue.FromString)
    return stub(StringValue(value="request"), **{"timeout": 60, **call})


def is_unary(call: Any) -> bool:
    return not hasattr(call, "__aiter__")


async def finish(call: Any) -> int:
    """Await a call's end; return how many messages came."""
    if is_unary(call):
        await call
        return 1
    return len([message async for message in call])


async def read(call: Any) -> None:
    """Await a call's end as the orchestrator does."""
    if is_unary(call):
        await call
        return
    async for _ in answers(call):
        pass


async def error_of(call: Any) -> errors.PacelineError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await finish(call)
    assert CANARY not in str(caught.value)
    return decode(caught.value)


@pytest.mark.parametrize("method", METHODS)
async def test_a_call_that_succeeds_is_counted(method):
    async def behavior(_request: StringValue) -> None:
        call = tracing.current()
        assert call is not None
        assert call.method == method

    server = Server(behavior)
    async with server.running() as channel:
        assert await finish(begin(channel, method)) == (1 if method == UNARY else 2)
        await server.is_idle(method)
        assert server.count(method, "OK") == 1


@pytest.mark.parametrize("method", METHODS)
async def test_a_typed_error_arrives_as_its_class_with_the_request_id(method):
    async def behavior(_request: StringValue) -> None:
        raise errors.OverloadedError("too many", retry_after_seconds=0.5)

    server = Server(behavior)
    async with server.running() as channel:
        call = begin(channel, method, metadata=(("x-request-id", "request-9"),))
        error = await error_of(call)
        assert type(error) is errors.OverloadedError
        assert error.retry_after_seconds == 0.5
        assert error.metadata["request_id"] == "request-9"
        await server.is_idle(method)
        assert server.count(method, "RESOURCE_EXHAUSTED", "OVERLOADED") == 1


async def test_a_key_at_its_own_limit_is_told_overloaded_and_counted_apart():
    caller = Caller(Key(name="a", sha256="0" * 64, tokens_per_minute=60))
    caller.charge(100)

    async def behavior(_request: StringValue) -> None:
        with caller.admitted():
            pass

    server = Server(behavior)
    async with server.running() as channel:
        error = await error_of(begin(channel, UNARY))
        assert type(error) is errors.OverloadedError
        await server.is_idle(UNARY)
        assert server.count(UNARY, "RESOURCE_EXHAUSTED", "KEY_LIMIT") == 1
        assert server.count(UNARY, "RESOURCE_EXHAUSTED", "OVERLOADED") == 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "raised",
    [ValueError(CANARY), errors.InternalError(CANARY), errors.ConnectionLostError(CANARY)],
    ids=lambda error: type(error).__name__,
)
async def test_what_nobody_expected_is_logged_once_and_masked(method, raised, caplog):
    async def behavior(_request: StringValue) -> None:
        raise raised

    server = Server(behavior)
    async with server.running() as channel:
        error = await error_of(begin(channel, method))
    assert type(error) is errors.InternalError
    assert error.metadata["request_id"]
    # Of the edge: asyncio logs what gRPC's poller says of event loops that are closed.
    ours = [record for record in caplog.records if record.name == interceptors.__name__]
    assert [record.levelno for record in ours] == [logging.ERROR]


@pytest.mark.parametrize("method", METHODS)
async def test_a_cancel_that_leaks_out_of_a_handler_gets_a_status(method, caplog):
    """gRPC itself would never answer, and a client without a deadline would hang."""

    async def behavior(_request: StringValue) -> None:
        inner = asyncio.create_task(asyncio.sleep(60))
        await asyncio.sleep(0)
        inner.cancel()
        await inner

    server = Server(behavior)
    async with server.running() as channel:
        assert type(await error_of(begin(channel, method))) is errors.InternalError


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("how", ["call.cancel", "task.cancel", "deadline", "channel.close"])
async def test_the_end_of_the_client_reaches_the_handler(method, how):
    started = asyncio.Event()

    async def behavior(_request: StringValue) -> None:
        started.set()
        await asyncio.sleep(60)

    server = Server(behavior)
    async with server.running() as channel:
        # On a busy machine a short deadline may be over before the call has come.
        deadlines = (0.1, 1.0, 10.0) if how == "deadline" else (60.0,)
        calls: list[Any] = []
        for seconds in deadlines:
            calls.append(call := begin(channel, method, timeout=seconds))
            task = asyncio.create_task(read(call))
            ended = task.done
            await until(lambda: started.is_set() or ended(), what="it came, or ended")  # noqa: B023
            if started.is_set():
                break
        if how == "call.cancel":
            call.cancel()
        elif how == "task.cancel":
            task.cancel()
        elif how == "channel.close":
            await channel.close()
        await server.ended.wait()
        with suppress(grpc.RpcError, errors.PacelineError, asyncio.CancelledError):
            await task
        await server.is_idle(method)
        code = "DEADLINE_EXCEEDED" if how == "deadline" else "CANCELLED"
        assert 1 <= server.count(method, code) <= len(calls)


@pytest.mark.parametrize("method", METHODS)
async def test_no_cancel_is_lost_at_the_moment_when_the_request_was_sent(method):
    """Of a stream that is read with `async for` alone, up to 13 % were."""
    started = asyncio.Event()

    async def behavior(_request: StringValue) -> None:
        started.set()
        await asyncio.sleep(60)

    server = Server(behavior)
    async with server.running() as channel:
        for _ in range(60):
            started.clear()
            server.ended.clear()
            task = asyncio.create_task(read(begin(channel, method)))
            await started.wait()
            task.cancel()
            await server.ended.wait()
            with suppress(asyncio.CancelledError):
                await task


@pytest.mark.parametrize("method", METHODS)
async def test_a_call_without_end_is_ended_by_the_server(method):
    async def behavior(_request: StringValue) -> None:
        await asyncio.sleep(60)

    server = Server(behavior)
    async with server.running(call_limit_seconds=0.05) as channel:
        error = await error_of(begin(channel, method))
        assert type(error) is errors.DeadlineError
        assert "at most 0.05 s" in error.message, "and not by the client's own deadline"
        assert server.ended.is_set()


async def test_a_service_may_be_without_that_limit():
    async def behavior(_request: StringValue) -> None:
        await asyncio.sleep(0.02)

    server = Server(behavior)
    async with server.running(call_limit_seconds=0.001, unbounded={"test.Service"}) as channel:
        assert (await begin(channel, UNARY)).value == b"1"


@pytest.mark.parametrize("method", METHODS)
async def test_a_timeout_inside_a_handler_is_not_the_calls_deadline(method, caplog):
    async def behavior(_request: StringValue) -> None:
        raise TimeoutError(CANARY)

    async with Server(behavior).running() as channel:
        assert type(await error_of(begin(channel, method))) is errors.InternalError


@pytest.mark.parametrize("method", METHODS)
async def test_malformed_bytes_are_refused_before_the_handler(method):
    async def behavior(_request: StringValue) -> None:
        raise AssertionError

    server = Server(behavior)
    async with server.running() as channel:
        kind = channel.unary_unary if method == UNARY else channel.unary_stream
        error = await error_of(kind(method)(b"\xff\xff", timeout=60))
        assert type(error) is errors.MalformedRequestError
        assert not server.ended.is_set()


async def test_an_unknown_method_is_unsupported():
    server = Server(lambda _: asyncio.sleep(0))
    async with server.running() as channel:
        error = await error_of(begin(channel, "/test.Service/Other"))
        assert type(error) is errors.UnsupportedError


class Flood(Server):
    async def _stream(self, request: StringValue, context: Any) -> AsyncIterator[BytesValue]:
        try:
            while True:
                yield BytesValue(value=b"x" * (1 << 20))
        finally:
            self.ended.set()


@RPCS_ONLY
async def test_a_client_that_does_not_read_is_let_go():
    server = Flood(lambda _: asyncio.sleep(0))
    async with server.running(write_stall_seconds=0.1) as channel:
        call = begin(channel, STREAM)
        await server.ended.wait()
        assert type(await error_of(call)) is errors.SlowConsumerError
        await server.is_idle(STREAM)
        assert server.count(STREAM, "DEADLINE_EXCEEDED", "SLOW_CONSUMER") == 1


@RPCS_ONLY
async def test_a_client_that_does_not_even_read_its_end_is_no_error_of_the_server(
    monkeypatch, caplog
):
    monkeypatch.setattr("paceline_serving.interceptors._ABORT_SECONDS", 0.1)
    server = Flood(lambda _: asyncio.sleep(0))
    async with server.running(write_stall_seconds=0.1) as channel:
        call = begin(channel, STREAM)
        await server.is_idle(STREAM)
        assert server.count(STREAM, "DEADLINE_EXCEEDED", "SLOW_CONSUMER") == 1
        call.cancel()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("method", METHODS)
async def test_a_client_call_without_a_timeout_is_refused(method):
    async with Server(lambda _: asyncio.sleep(0)).running() as channel:
        with pytest.raises(ValueError, match="without a timeout"):
            await finish(begin(channel, method, timeout=None))


async def test_a_trace_goes_on_in_the_calls_that_a_call_makes():
    seen: list[tracing.CallContext] = []
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"

    async def behavior(request: StringValue) -> None:
        call = tracing.current()
        assert call is not None
        seen.append(call)
        if len(seen) == 1:
            await finish(begin(channel, UNARY))

    async with Server(behavior).running() as channel:
        metadata = (("traceparent", f"00-{trace_id}-00f067aa0ba902b7-00"), ("x-request-id", "r-1"))
        await finish(begin(channel, UNARY, metadata=metadata))
    assert [call.trace_id for call in seen] == [trace_id] * 2
    assert [call.request_id for call in seen] == ["r-1"] * 2
    assert [call.trace_flags for call in seen] == ["00"] * 2
    assert len({"00f067aa0ba902b7", *(call.span_id for call in seen)}) == 3


@RPCS_ONLY
async def test_metadata_over_the_limit_is_always_refused_and_neighbours_live_on():
    started = asyncio.Event()
    proceed = asyncio.Event()

    async def behavior(_request: StringValue) -> None:
        started.set()
        await proceed.wait()

    async with Server(behavior).running() as channel:
        neighbour = asyncio.create_task(finish(begin(channel, UNARY)))
        await started.wait()
        for _ in range(3):
            error = await error_of(begin(channel, UNARY, metadata=(("x", "y" * 8500),)))
            assert type(error) is errors.InvalidFieldError  # of a bare RESOURCE_EXHAUSTED
        proceed.set()
        assert await neighbour == 1


@RPCS_ONLY
@pytest.mark.full
async def test_a_quiet_call_outlives_a_minute_of_the_channels_pings():
    """A server with another ping policy, or the wrong option's name, ends it after seconds."""

    async def behavior(_request: StringValue) -> None:
        await asyncio.sleep(60)

    async with Server(behavior).running() as channel:
        assert await finish(begin(channel, UNARY, timeout=90)) == 1
