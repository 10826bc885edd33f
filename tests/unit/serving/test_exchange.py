"""The server's end of a stream of calls, without gRPC and on virtual time."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import BytesValue
from google.rpc.status_pb2 import Status
from prometheus_client import CollectorRegistry

from paceline import errors
from paceline.v1.call_service_pb2 import (
    AnswerMessage,
    CallMessage,
    ExchangeCallsRequest,
    ExchangeCallsResponse,
)
from paceline_contract.limits import MOST_EXCHANGED_BYTES, MOST_EXCHANGED_CALLS
from paceline_serving.exchanged_calls import Exchange
from paceline_serving.interceptors import EdgeInterceptor
from paceline_serving.telemetry import RpcMetrics
from support.virtual_time import virtually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

MIB = 1 << 20
# Nothing here takes time, so by then all that can happen has happened.
SETTLED_SECONDS = 0.001


class Stream:
    """A stream that a test plays the caller of, and the service that its calls ask.

    Attributes:
        batches: The messages that the server wrote.
        reads: Set while the caller reads; a write waits for it.
        left: What a write raises, if the caller has left.
        begun: The methods of the calls that have begun.
        running: How many calls run.
        tasks: The tasks of calls that something still holds.
        metadata_sent_at: How many messages were written when the server sent its metadata.
    """

    def __init__(
        self, *, read_seconds: float = 0.0, metadata: tuple[tuple[str, str], ...] = (), **edge: Any
    ) -> None:
        self.batches: list[list[AnswerMessage]] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self.left: Exception | None = None
        self.begun: list[str] = []
        self.running = 0
        self.metadata_sent_at: int | None = None
        self.registry = CollectorRegistry()
        self.tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self._edge = EdgeInterceptor(RpcMetrics(self.registry), **edge)
        self._read_seconds = read_seconds
        self._metadata = metadata
        self._messages: asyncio.Queue[bytes | None] = asyncio.Queue()

    @asynccontextmanager
    async def served(self, **settings: Any) -> AsyncIterator[asyncio.Task[None]]:
        """Serve the stream in a task, and let the caller end it."""
        handlers = {
            f"/test.Service/{name}": self._edge.guard(f"/test.Service/{name}", handler)
            for name, handler in self._handlers().items()
        }
        exchange = Exchange(handlers, self, **{"write_stall_seconds": 30.0, **settings})
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(exchange.run(self._requests()), name="the stream")
            yield task
            self.send(None)

    def send(self, *calls: CallMessage | None) -> None:
        """Send a message with these calls; with None, end the stream."""
        is_end = None in calls
        request = None if is_end else ExchangeCallsRequest(calls=calls).SerializeToString()
        self._messages.put_nowait(request)

    @property
    def unread_count(self) -> int:
        """How many messages the server has not read."""
        return self._messages.qsize()

    @property
    def answers(self) -> list[AnswerMessage]:
        return [answer for batch in self.batches for answer in batch]

    def count(self, method: str, code: str) -> float:
        labels = {"method": f"test.Service/{method}", "code": code, "reason": ""}
        return self.registry.get_sample_value("paceline_rpcs_total", labels) or 0.0

    async def _requests(self) -> AsyncIterator[bytes]:
        while (raw := await self._messages.get()) is not None:
            await asyncio.sleep(0)  # gRPC never has a message in the same turn
            yield raw

    # --- the stream's context -----------------------------------------------------------------

    def auth_context(self) -> dict[str, Any]:
        return {}

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    async def send_initial_metadata(self, _metadata: Any) -> None:
        self.metadata_sent_at = len(self.batches)

    async def write(self, raw: bytes) -> None:
        await self.reads.wait()
        await asyncio.sleep(self._read_seconds)
        if self.left is not None:
            raise self.left
        self.batches.append(list(ExchangeCallsResponse.FromString(raw).answers))

    # --- the service --------------------------------------------------------------------------

    def _handlers(self) -> dict[str, Any]:
        codec = {
            "request_deserializer": BytesValue.FromString,
            "response_serializer": BytesValue.SerializeToString,
        }
        unary, stream = (
            grpc.unary_unary_rpc_method_handler,
            grpc.unary_stream_rpc_method_handler,
        )
        return {
            "Echo": unary(self._counted("Echo", self._echo), **codec),
            "Wait": unary(self._counted("Wait", self._wait), **codec),
            "Nothing": unary(self._counted("Nothing", self._nothing), **codec),
            "Abort": unary(self._counted("Abort", self._abort), **codec),
            "Flood": stream(self._flood, **codec),
        }

    def _counted(self, name: str, behavior: Any) -> Any:
        async def counted(request: BytesValue, context: Any) -> Any:
            self.begun.append(name)
            self.tasks.add(asyncio.current_task())
            self.running += 1
            try:
                return await behavior(request, context)
            finally:
                self.running -= 1

        return counted

    async def _echo(self, request: BytesValue, context: Any) -> BytesValue:
        return request

    async def _wait(self, request: BytesValue, context: Any) -> BytesValue:
        await asyncio.sleep(600)
        return request

    async def _nothing(self, request: BytesValue, context: Any) -> None:
        """Answer with what cannot be serialized."""

    async def _abort(self, request: BytesValue, context: Any) -> BytesValue:
        await context.abort(grpc.StatusCode.NOT_FOUND, request.value.decode())
        raise AssertionError("gRPC's abort does not return")

    async def _flood(self, request: BytesValue, context: Any) -> AsyncIterator[BytesValue]:
        while True:
            self.begun.append("Flood's next")
            yield request


def call(number: int, method: str = "Echo", content: bytes = b"x", **fields: Any) -> CallMessage:
    request = BytesValue(value=content).SerializeToString()
    given = {"timeout_ns": 60_000_000_000, "request": request, **fields}
    return CallMessage(number=number, method=f"/test.Service/{method}", **given)


def cancel(number: int) -> CallMessage:
    return CallMessage(number=number, cancel=True)


async def settled() -> None:
    await asyncio.sleep(SETTLED_SECONDS)


def code_of(answer: AnswerMessage) -> int:
    return int(Status.FromString(answer.status).code)


@virtually
async def test_the_streams_metadata_come_before_its_first_message():
    """A status that has to bring them, behind a message that stalls, is refused by gRPC."""
    stream = Stream()
    async with stream.served():
        stream.send(call(1))
        await settled()
    assert (stream.metadata_sent_at, len(stream.answers)) == (0, 1)


@virtually
async def test_a_call_ends_when_its_time_is_over_and_is_counted_so():
    stream = Stream()
    loop = asyncio.get_running_loop()
    async with stream.served():
        began = loop.time()
        stream.send(call(1, "Wait", timeout_ns=2_000_000_000))
        while not stream.answers:
            await settled()
        assert loop.time() - began == pytest.approx(2, abs=0.01)
        assert code_of(stream.answers[0]) == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
        assert (stream.running, stream.count("Wait", "DEADLINE_EXCEEDED")) == (0, 1)


@virtually
async def test_a_withdrawn_call_ends_at_once_without_an_answer_and_is_counted_as_cancelled():
    stream = Stream()
    async with stream.served():
        stream.send(call(1, "Wait"))
        await settled()
        assert stream.running == 1
        stream.send(cancel(1))
        await settled()
        assert (stream.running, stream.count("Wait", "CANCELLED")) == (0, 1)
    assert stream.answers == []


@virtually
async def test_a_call_that_has_ended_is_kept_nowhere_until_its_time_would_be_over():
    stream = Stream()
    async with stream.served():
        stream.send(*(call(number, timeout_ns=600_000_000_000) for number in range(1, 11)))
        await settled()
        assert len(stream.answers) == 10
        gc.collect()
        assert len(stream.tasks) == 0


@virtually
async def test_a_caller_that_reads_no_answers_has_no_further_calls_read():
    """Otherwise the answers of unary calls would pile up in the server's memory."""
    stream = Stream()
    stream.reads.clear()
    content = b"x" * (MOST_EXCHANGED_BYTES - 8)
    async with stream.served():
        for number in range(1, 201):
            stream.send(call(number, content=content))
        await settled()
        assert 4 * MIB <= len(stream.begun) * len(content) <= 6 * MIB
        assert stream.unread_count > 100
        stream.reads.set()
        await settled()
        assert [it.number for it in stream.answers] == [*range(1, 201)]


@virtually
async def test_errors_that_no_caller_reads_count_as_waiting_answers():
    """A status can be larger than any answer."""
    stream = Stream()
    stream.reads.clear()
    async with stream.served():
        for number in range(1, 201):
            stream.send(call(number, "Abort", b"x" * 60_000))
        await settled()
        assert 4 * MIB <= len(stream.begun) * 60_000 <= 6 * MIB
        stream.reads.set()
        await settled()
        assert len(stream.answers) == 200


@virtually
async def test_a_streamed_answer_waits_for_its_caller():
    stream = Stream()
    stream.reads.clear()
    async with stream.served() as task:
        stream.send(call(1, "Flood", b"x" * 50_000))
        await settled()
        assert 4 * MIB <= len(stream.begun) * 50_000 <= 6 * MIB
        stream.reads.set()
        stream.send(cancel(1))
        await settled()
        assert not task.done()


@virtually
async def test_a_message_has_at_most_256_answers():
    """A caller takes a message with more of them for a broken one, and all its calls fail."""
    stream = Stream()
    stream.reads.clear()
    async with stream.served():
        numbers = range(1, 3 * MOST_EXCHANGED_CALLS + 1)
        for first in numbers[::MOST_EXCHANGED_CALLS]:
            stream.send(*(call(first + it) for it in range(MOST_EXCHANGED_CALLS)))
        await settled()
        stream.reads.set()
        await settled()
    assert max(map(len, stream.batches)) == MOST_EXCHANGED_CALLS
    assert [it.number for it in stream.answers] == [*numbers]


@virtually
async def test_a_message_has_at_most_a_mebibyte_of_answers():
    """A channel of gRPC takes no message of more than 4 MiB."""
    stream = Stream()
    stream.reads.clear()
    async with stream.served():
        for number in range(1, 61):
            stream.send(call(number, content=b"x" * 60_000))
        await settled()
        stream.reads.set()
        await settled()
    sizes = [sum(it.ByteSize() for it in batch) for batch in stream.batches]
    assert MIB - 61_000 <= max(sizes) <= MIB


@virtually
async def test_answers_that_are_still_being_written_reach_a_caller_that_sends_no_more_calls():
    stream = Stream(read_seconds=1.0)
    async with stream.served() as task:
        stream.send(call(1))
        await settled()
        stream.send(call(2))  # its answer is in the next message
        stream.send(None)
        await task
        assert [[it.number for it in batch] for batch in stream.batches] == [[1], [2]]


@virtually
async def test_a_response_that_cannot_be_serialized_fails_its_call_alone(caplog):
    stream = Stream()
    with caplog.at_level(logging.ERROR):
        async with stream.served():
            stream.send(call(1, "Nothing"), call(2))
            await settled()
    failed, echoed = sorted(stream.answers, key=lambda it: it.number)
    assert code_of(failed) == grpc.StatusCode.INTERNAL.value[0]
    assert (echoed.ended, echoed.status) == (True, b"")
    assert "could not be written" in caplog.text


@virtually
async def test_a_handler_that_aborts_ends_there_with_its_status_and_is_counted_with_it():
    stream = Stream()
    async with stream.served():
        stream.send(call(1, "Abort", b"there is none"))
        await settled()
    (answer,) = stream.answers
    assert Status.FromString(answer.status) == Status(code=5, message="there is none")
    assert answer.ended
    assert not answer.HasField("response")
    assert (stream.count("Abort", "NOT_FOUND"), stream.count("Abort", "OK")) == (1, 0)


@virtually
async def test_the_streams_key_is_that_of_its_calls():
    class Keys:
        def enter(self, authorization: str) -> None:
            if authorization != "Bearer secret":
                raise errors.UnauthenticatedError("the API key is wrong")

    for key, code in [("secret", 0), ("another", grpc.StatusCode.UNAUTHENTICATED.value[0])]:
        stream = Stream(metadata=(("authorization", f"Bearer {key}"),), keys=Keys())
        async with stream.served():
            stream.send(call(1))
            await settled()
        assert [code_of(it) for it in stream.answers] == [code]


@virtually
async def test_a_caller_that_has_left_leaves_no_call_running():
    stream = Stream()
    stream.left = grpc.aio.BaseError("the stream is closed")

    async def leave() -> None:
        async with stream.served() as task:
            stream.send(call(1, "Wait"), call(2))
            await asyncio.wait([task])
            assert (stream.running, stream.count("Wait", "CANCELLED")) == (0, 1)

    with pytest.raises(ExceptionGroup) as caught:
        await leave()
    assert caught.value.exceptions == (stream.left,)


@virtually
async def test_a_caller_that_reads_nothing_is_let_go_in_time():
    stream = Stream()
    stream.reads.clear()

    async def stall() -> None:
        async with stream.served(write_stall_seconds=7.0) as task:
            began = asyncio.get_running_loop().time()
            stream.send(call(1), call(2, "Wait"))
            await asyncio.wait([task])
            seconds = asyncio.get_running_loop().time() - began
            assert (seconds, stream.running) == (pytest.approx(7, abs=0.01), 0)

    with pytest.raises(ExceptionGroup) as caught:
        await stall()
    (error,) = caught.value.exceptions
    assert isinstance(error, errors.SlowConsumerError)
