"""RPCs as an orchestrator awaits them: each ends as it must, whoever cancels it and when."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from google.protobuf.wrappers_pb2 import BytesValue

from paceline import errors
from paceline_orchestrator.fleet.bad_answers import BadAnswerError
from paceline_orchestrator.fleet.wire import answer, answers
from paceline_serving.interceptors import TracedChannel
from support.bare_server import COUNT, ECHO, FLOOD, HANG, LIST
from support.waiting import until

TIMEOUT = 120  # longer than any wait here: what ends was ended


def unary(channel, method, *, timeout=TIMEOUT, **options):
    return TracedChannel(channel).unary_unary(method)(b"request", timeout=timeout, **options)


def stream(channel, method, *, timeout=TIMEOUT, **options):
    return TracedChannel(channel).unary_stream(method)(b"request", timeout=timeout, **options)


async def end(call):
    """Await a call's end; return what it answered."""
    if isinstance(call, grpc.aio.UnaryUnaryCall):
        return await answer(call)
    return [message async for message in answers(call)]


async def test_an_answer_that_came_stands_whatever_is_cancelled_later(channel):
    call = unary(channel, ECHO)
    assert await end(call) == b"request"
    assert not call.cancel()


async def test_a_stream_is_whole(channel):
    assert await end(stream(channel, LIST)) == [b"1", b"2", b"3"]


@pytest.mark.parametrize(("begin", "method"), [(unary, HANG), (stream, HANG), (stream, COUNT)])
async def test_a_call_that_another_cancels_ends_as_a_lost_connection(
    channel, service, begin, method
):
    """The orchestrator's channel was closed: nobody asked the awaiting task to end."""
    call = begin(channel, method)
    waiting = asyncio.ensure_future(end(call))
    await until(lambda: service.begun, what="the call is served")
    assert call.cancel()
    with pytest.raises(errors.ConnectionLostError):
        await waiting
    await until(lambda: service.cancelled, what="the server hears of the cancel")


@pytest.mark.parametrize(("begin", "method"), [(unary, HANG), (stream, HANG), (stream, COUNT)])
async def test_a_task_that_is_cancelled_cancels_its_call(channel, service, begin, method):
    waiting = asyncio.ensure_future(end(begin(channel, method)))
    await until(lambda: service.begun, what="the call is served")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await until(lambda: service.cancelled, what="the server hears of the cancel")


@pytest.mark.parametrize("turns", range(1, 8))
async def test_no_turn_of_the_loop_loses_the_cancel_of_a_stream(channel, service, turns):
    waiting = asyncio.ensure_future(end(stream(channel, HANG)))
    for _ in range(turns):
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await end(unary(channel, ECHO)) == b"request"  # what was sent before it has arrived
    await until(lambda: service.begun == service.cancelled, what="no call is left at the server")


@pytest.mark.parametrize("begin", [unary, stream])
async def test_a_call_that_was_cancelled_before_it_was_sent_ends(channel, begin):
    call = begin(channel, HANG)
    assert call.cancel()
    assert not call.cancel()
    with pytest.raises(errors.ConnectionLostError):
        await end(call)


@pytest.mark.parametrize("begin", [unary, stream])
async def test_a_call_that_core_refuses_fails_and_does_not_hang(channel, begin):
    call = begin(channel, HANG, metadata=(("no\nkey", "value"),))
    with pytest.raises((errors.PacelineError, grpc.aio.BaseError)):
        async with asyncio.timeout(90):
            await end(call)


@pytest.mark.parametrize("begin", [unary, stream])
async def test_a_call_that_no_method_answers_fails(channel, begin):
    with pytest.raises(errors.UnsupportedError):
        await end(begin(channel, "/test.Service/Nothing"))


@pytest.mark.parametrize("begin", [unary, stream])
async def test_a_call_whose_time_is_over_says_so(channel, begin):
    with pytest.raises(errors.DeadlineError):
        await end(begin(channel, HANG, timeout=0.05))


async def test_who_leaves_a_stream_cancels_it(channel, service):
    messages = answers(stream(channel, FLOOD))
    await anext(messages)
    await messages.aclose()
    await until(lambda: service.cancelled, what="the server hears of the cancel")


@pytest.mark.parametrize(("kind", "method"), [("unary_unary", ECHO), ("unary_stream", LIST)])
async def test_an_answer_that_cannot_be_decoded_is_a_bad_answer_and_is_not_logged(
    channel, caplog, kind, method
):
    stub = getattr(TracedChannel(channel), kind)(
        method, response_deserializer=BytesValue.FromString
    )
    with pytest.raises(BadAnswerError, match="cannot be decoded"):
        await end(stub(b"\xff\xff", timeout=TIMEOUT))
    assert not caplog.records


async def test_no_task_is_left_of_calls_that_were_cancelled(channel, service):
    before = len(asyncio.all_tasks())
    calls = [begin(channel, method) for begin, method in ((unary, HANG), (stream, FLOOD))]
    await until(lambda: service.begun == 2, what="both calls are served")
    for call in calls:
        call.cancel()
    await until(
        lambda: service.cancelled == 2 and len(asyncio.all_tasks()) <= before,
        what="all tasks have ended",
    )


@pytest.mark.parametrize("method", [FLOOD, LIST])
async def test_a_cancelled_stream_never_looks_complete(channel, method):
    call = stream(channel, method)
    messages = answers(call)
    assert await anext(messages) == b"1"
    await end(unary(channel, ECHO))  # so that what was written behind it has come
    call.cancel()
    with pytest.raises(errors.ConnectionLostError):
        _ = [message async for message in messages]
