"""The caller's end of a stream of calls, without gRPC and on virtual time."""

from __future__ import annotations

import asyncio
import gc
import weakref
from contextvars import ContextVar
from typing import Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import BytesValue

from paceline.v1.call_service_pb2 import (
    AnswerMessage,
    CallMessage,
    ExchangeCallsRequest,
    ExchangeCallsResponse,
)
from paceline_contract.limits import MOST_EXCHANGED_CALLS
from paceline_serving.exchanging_channel import ExchangingChannel
from support.virtual_time import virtually

UNARY, STREAM = "/test.Service/Unary", "/test.Service/Stream"
MIB = 1 << 20
SETTLED_SECONDS = 0.001


class Stream:
    """A stream that a test plays the server of.

    Attributes:
        batches: The messages that came, each with its calls and cancels.
        accepts: Set while the server takes messages; a write waits for it.
        has_ended: Whether the caller has said that nothing more comes.
        is_cancelled: Whether the caller has left.
    """

    def __init__(self) -> None:
        self.batches: list[list[CallMessage]] = []
        self.accepts = asyncio.Event()
        self.accepts.set()
        self.has_ended = self.is_cancelled = False
        self._answers: asyncio.Queue[Any] = asyncio.Queue()

    @property
    def received(self) -> list[CallMessage]:
        return [call for batch in self.batches for call in batch]

    @property
    def cancels(self) -> list[int]:
        return [call.number for call in self.received if call.cancel]

    def answer(self, *answers: AnswerMessage, times: int = 1) -> None:
        """Send a message with these answers, and the same one again."""
        raw = ExchangeCallsResponse(answers=answers).SerializeToString()
        for _ in range(times):
            self._answers.put_nowait(raw)

    def end(self, code: grpc.StatusCode | None = None) -> None:
        metadata = grpc.aio.Metadata()
        self._answers.put_nowait(
            grpc.aio.EOF if code is None else grpc.aio.AioRpcError(code, metadata, metadata)
        )

    # --- the call of grpc.aio -----------------------------------------------------------------

    async def read(self) -> Any:
        answer = await self._answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def write(self, raw: bytes) -> None:
        await self.accepts.wait()
        self.batches.append(list(ExchangeCallsRequest.FromString(raw).calls))

    async def done_writing(self) -> None:
        self.has_ended = True

    def cancel(self) -> None:
        self.is_cancelled = True


class Server:
    """What a channel of gRPC leads to: streams, and stubs that note their calls.

    Attributes:
        streams: The streams that were opened.
        rpcs: The methods of calls that came as RPCs.
    """

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.rpcs: list[str] = []
        self.channel: Any = ExchangingChannel(self, methods=frozenset({UNARY, STREAM}))
        self.channel.exchanges = True

    def begin(self, method: str = UNARY, *, seconds: float = 60.0, content: bytes = b"x") -> Any:
        kind = self.channel.unary_unary if method == UNARY else self.channel.unary_stream
        stub = kind(method, BytesValue.SerializeToString, BytesValue.FromString)
        return stub(BytesValue(value=content), timeout=seconds)

    @property
    def stream(self) -> Stream:
        """The newest stream."""
        return self.streams[-1]

    # --- the channel --------------------------------------------------------------------------

    def stream_stream(self, _method: str) -> Any:
        def open_stream() -> Stream:
            self.streams.append(Stream())
            return self.stream

        return open_stream

    def unary_unary(self, method: str, **_options: Any) -> Any:
        return lambda *_, **__: self.rpcs.append(method)

    unary_stream = unary_unary

    async def close(self, _grace: float | None) -> None:
        """Close the channel."""


def response(number: int, content: bytes = b"y", *, ended: bool = True) -> AnswerMessage:
    raw = BytesValue(value=content).SerializeToString()
    return AnswerMessage(number=number, response=raw, ended=ended)


async def settled() -> None:
    await asyncio.sleep(SETTLED_SECONDS)


async def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code()


@virtually
async def test_a_caller_that_is_cancelled_while_it_waits_for_a_streams_answer_withdraws_the_call():
    """The target would go on decoding for nobody."""
    server = Server()
    call = server.begin(STREAM)
    waiting = asyncio.create_task(anext(call))
    await settled()
    waiting.cancel()
    await settled()
    assert waiting.cancelled()
    assert (server.stream.cancels, call.done()) == ([1], True)
    await server.channel.close()


@virtually
async def test_a_call_that_is_withdrawn_in_the_turn_of_its_beginning_is_never_sent():
    server = Server()
    gone, stays = server.begin(), server.begin()
    gone.cancel()
    await settled()
    assert [it.method for it in server.stream.received] == ["", UNARY]
    server.stream.answer(response(2))
    assert (await stays).value == b"y"
    await server.channel.close()


@virtually
async def test_an_answer_that_comes_after_the_calls_time_changes_nothing():
    server = Server()
    call = server.begin(STREAM, seconds=1.0)
    await settled()
    await asyncio.sleep(1.0)
    assert call.done()
    server.stream.answer(response(1))
    await settled()
    assert await code_of(anext(call)) is grpc.StatusCode.DEADLINE_EXCEEDED
    await server.channel.close()


@virtually
async def test_a_call_whose_time_is_over_is_withdrawn_only_after_the_servers_own_clock():
    """Withdrawn at once, it would count at the server as cancelled, and not as too late."""
    server = Server()
    call = server.begin(seconds=5.0)
    assert await code_of(call) is grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.sleep(0.9)
    assert server.stream.cancels == []
    await asyncio.sleep(0.2)
    assert server.stream.cancels == [1]
    await server.channel.close()


@virtually
async def test_a_long_stream_is_no_flood_while_its_caller_reads():
    server = Server()
    call = server.begin(STREAM)
    await settled()
    for index in range(10):
        server.stream.answer(response(1, b"x" * MIB, ended=index == 9))
        assert len((await anext(call)).value) == MIB
    with pytest.raises(StopAsyncIteration):
        await anext(call)
    await server.channel.close()


@virtually
async def test_answers_that_nobody_reads_end_their_call_at_eight_mebibytes():
    server = Server()
    call = server.begin(STREAM)
    await settled()
    for _ in range(7):
        server.stream.answer(response(1, b"x" * MIB, ended=False))
    await settled()
    assert not call.done()
    server.stream.answer(response(1, b"x" * MIB, ended=False))
    await settled()
    assert call.done()
    assert server.stream.cancels == [1]
    with pytest.raises(grpc.aio.AioRpcError, match="faster than any is read"):
        [_ async for _ in call]
    await server.channel.close()


@virtually
async def test_empty_answers_that_nobody_reads_are_a_flood_too():
    server = Server()
    call = server.begin(STREAM)
    await settled()
    empty = [AnswerMessage(number=1, response=b"")] * MOST_EXCHANGED_CALLS
    server.stream.answer(*empty, times=600)  # 150,000 answers
    await settled()
    assert call.done()
    await server.channel.close()


@virtually
async def test_a_message_has_at_most_256_calls_and_each_has_the_time_that_is_left():
    server = Server()
    first = server.begin(seconds=60.0)
    await settled()
    server.stream.accepts.clear()
    calls = [server.begin(seconds=60.0) for _ in range(MOST_EXCHANGED_CALLS + 10)]
    await asyncio.sleep(2.0)
    server.stream.accepts.set()
    await settled()
    sizes = [len(batch) for batch in server.stream.batches]
    assert sizes == [1, MOST_EXCHANGED_CALLS, 10]
    late = server.stream.received[-1]
    assert late.timeout_ns == pytest.approx(58e9, rel=0.001)
    for call in (first, *calls):
        call.cancel()
    await server.channel.close()


@virtually
async def test_a_stream_serves_the_calls_of_a_minute_and_ends_with_the_last_of_them():
    """A renewed certificate, and the end of a draining server, concern the next stream."""
    server = Server()
    old = server.begin(seconds=600.0)
    await asyncio.sleep(59.0)
    assert (await answered(server)).value == b"y"
    assert len(server.streams) == 1
    await asyncio.sleep(2.0)
    server.begin(seconds=600.0)
    await settled()
    older, newer = server.streams
    assert (older.has_ended, newer.has_ended) == (False, False)
    old.cancel()
    await settled()
    assert (older.cancels, older.has_ended, newer.has_ended) == ([1], True, False)
    await server.channel.close()


@virtually
async def test_an_older_stream_ends_when_its_last_call_is_answered_and_nothing_keeps_it():
    server = Server()
    old = server.begin(seconds=600.0)
    await asyncio.sleep(61.0)
    (task,) = [weakref.ref(it) for it in asyncio.all_tasks() if it.get_name() == "exchange calls"]
    assert (await answered(server)).value == b"y"
    older = server.streams[0]
    older.answer(response(1))
    assert (await old).value == b"y"
    await settled()
    assert older.has_ended
    older.end()
    await settled()
    gc.collect()
    assert task() is None
    await server.channel.close()


@virtually
async def test_a_withdrawn_call_gives_no_answer_that_had_come_before():
    """Half of a stream would look like all of it."""
    server = Server()
    call = server.begin(STREAM)
    await settled()
    server.stream.answer(response(1, ended=False))
    await settled()
    assert call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await anext(call)
    assert not call.cancel()
    await server.channel.close()


async def answered(server: Server) -> Any:
    call = server.begin()
    await settled()
    server.stream.answer(response(server.stream.received[-1].number))
    return await call


@virtually
async def test_a_call_that_is_over_is_kept_nowhere_until_its_time_would_be_over():
    server = Server()
    call = server.begin(seconds=600.0)
    await settled()
    server.stream.answer(response(1))
    await call
    kept = weakref.ref(call)
    del call
    await settled()
    gc.collect()
    assert kept() is None
    await server.channel.close()


@virtually
async def test_a_stream_that_has_ended_leaves_no_task_and_tells_the_server_that_it_left():
    server = Server()
    call = server.begin()
    await settled()
    server.stream.end(grpc.StatusCode.UNAVAILABLE)
    assert await code_of(call) is grpc.StatusCode.UNAVAILABLE
    await settled()
    assert server.stream.is_cancelled
    assert asyncio.all_tasks() == {asyncio.current_task()}
    await server.channel.close()


@virtually
async def test_a_stream_that_ended_well_fails_its_calls_and_is_used_no_more():
    server = Server()
    call = server.begin()
    await settled()
    server.stream.end()
    assert await code_of(call) is grpc.StatusCode.UNAVAILABLE
    assert (await answered(server)).value == b"y"
    assert len(server.streams) == 2
    await server.channel.close()


@pytest.mark.parametrize("is_sent", [True, False])
@virtually
async def test_a_closed_channel_fails_its_calls_and_leaves_no_task(is_sent):
    server = Server()
    call = server.begin()
    if is_sent:
        await settled()
    await server.channel.close()
    assert await code_of(call) is grpc.StatusCode.UNAVAILABLE
    assert asyncio.all_tasks() == {asyncio.current_task()}


@virtually
async def test_a_stream_keeps_nothing_of_the_request_that_opened_it():
    """A stream lasts a minute, and a request's context may hold much."""

    class Belongings:
        pass

    belongings: ContextVar[Belongings] = ContextVar("belongings")
    server = Server()

    async def request() -> weakref.ref[Belongings]:
        belongings.set(Belongings())
        await answered(server)
        return weakref.ref(belongings.get())

    kept = await asyncio.create_task(request())
    await settled()
    gc.collect()
    assert kept() is None
    assert not server.stream.has_ended
    await server.channel.close()


@virtually
async def test_a_call_without_a_time_or_with_more_than_a_message_can_say_is_an_rpc():
    server = Server()
    stub = server.channel.unary_unary(UNARY, BytesValue.SerializeToString, BytesValue.FromString)
    stub(BytesValue())
    stub(BytesValue(), timeout=1.0, metadata=(("a", "b"),))
    assert server.rpcs == [UNARY, UNARY]
    assert server.streams == []
    await server.channel.close()
