"""Batches of grpc.aio that end early: their memory is freed, and who waits is told as before."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import suppress

import grpc
import pytest
from grpc._cython import cygrpc

from paceline_orchestrator.fleet.wire import answers
from paceline_serving.grpc_batches import free_all_batches
from support import leaving_client
from support.bare_server import COUNT, ECHO, FLOOD, HANG, LIST
from support.native_memory import KNOWN, native_bytes
from support.waiting import until

TIMEOUT = 120  # longer than any wait here: what ends was ended
METADATA = (("x-request-id", 16 * "7"), ("traceparent", f"00-{32 * 'a'}-{16 * 'b'}-01"))
CALLS = 300
ROUNDS, ROUND_SECONDS = 4, 10.0

needs_mallinfo = pytest.mark.skipif(not KNOWN, reason="this C library does not tell what is used")


@pytest.fixture(autouse=True)
def freeing(monkeypatch):
    """Nothing of it stays for other tests."""
    monkeypatch.setattr(cygrpc, "execute_batch", cygrpc.execute_batch)
    free_all_batches()


def unary(channel, method, **options):
    return channel.unary_unary(method)(b"request", timeout=TIMEOUT, **options)


def stream(channel, method, **options):
    return channel.unary_stream(method)(b"request", timeout=TIMEOUT, **options)


async def read(call):
    return [message async for message in call]


async def losing(some_calls, *, most_bytes):
    """Repeat the calls until they lose no more than that each, or fail."""
    await some_calls()  # what is allocated once is allocated here, or by others in a round
    what = f"{CALLS} calls have lost less than {most_bytes} bytes each"
    for _ in range(ROUNDS):
        before = native_bytes()
        await some_calls()
        with suppress(AssertionError):
            await until(
                lambda: native_bytes() - before < CALLS * most_bytes,  # noqa: B023 - it ends here
                what=what,
                within_seconds=ROUND_SECONDS,
            )
            return
    pytest.fail(f"in none of {ROUNDS} rounds {what}")


# --- what is freed -----------------------------------------------------------------------------


async def cancel_before_it_is_sent(call):
    call.cancel()
    with suppress(asyncio.CancelledError):
        await call


async def cancel_its_task(call):
    waiting = asyncio.ensure_future(call if hasattr(call, "__await__") else call.read())
    await asyncio.sleep(0.001)
    waiting.cancel()
    await asyncio.wait((waiting,))


async def cancel_the_reading_task(call):
    """After the first message."""
    has_begun = asyncio.Event()

    async def follow():
        async for _ in answers(call):
            has_begun.set()

    reading = asyncio.ensure_future(follow())
    await has_begun.wait()
    reading.cancel()
    await asyncio.wait((reading,))


async def leave_in_the_middle(call):
    messages = answers(call)
    await anext(messages)
    await messages.aclose()


@needs_mallinfo
@pytest.mark.parametrize(
    ("begin", "method", "end"),
    [
        (unary, HANG, cancel_before_it_is_sent),
        (unary, HANG, cancel_its_task),
        (stream, HANG, cancel_its_task),
        (stream, COUNT, cancel_the_reading_task),
        (stream, FLOOD, leave_in_the_middle),
    ],
)
async def test_a_call_that_is_cancelled_loses_nothing(far_channel, begin, method, end):
    """Without our part the library loses 960 bytes of a unary call, and 100 of a stream."""

    async def some_calls():
        for _ in range(CALLS):
            await end(begin(far_channel, method, metadata=METADATA))
        await unary(far_channel, ECHO)

    await losing(some_calls, most_bytes=50)


@needs_mallinfo
async def test_a_client_that_leaves_in_mid_message_costs_its_server_nothing(service):
    """Without our part it loses 290 bytes."""
    async with service.running() as address:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, leaving_client.__file__, address, FLOOD),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

        async def some_calls():
            process.stdin.write(f"{CALLS}\n".encode())
            assert await process.stdout.readline() == b"left\n"
            await until(lambda: service.begun == service.cancelled, what="all have left")

        await losing(some_calls, most_bytes=100)
        process.stdin.close()
        await process.wait()


# --- what callers are told ---------------------------------------------------------------------


async def test_answers_and_streams_come_as_before(channel):
    assert await unary(channel, ECHO) == b"request"
    assert await read(stream(channel, LIST)) == [b"1", b"2", b"3"]


async def test_a_task_that_is_cancelled_cancels_its_call(channel, service):
    waiting = asyncio.ensure_future(unary(channel, HANG))
    await until(lambda: service.begun, what="the call is served")
    waiting.cancel()
    await asyncio.wait((waiting,))
    assert waiting.cancelled()
    await until(lambda: service.cancelled, what="the server hears of the cancel")


async def test_who_reads_a_stream_that_another_cancels_is_told(channel, service):
    call = stream(channel, COUNT)
    assert [await call.read() for _ in range(3)] == [b"1", b"2", b"3"]
    reading = asyncio.ensure_future(call.read())  # of what never comes
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.wait((reading,))
    assert reading.cancelled()
    await until(lambda: service.cancelled, what="the server hears of the cancel")


async def test_a_call_that_core_refuses_fails(channel):
    with pytest.raises((grpc.RpcError, grpc.aio.BaseError, asyncio.CancelledError)):
        async with asyncio.timeout(90):
            await read(stream(channel, HANG, metadata=(("no\nkey", "value"),)))


def test_a_second_event_loop_has_its_calls_answered_too(service):
    """In threads of their own: a batch ends on whichever loop hears of it first."""

    async def ask(address):
        async with grpc.aio.insecure_channel(address) as channel:
            return [await unary(channel, ECHO) for _ in range(20)]

    async def both():
        async with service.running() as address:
            elsewhere = asyncio.to_thread(asyncio.run, ask(address))
            return await asyncio.gather(elsewhere, ask(address))

    assert asyncio.run(both()) == [[b"request"] * 20] * 2


async def test_it_can_be_asked_for_twice(channel):
    once = cygrpc.execute_batch
    free_all_batches()
    assert cygrpc.execute_batch is once
    assert await unary(channel, ECHO) == b"request"


def test_a_library_without_the_private_name_is_left_as_it_is_and_told_of(monkeypatch, caplog):
    monkeypatch.delattr(cygrpc, "execute_batch")
    free_all_batches()
    assert not hasattr(cygrpc, "execute_batch")
    (line,) = (it.message for it in caplog.records if it.levelname == "WARNING")
    assert f"grpcio {grpc.__version__} has no private name execute_batch" in line
