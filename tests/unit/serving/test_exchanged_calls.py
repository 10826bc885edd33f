"""Calls on a stream over gRPC, with a server that keeps the rules and with one that lies.

What such calls share with RPCs is in test_interceptors.py; each end of a stream on virtual time is
in test_exchange.py (the server's) and in test_exchanging_channel.py (the caller's).
"""

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
    AnswerMessage,
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

    @asynccontextmanager
    async def running(self, **settings: Any) -> AsyncIterator[grpc.aio.Channel]:
        edge = EdgeInterceptor(RpcMetrics(CollectorRegistry()), access=settings.pop("access", None))
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
            "Wait": grpc.unary_unary_rpc_method_handler(self._wait, **codec),
        }

    async def _echo(self, request: BytesValue, context: Any) -> BytesValue:
        self.by_rpc += not hasattr(context, "bounds_writes")
        return request

    async def _count(self, request: BytesValue, context: Any) -> AsyncIterator[BytesValue]:
        for number in range(3):
            yield BytesValue(value=b"%d" % number + request.value)

    async def _wait(self, request: BytesValue, context: Any) -> BytesValue:
        await asyncio.sleep(600)
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


async def test_a_call_beyond_the_streams_limit_is_refused_until_another_has_ended():
    async with Server().running(most_running=2) as channel:
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


async def test_a_role_that_may_open_the_stream_may_not_call_every_service_on_it():
    class Access:
        def check(self, service: str, identity: Any) -> None:
            if service == "test.Service":
                raise errors.PermissionDeniedError("not this service")

    async with Server().running(access=Access()) as channel:
        (answer,) = await said(channel, [message(1)])
        assert type(error_in(answer.status)) is errors.PermissionDeniedError


class Unparsed:
    """A message that must not be parsed."""

    @staticmethod
    def FromString(raw: bytes) -> None:  # noqa: N802 - protobuf's name
        raise AssertionError("it was parsed")


async def test_too_many_calls_are_refused_before_they_are_parsed(monkeypatch):
    monkeypatch.setattr(exchanged_calls, "ExchangeCallsRequest", Unparsed)
    async with Server().running() as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await said(channel, b"\x0a\x00" * (MOST_EXCHANGED_CALLS + 1))
        assert type(decode(caught.value)) is errors.MalformedRequestError


class Liar:
    """A server of CallService that answers each message with what it is told to.

    Attributes:
        received: The calls and cancels that came, on all streams.
        opened: How many streams were opened.
        ended: How many of them their caller has ended.
    """

    def __init__(self, *answers: bytes, failure: grpc.StatusCode | None = None) -> None:
        self._answers = answers
        self._failure = failure
        self.received: list[CallMessage] = []
        self.opened = self.ended = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[ExchangingChannel]:
        server = grpc.aio.server(options=POD_SERVER_OPTIONS)
        handlers = {"ExchangeCalls": grpc.stream_stream_rpc_method_handler(self._exchange)}
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("paceline.v1.CallService", handlers),)
        )
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        stream = exchanging(grpc.aio.insecure_channel(address, POD_CHANNEL_OPTIONS))
        try:
            yield stream
        finally:
            await stream.close()
            await server.stop(0)

    async def _exchange(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        self.opened += 1
        async for raw in requests:
            self.received += ExchangeCallsRequest.FromString(raw).calls
            if self._failure is not None:
                await context.abort(self._failure, "so says the stream")
            for answer in self._answers:
                yield answer
        self.ended += 1

    def cancels(self) -> list[int]:
        return [it.number for it in self.received if it.cancel]


def answered(*answers: AnswerMessage) -> bytes:
    return ExchangeCallsResponse(answers=answers).SerializeToString()


ECHOED = BytesValue(value=b"x").SerializeToString()


@pytest.mark.parametrize(
    "lie",
    [
        b"\xff\xff",
        b"\x0a\x00" * (MOST_EXCHANGED_CALLS + 1),
        answered(AnswerMessage(number=2, response=ECHOED, ended=True)),
        answered(AnswerMessage(number=1, response=b"\xff\xff", ended=True)),
        answered(AnswerMessage(number=1, ended=True)),
    ],
    ids=["no message", "too many answers", "to no call", "no response", "an end alone"],
)
async def test_what_no_server_may_say_on_the_stream_is_an_answer_that_cannot_be_decoded(lie):
    async with Liar(lie).running() as stream:
        assert await begin(stream, ECHO) is None


async def test_too_many_answers_are_refused_before_they_are_parsed(monkeypatch):
    monkeypatch.setattr("paceline_serving.exchanging_channel.ExchangeCallsResponse", Unparsed)
    async with Liar(b"\x0a\x00" * (MOST_EXCHANGED_CALLS + 1)).running() as stream:
        assert await begin(stream, ECHO) is None


async def test_a_call_that_is_answered_and_not_ended_is_withdrawn():
    liar = Liar(answered(AnswerMessage(number=1, response=ECHOED)))
    async with liar.running() as stream:
        assert (await begin(stream, ECHO)).value == b"x"
        await until(lambda: liar.cancels() == [1], what="it was withdrawn")


async def test_a_status_larger_than_any_trailer_is_not_read():
    status = Status(code=14, message="x" * 9000).SerializeToString()
    async with Liar(
        answered(AnswerMessage(number=1, status=status, ended=True))
    ).running() as stream:
        error = await call_result(begin(stream, ECHO))
        assert type(error) is errors.InternalError
        assert "larger than any" in error.message


@pytest.mark.parametrize(
    ("code", "kind", "exchanges"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, errors.ConnectionLostError, True),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.ConnectionLostError, True),
        (grpc.StatusCode.CANCELLED, errors.DrainingError, True),
        (grpc.StatusCode.PERMISSION_DENIED, errors.ConnectionLostError, False),
        (grpc.StatusCode.UNAUTHENTICATED, errors.ConnectionLostError, False),
    ],
)
async def test_what_a_stream_ends_with_is_not_said_of_its_calls(code, kind, exchanges):
    async with Liar(failure=code).running() as stream:
        assert type(await call_result(begin(stream, ECHO))) is kind
        assert stream.exchanges == exchanges
