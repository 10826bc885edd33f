"""What is special to calls on a stream; what they share with RPCs asks test_interceptors.py."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import BytesValue
from google.rpc.status_pb2 import Status
from prometheus_client import CollectorRegistry

from paceline import errors
from paceline.status import DETAILS_KEY, decode
from paceline.v1.call_service_pb2 import (
    CallMessage,
    ExchangeCallsRequest,
    ExchangeCallsResponse,
)
from paceline_contract.limits import MOST_EXCHANGED_BYTES, MOST_EXCHANGED_CALLS
from paceline_serving import exchanged_calls
from paceline_serving.exchanging_channel import ExchangingChannel
from paceline_serving.interceptors import EdgeInterceptor, TracedChannel
from paceline_serving.telemetry import RpcMetrics
from paceline_serving.transport import POD_CHANNEL_OPTIONS, POD_SERVER_OPTIONS
from support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

ECHO, COUNT, WAIT = "/test.Service/Echo", "/test.Service/Count", "/test.Service/Wait"
FLOOD = "/test.Service/Flood"
EXCHANGE = "/paceline.v1.CallService/ExchangeCalls"


class Server:
    """A service that echoes, that streams numbers, and that waits to be cancelled.

    Attributes:
        batch_sizes: How many calls each message on a stream had.
        by_rpc: How many calls came as RPCs.
    """

    def __init__(self, *, has_streams: bool = True) -> None:
        self.has_streams = has_streams
        self.batch_sizes: list[int] = []
        self.by_rpc = 0
        self.waiting = asyncio.Event()
        self.left = asyncio.Event()

    @asynccontextmanager
    async def running(self, **settings: Any) -> AsyncIterator[grpc.aio.Channel]:
        edge = EdgeInterceptor(RpcMetrics(CollectorRegistry()))
        server = grpc.aio.server(interceptors=[edge], options=POD_SERVER_OPTIONS)
        handlers = self._handlers()
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("test.Service", handlers),)
        )
        if self.has_streams:
            exchanged_calls.add_call_service(
                server,
                lambda it: it.add_registered_method_handlers("test.Service", handlers),
                edge=edge,
                **settings,
            )
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        channel = grpc.aio.insecure_channel(address, POD_CHANNEL_OPTIONS)
        try:
            yield channel
        finally:
            await channel.close()
            await server.stop(0)

    def _handlers(self) -> dict[str, Any]:
        codec = {
            "request_deserializer": BytesValue.FromString,
            "response_serializer": BytesValue.SerializeToString,
        }
        return {
            "Echo": grpc.unary_unary_rpc_method_handler(self._echo, **codec),
            "Count": grpc.unary_stream_rpc_method_handler(self._count, **codec),
            "Flood": grpc.unary_stream_rpc_method_handler(self._flood, **codec),
            "Wait": grpc.unary_unary_rpc_method_handler(self._wait, **codec),
        }

    async def _echo(self, request: BytesValue, context: Any) -> BytesValue:
        self.by_rpc += not hasattr(context, "bounds_writes")
        return request

    async def _count(self, request: BytesValue, context: Any) -> AsyncIterator[BytesValue]:
        for number in range(3):
            yield BytesValue(value=b"%d" % number + request.value)

    async def _flood(self, request: BytesValue, context: Any) -> AsyncIterator[BytesValue]:
        try:
            while True:
                yield BytesValue(value=request.value * (1 << 20))
        finally:
            self.left.set()

    async def _wait(self, request: BytesValue, context: Any) -> BytesValue:
        self.waiting.set()
        try:
            await asyncio.sleep(600)
        finally:
            self.left.set()
        return request


def exchanging(channel: grpc.aio.Channel) -> ExchangingChannel:
    found = ExchangingChannel(TracedChannel(channel), methods=frozenset({ECHO, COUNT, WAIT}))
    found.exchanges = True
    return found


def begin(channel: Any, method: str, content: bytes = b"x") -> Any:
    kind = channel.unary_stream if method == COUNT else channel.unary_unary
    stub = kind(method, BytesValue.SerializeToString, BytesValue.FromString)
    return stub(BytesValue(value=content), timeout=60)


def message(number: int, method: str = ECHO, content: bytes = b"x", **fields: Any) -> CallMessage:
    request = BytesValue(value=content).SerializeToString()
    given = {"timeout_ns": 60_000_000_000, "request": request, **fields}
    return CallMessage(number=number, method=method, **given)


async def said(channel: grpc.aio.Channel, *batches: Sequence[CallMessage] | bytes) -> list[Any]:
    """Send batches on a stream of bytes, end it, and return the answers."""
    stream = channel.stream_stream(EXCHANGE, None, None)()
    for batch in batches:
        raw = batch if isinstance(batch, bytes) else request_of(batch)
        await stream.write(raw)
    await stream.done_writing()
    return [
        answer async for raw in stream for answer in ExchangeCallsResponse.FromString(raw).answers
    ]


def request_of(calls: Sequence[CallMessage]) -> bytes:
    return ExchangeCallsRequest(calls=calls).SerializeToString()


def error_in(raw: bytes) -> errors.PacelineError:
    return decode(
        grpc.aio.AioRpcError(
            next(it for it in grpc.StatusCode if it.value[0] == Status.FromString(raw).code),
            grpc.aio.Metadata(),
            grpc.aio.Metadata((DETAILS_KEY, raw)),
        )
    )


async def test_answers_are_those_of_the_calls_and_a_streams_end_comes_last():
    async with Server().running() as channel:
        answers = await said(channel, [message(1, COUNT), message(2, content=b"two")])
        (echo,) = (it for it in answers if it.number == 2)
        assert BytesValue.FromString(echo.response).value == b"two"
        counted = [it for it in answers if it.number == 1]
        assert [BytesValue.FromString(it.response).value for it in counted[:3]] == [
            b"0x",
            b"1x",
            b"2x",
        ]
        assert [it.ended for it in counted] == [False, False, False, True]
        assert not counted[-1].HasField("response")


async def test_calls_of_one_turn_travel_together():
    server = Server()
    async with server.running() as channel:
        stream = exchanging(channel)
        parsed, sizes = exchanged_calls._parsed, server.batch_sizes
        with pytest.MonkeyPatch.context() as patch:

            def watched(raw: bytes) -> Any:
                request = parsed(raw)
                sizes.append(len(request.calls))
                return request

            patch.setattr(exchanged_calls, "_parsed", watched)
            calls = [begin(stream, ECHO, b"%d" % number) for number in range(10)]
            assert [(await call).value for call in calls] == [b"%d" % it for it in range(10)]
        assert sizes == [10]
        assert server.by_rpc == 0
        await stream.close()


async def test_a_large_request_is_an_rpc_so_that_no_call_waits_for_it():
    server = Server()
    async with server.running() as channel:
        stream = exchanging(channel)
        large = b"x" * MOST_EXCHANGED_BYTES
        assert (await begin(stream, ECHO, large)).value == large
        assert server.by_rpc == 1
        assert (await begin(stream, ECHO)).value == b"x"
        assert server.by_rpc == 1
        await stream.close()


async def test_calls_to_a_server_without_the_stream_are_rpcs_from_the_second_on():
    """GetModelInfo says that there is one; an older server may have come to the address since."""
    server = Server(has_streams=False)
    async with server.running() as channel:
        stream = exchanging(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await begin(stream, ECHO)
        assert type(decode(caught.value)) is errors.ConnectionLostError
        assert not stream.exchanges
        assert (await begin(stream, ECHO)).value == b"x"
        assert server.by_rpc == 1
        await stream.close()


async def test_the_end_of_the_stream_fails_its_calls_and_the_next_call_opens_another():
    server = Server()
    async with server.running() as channel:
        stream = exchanging(channel)
        call = begin(stream, WAIT)
        waiting = asyncio.create_task(call_result(call))
        await server.waiting.wait()
        (running,) = stream._running
        running.cancel()
        error = await waiting
        assert type(error) is errors.ConnectionLostError
        await server.left.wait()
        assert (await begin(stream, ECHO)).value == b"x"
        await stream.close()


async def test_a_channel_that_is_closed_in_the_turn_of_a_call_fails_the_call():
    async with Server().running() as channel:
        stream = exchanging(channel)
        call = begin(stream, WAIT)
        await stream.close()
        assert type(await call_result(call)) is errors.ConnectionLostError


async def test_a_stream_may_have_as_many_calls_as_a_connection_rpcs(monkeypatch):
    monkeypatch.setattr(exchanged_calls, "_MOST_RUNNING", 2)
    async with Server().running() as channel:
        stream = exchanging(channel)
        running = [begin(stream, WAIT) for _ in range(2)]
        assert type(await call_result(begin(stream, ECHO))) is errors.OverloadedError
        for call in running:
            call.cancel()
        await begin(stream, ECHO, b"x" * MOST_EXCHANGED_BYTES)  # an RPC: the cancels have arrived
        await until_served(stream)
        await stream.close()


async def until_served(stream: ExchangingChannel) -> None:
    while type(await call_result(begin(stream, ECHO))) is errors.OverloadedError:
        pass


async def call_result(call: Any) -> Any:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        return decode(error)


async def test_a_call_that_is_withdrawn_before_it_was_sent_never_is():
    server = Server()
    async with server.running() as channel:
        stream = exchanging(channel)
        call = begin(stream, WAIT)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await begin(stream, ECHO)).value == b"x"
        assert not server.waiting.is_set()
        await stream.close()


async def test_what_a_server_floods_a_call_with_is_not_kept(monkeypatch):
    monkeypatch.setattr("paceline_serving.exchanging_channel._MOST_UNREAD_BYTES", 1000)
    async with Server().running() as channel:
        stream = exchanging(channel)
        call = begin(stream, COUNT, b"x" * 900)
        await until(call.done, what="it was given up")
        with pytest.raises(grpc.aio.AioRpcError, match="faster than any is read"):
            async for _ in call:
                pass
        assert (await begin(stream, ECHO)).value == b"x"
        await stream.close()


async def test_a_caller_that_reads_no_answers_is_let_go():
    server = Server()
    async with server.running(write_stall_seconds=0.1) as channel:
        stream = channel.stream_stream(EXCHANGE, None, None)()
        await stream.write(request_of([message(1, FLOOD)]))
        await server.left.wait()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stream:
                pass
        assert type(decode(caught.value)) is errors.SlowConsumerError


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"timeout_ns": 0}, errors.InvalidFieldError),
        ({"method": "/test.Service/Other"}, errors.UnsupportedError),
        ({"method": ""}, errors.UnsupportedError),
        ({"content": b"x" * MOST_EXCHANGED_BYTES}, errors.InvalidFieldError),
        ({"request": b"\xff\xff"}, errors.MalformedRequestError),
    ],
    ids=["no time", "another method", "no method", "too large", "no request"],
)
async def test_a_bad_call_is_answered_with_its_error_and_its_neighbours_are_served(fields, kind):
    async with Server().running() as channel:
        bad, good = await said(channel, [message(1, **fields), message(2)])
        if bad.number != 1:
            bad, good = good, bad
        assert type(error_in(bad.status)) is kind
        assert bad.ended
        assert BytesValue.FromString(good.response).value == b"x"


@pytest.mark.parametrize(
    "batches",
    [
        [b"\xff\xff"],
        [[message(2)], [message(2)]],
        [[message(2), message(1)]],
        [[message(it) for it in range(1, MOST_EXCHANGED_CALLS + 2)]],
    ],
    ids=["no message", "a number again", "a smaller number", "too many calls"],
)
async def test_a_stream_that_breaks_the_rules_ends(batches):
    async with Server().running() as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await said(channel, *batches)
        assert type(decode(caught.value)) is errors.MalformedRequestError


async def test_withdrawing_what_is_unknown_does_nothing():
    async with Server().running() as channel:
        (answer,) = await said(
            channel,
            [CallMessage(number=9, cancel=True), message(1)],
            [CallMessage(number=1, cancel=True)],
        )
        assert BytesValue.FromString(answer.response).value == b"x"
