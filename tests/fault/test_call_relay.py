"""The relay of calls is true to what it relays, and each of its faults is what it says."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import pytest

from paceline.errors import OverloadedError
from paceline.status import decode
from support.call_relay import CallRelay
from support.waiting import until

DETAILS = ("grpc-status-details-bin", b"\x00details")
ON_THE_WIRE = 0.1  # s: gRPC rounds a deadline of this length up to tenths of seconds
TIMEOUT = 30


@dataclass
class Upstream:
    """Answers `Say` once, `Count` three times, `Wait` never, `Fail` with a status."""

    metadata: dict[str, str | bytes] = field(default_factory=dict)
    time_left: float | None = None
    begun: int = 0  # calls of `Wait`
    cancelled: int = 0
    may_count: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(3))

    def service(self, details):
        handler = getattr(self, details.method.rpartition("/")[2].lower())
        if details.method.endswith("Count"):
            return grpc.unary_stream_rpc_method_handler(handler)
        return grpc.unary_unary_rpc_method_handler(handler)

    async def say(self, request, context):
        self.metadata = dict(context.invocation_metadata())
        self.time_left = context.time_remaining()
        await context.send_initial_metadata((("first", "1"),))
        context.set_trailing_metadata((("last", "9"),))
        return request * 2

    async def count(self, request, context):
        left = 3
        try:
            for number in range(3):
                await self.may_count.acquire()
                yield request + bytes([number])
                left -= 1
        finally:
            self.cancelled += left > 0

    async def wait(self, request, context):
        self.begun += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled += 1

    async def fail(self, request, context):
        context.set_trailing_metadata((DETAILS,))
        await context.abort(grpc.StatusCode.NOT_FOUND, "no such thing")


class Handler(grpc.GenericRpcHandler):
    def __init__(self, upstream):
        self._upstream = upstream

    def service(self, handler_call_details):
        return self._upstream.service(handler_call_details)


@asynccontextmanager
async def relayed():
    """Yield the upstream, its relay, and a channel to the relay."""
    upstream, server = Upstream(), grpc.aio.server()
    server.add_generic_rpc_handlers((Handler(upstream),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with (
        CallRelay(f"127.0.0.1:{port}") as relay,
        grpc.aio.insecure_channel(relay.address) as channel,
    ):
        yield upstream, relay, channel
    await server.stop(0)


def unary(channel, method, request=b"hm", *, timeout=TIMEOUT, **options):
    return channel.unary_unary(f"/some.Service/{method}")(request, timeout=timeout, **options)


def stream(channel, *, timeout=TIMEOUT):
    return channel.unary_stream("/some.Service/Count")(b"x", timeout=timeout)


async def code_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value.code()


async def test_answers_are_changed_until_it_heals():
    async with relayed() as (_, relay, channel):
        relay.change("Say", "Count", how=lambda answer: b"not " + answer)
        assert await unary(channel, "Say") == b"not hmhm"
        assert [it async for it in stream(channel)] == [b"not x\x00", b"not x\x01", b"not x\x02"]
        assert (relay.hits["Say"], relay.hits["Count"]) == (1, 3)
        relay.heal("Count")
        assert await unary(channel, "Say") == b"not hmhm"
        relay.heal()
        assert await unary(channel, "Say") == b"hmhm"


async def test_answers_metadata_and_deadlines_pass_both_ways():
    async with relayed() as (upstream, _, channel):
        call = unary(channel, "Say", metadata=(("who", "me"), ("raw-bin", b"\x00")))
        assert await call == b"hmhm"
        assert upstream.metadata["who"] == "me"
        assert upstream.metadata["raw-bin"] == b"\x00"
        assert 0 < upstream.time_left <= TIMEOUT + ON_THE_WIRE
        assert dict(await call.initial_metadata())["first"] == "1"
        assert dict(await call.trailing_metadata())["last"] == "9"


async def test_a_stream_passes():
    async with relayed() as (_, _, channel):
        assert [answer async for answer in stream(channel)] == [b"x\x00", b"x\x01", b"x\x02"]


async def test_a_status_passes_with_its_words_and_details():
    async with relayed() as (_, _, channel):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await unary(channel, "Fail")
        assert error.value.code() is grpc.StatusCode.NOT_FOUND
        assert error.value.details() == "no such thing"
        assert DETAILS in tuple(error.value.trailing_metadata())


async def test_a_cancel_reaches_the_server():
    async with relayed() as (upstream, relay, channel):
        call = unary(channel, "Wait")
        await until(lambda: upstream.begun, what="it runs")
        assert relay.running["Wait"]
        call.cancel()
        await until(lambda: upstream.cancelled, what="the server saw the cancel")
        await until(lambda: not relay.running["Wait"], what="the relay forgot the call")


async def test_a_deadline_ends_the_call_at_the_server():
    async with relayed() as (upstream, _, channel):
        for seconds in (0.1, 1.0, 10.0):
            code = await code_of(unary(channel, "Wait", timeout=seconds))
            assert code is grpc.StatusCode.DEADLINE_EXCEEDED
            if upstream.begun:  # on a busy machine it may not have come as far in a short time
                break
        await until(lambda: upstream.cancelled, what="the server's call ended")


async def test_a_hung_method_answers_nothing_while_others_go_through():
    async with relayed() as (_, relay, channel):
        relay.hang("Say", "Count")
        call = unary(channel, "Say")
        await until(lambda: relay.hits["Say"], what="it hangs")
        assert await code_of(unary(channel, "Fail")) is grpc.StatusCode.NOT_FOUND
        assert relay.hits == {"Say": 1}
        assert not call.done()
        call.cancel()


async def test_what_hung_goes_on_once_that_is_lifted():
    async with relayed() as (_, relay, channel):
        relay.hang("Say")
        call = unary(channel, "Say")
        await until(lambda: relay.hits["Say"], what="it hangs")
        assert not call.done()
        relay.heal("Say")
        assert await call == b"hmhm"


async def test_a_running_stream_hangs_in_its_middle():
    async with relayed() as (upstream, relay, channel):
        upstream.may_count = asyncio.Semaphore(1)
        call = stream(channel)
        assert await call.read() == b"x\x00"
        relay.hang("Count")
        upstream.may_count.release()
        await until(lambda: relay.hits["Count"], what="its second answer hangs")
        upstream.may_count.release()
        relay.heal()
        assert [await call.read(), await call.read()] == [b"x\x01", b"x\x02"]


async def test_a_stream_that_is_made_to_fail_in_its_middle_ends_at_the_server_too():
    async with relayed() as (upstream, relay, channel):
        upstream.may_count = asyncio.Semaphore(1)
        call = stream(channel)
        assert await call.read() == b"x\x00"
        relay.fail("Count", how=grpc.StatusCode.INTERNAL)
        upstream.may_count.release()
        assert await code_of(call.read()) is grpc.StatusCode.INTERNAL
        await until(lambda: upstream.cancelled, what="the server's call ended")


async def test_a_delayed_method_takes_longer_and_is_right():
    async with relayed() as (_, relay, channel):
        relay.delay("Say", seconds=0.2)
        begins = asyncio.get_running_loop().time()
        assert await unary(channel, "Say") == b"hmhm"
        assert asyncio.get_running_loop().time() - begins >= 0.4  # the request, and the answer
        assert relay.hits["Say"] == 2


async def test_a_failing_method_ends_with_that_status_until_it_is_healed():
    async with relayed() as (_, relay, channel):
        relay.fail("Say", how=grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert await code_of(unary(channel, "Say")) is grpc.StatusCode.RESOURCE_EXHAUSTED
        relay.heal()
        assert await unary(channel, "Say") == b"hmhm"
        assert relay.calls["Say"] == 2


async def test_a_method_can_fail_with_an_error_of_ours():
    async with relayed() as (_, relay, channel):
        relay.fail("Say", how=OverloadedError("too much", retry_after_seconds=2.0))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await unary(channel, "Say")
        failure = decode(error.value)
        assert isinstance(failure, OverloadedError)
        assert failure.retry_after_seconds == 2.0


async def test_a_fault_gives_way_to_the_next():
    async with relayed() as (_, relay, channel):
        relay.hang("Say")
        call = unary(channel, "Say")
        await until(lambda: relay.hits["Say"], what="it hangs")
        relay.fail("Say", how=grpc.StatusCode.INTERNAL)
        assert await code_of(call) is grpc.StatusCode.INTERNAL


async def test_without_a_server_calls_are_told_so():
    async with CallRelay("127.0.0.1:1") as relay, grpc.aio.insecure_channel(relay.address) as lost:
        assert await code_of(unary(lost, "Say")) is grpc.StatusCode.UNAVAILABLE
