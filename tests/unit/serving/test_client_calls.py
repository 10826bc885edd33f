"""Calls to another server: how they end, and that cancelled ones leave no memory behind."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import suppress

import grpc
import pytest

from paceline_serving import client_calls
from paceline_serving.client_calls import StreamCall, UnaryCall
from support import bare_server
from support.bare_server import COUNT, ECHO, FLOOD, HANG, LIST, BareServer
from support.native_memory import KNOWN, native_bytes
from support.waiting import until

TIMEOUT = 120  # longer than any wait here: what ends was ended
METADATA = (("x-request-id", 16 * "7"), ("traceparent", f"00-{32 * 'a'}-{16 * 'b'}-01"))
# Enough that what is lost shows, whatever else a process does: 960 bytes a call, 80 at the least.
CALLS, TOLERATED_BYTES = 300, 50
ROUNDS, ROUND_SECONDS = 4, 20.0


@pytest.fixture
async def service():
    return BareServer()


@pytest.fixture
async def channel(service):
    async with service.running() as address, grpc.aio.insecure_channel(address) as channel:
        yield channel


@pytest.fixture
def far_address():
    """A server in another process: what that one loses is not lost here."""
    with subprocess.Popen(
        (sys.executable, bare_server.__file__),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process.stdout.readline().strip()
        process.stdin.close()


@pytest.fixture
async def far_channel(far_address):
    async with grpc.aio.insecure_channel(far_address) as channel:
        yield channel


class Renamed:
    """A unary call of a library that calls its response otherwise."""

    def __init__(self, call):
        self._renamed = call

    def __getattr__(self, name):
        if name == "_call_response":
            raise AttributeError(name)
        return getattr(self._renamed, name)

    def __await__(self):
        return self._renamed.__await__()


def a_call_of_its_library(call):
    return call


@pytest.fixture(params=["", "_call.Call.cancel", "_call_response"])
def missing(request, monkeypatch):
    """Each of the library's private names gone, as in a later version; or none."""
    client_calls._tell_of_missing.cache_clear()
    if request.param == "_call.Call.cancel":
        monkeypatch.delattr("grpc.aio._call.Call")
    if request.param == "_call_response":
        monkeypatch.setitem(globals(), "a_call_of_its_library", Renamed)
    yield request.param
    client_calls._tell_of_missing.cache_clear()


def unary(channel, method, *, timeout=TIMEOUT, **options):
    call = channel.unary_unary(method)(b"request", timeout=timeout, **options)
    return UnaryCall(a_call_of_its_library(call))


def stream(channel, method, **options):
    return StreamCall(channel.unary_stream(method)(b"request", timeout=TIMEOUT, **options))


async def read(call):
    return [message async for message in call]


async def end_of(task):
    """Wait for a task that was cancelled, or whose call was."""
    await asyncio.wait((task,), timeout=90)
    assert task.cancelled()


# --- how they end ------------------------------------------------------------------------------


@pytest.mark.usefixtures("missing")
async def test_an_answer_that_came_stands_whatever_is_cancelled_later(channel):
    call = unary(channel, ECHO)
    assert await call == b"request"
    assert not call.cancel()


@pytest.mark.usefixtures("missing")
async def test_who_awaits_a_call_that_another_cancels_is_told(channel, service):
    call = unary(channel, HANG)
    waiting = asyncio.ensure_future(call)
    await until(lambda: service.begun, what="the call is served")
    assert call.cancel()
    await end_of(waiting)
    await until(lambda: service.cancelled, what="the server hears of the cancel")


@pytest.mark.usefixtures("missing")
async def test_a_task_that_is_cancelled_cancels_the_call_that_it_awaits(channel, service):
    waiting = asyncio.ensure_future(unary(channel, HANG))
    await until(lambda: service.begun, what="the call is served")
    waiting.cancel()
    await end_of(waiting)
    await until(lambda: service.cancelled, what="the server hears of the cancel")


@pytest.mark.usefixtures("missing")
async def test_a_call_that_was_cancelled_before_it_was_sent_ends(channel):
    call = unary(channel, HANG)
    assert call.cancel()
    assert not call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


@pytest.mark.usefixtures("missing")
@pytest.mark.parametrize("begin", [unary, stream])
async def test_a_call_that_the_library_refuses_fails_and_does_not_hang(channel, begin):
    call = begin(channel, HANG, metadata=(("no\nkey", "value"),))
    with pytest.raises((grpc.RpcError, grpc.aio.BaseError, asyncio.CancelledError)):
        async with asyncio.timeout(90):
            await (call if begin is unary else read(call))


@pytest.mark.usefixtures("missing")
@pytest.mark.parametrize("begin", [unary, stream])
async def test_a_call_that_no_method_answers_fails(channel, begin):
    call = begin(channel, "/test.Service/Nothing")
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await (call if begin is unary else read(call))
    assert failed.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.usefixtures("missing")
async def test_a_call_whose_time_is_over_says_so(channel):
    call = unary(channel, HANG, timeout=0.05)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.usefixtures("missing")
async def test_who_reads_a_stream_that_another_cancels_is_told(channel, service):
    call = stream(channel, COUNT)
    seen = []

    async def follow():
        async for message in call:
            seen.append(message)  # noqa: PERF401 - seen while it runs

    reading = asyncio.ensure_future(follow())
    await until(lambda: len(seen) == 3, what="all that comes has come")
    assert call.cancel()
    await end_of(reading)
    await until(lambda: service.cancelled, what="the server hears of the cancel")


@pytest.mark.usefixtures("missing")
async def test_a_task_that_is_cancelled_cancels_the_stream_that_it_reads(channel, service):
    reading = asyncio.ensure_future(read(stream(channel, COUNT)))
    await until(lambda: service.begun, what="the call is served")
    reading.cancel()
    await end_of(reading)
    await until(lambda: service.cancelled, what="the server hears of the cancel")


@pytest.mark.usefixtures("missing")
async def test_who_leaves_a_stream_cancels_it(channel, service):
    messages = aiter(stream(channel, FLOOD))
    await anext(messages)
    await messages.aclose()
    await until(lambda: service.cancelled, what="the server hears of the cancel")


@pytest.mark.usefixtures("missing")
@pytest.mark.parametrize("method", [FLOOD, LIST])
async def test_a_cancelled_stream_never_looks_complete(channel, method):
    call = stream(channel, method)
    messages = aiter(call)
    assert await anext(messages) == b"1"
    await until(lambda: call._messages.qsize() > 2, what="more has come than was asked for")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await read(messages)


@pytest.mark.usefixtures("missing")
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


async def test_what_the_library_lacks_is_told_once_and_nothing_else_is(channel, missing, caplog):
    for _ in range(2):
        call = unary(channel, HANG)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    lines = [it.message for it in caplog.records if it.levelname == "WARNING"]
    assert len(lines) == bool(missing)
    assert all(f"grpcio {grpc.__version__} has no private name {missing}:" in it for it in lines)


# --- what they leave behind --------------------------------------------------------------------


async def cancel_the_call(call):
    await asyncio.sleep(0)
    call.cancel()
    with suppress(asyncio.CancelledError):
        await call


async def cancel_its_task(call):
    waiting = asyncio.ensure_future(call)
    await asyncio.sleep(0.001)
    waiting.cancel()
    await end_of(waiting)


async def cancel_the_reading_task(call):
    """After the first message: before it a cancel loses what waits for the headers."""
    has_begun = asyncio.Event()

    async def follow():
        async for _ in call:
            has_begun.set()

    reading = asyncio.ensure_future(follow())
    await has_begun.wait()
    reading.cancel()
    await end_of(reading)


async def leave_in_the_middle(call):
    messages = aiter(call)
    await anext(messages)
    await messages.aclose()


@pytest.mark.skipif(not KNOWN, reason="this C library does not tell what is allocated")
@pytest.mark.parametrize(
    ("begin", "method", "end"),
    [
        (unary, HANG, cancel_the_call),
        (unary, HANG, cancel_its_task),
        (stream, COUNT, cancel_the_reading_task),
        (stream, COUNT, leave_in_the_middle),
        (stream, FLOOD, leave_in_the_middle),
    ],
)
async def test_a_cancelled_call_gives_its_memory_back(far_channel, begin, method, end):
    async def some_calls():
        for _ in range(CALLS):
            await end(begin(far_channel, method, metadata=METADATA))
        await unary(far_channel, ECHO)

    # What is allocated once is allocated here, or by others in one of the rounds.
    await some_calls()
    what = f"{CALLS} cancelled calls have given their memory back"
    for _ in range(ROUNDS):
        before = native_bytes()
        await some_calls()
        with suppress(AssertionError):
            await until(
                lambda: native_bytes() - before < CALLS * TOLERATED_BYTES,  # noqa: B023 - it ends here
                what=what,
                within_seconds=ROUND_SECONDS,
            )
            return
    pytest.fail(f"in none of {ROUNDS} rounds {what}")
