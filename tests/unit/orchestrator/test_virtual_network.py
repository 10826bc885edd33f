"""The tests' own network does with calls what gRPC does, and the tests' own system decodes."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, asynccontextmanager, suppress
from functools import wraps

import grpc
import pytest

from paceline import errors
from paceline_contract.calls import DraftOptions, PrefixCall, VerifyOptions
from paceline_contract.proposal import Proposal
from paceline_orchestrator.decoding import rpcs
from paceline_orchestrator.decoding.exchange import SessionSpec
from paceline_orchestrator.fleet.bad_answers import BadAnswerError
from paceline_orchestrator.fleet.discovery import Endpoint, Role
from paceline_orchestrator.fleet.health import health_changes
from paceline_orchestrator.fleet.server import ModelServer
from paceline_orchestrator.fleet.wire import answer
from paceline_serving.transport import pod_channel
from support.fake_models import serving
from support.fake_text import continuation
from support.lies.conversation import ConversationLie, EndingError
from support.lies.liar import LyingModelServer
from support.lies.trials import VirtualLiar
from support.virtual_network import VirtualChannel
from support.virtual_time import run_virtually, virtually

TEXT = (1, 2, 3, 4)


@asynccontextmanager
async def over_sockets(role):
    fake = LyingModelServer(role)
    async with serving(fake):
        channel = pod_channel(fake.address, credentials=None)
        yield fake, ModelServer(Endpoint("it", fake.address, Role(role)), channel)
        await channel.close()


@asynccontextmanager
async def over_nothing(role):
    fake = VirtualLiar(role, name="it", latency_seconds=0.001)
    yield fake, ModelServer(Endpoint("it", fake.address, Role(role)), VirtualChannel(fake.link))
    assert not fake.link.bugs


def in_both_worlds(test):
    @pytest.mark.parametrize("is_virtual", [False, True], ids=["grpc", "virtual"])
    @wraps(test)
    def run(is_virtual):
        if is_virtual:
            run_virtually(test(over_nothing))
        else:
            asyncio.run(test(over_sockets))

    del run.__wrapped__  # pytest would ask for its arguments
    return run


async def open_at(server, fake):
    spec = SessionSpec(fingerprint=fake.fingerprint, reserve_length=100)
    return await rpcs.open_session(server, spec, timeout_seconds=10)


def a_call(fake, handle, *, sequence=1, token_ids=TEXT):
    return PrefixCall(handle, sequence, 0, b"", token_ids, fake.fingerprint)


def verify(server, call, *, timeout_seconds=10.0):
    return rpcs.send_verify(
        server, call, proposal=Proposal(), options=VerifyOptions(), timeout_seconds=timeout_seconds
    )


def draft(server, call, *, max_tokens=3):
    options = DraftOptions(max_tokens=max_tokens)
    return rpcs.send_draft(server, call, options=options, timeout_seconds=10.0)


def drafts(rpc, *, max_tokens=3):
    return rpcs.read_drafts(rpc, DraftOptions(max_tokens=max_tokens), sent_ns=0)


async def running(fake, count=1):
    await fake.until(lambda it: it.running == count)


@in_both_worlds
async def test_a_call_is_answered(world):
    async with world("target") as (fake, server):
        call = a_call(fake, await open_at(server, fake))
        rpc = verify(server, call)
        judged = await rpcs.read_verdict(rpc, sent_ns=0, block_length=0)
        assert judged.next_token == continuation(TEXT, 1)[0]
        assert not rpc.cancel()


@in_both_worlds
async def test_a_stream_comes_in_order_and_ends(world):
    async with world("drafter") as (fake, server):
        call = a_call(fake, await open_at(server, fake))
        drafted = [it async for it in drafts(draft(server, call))]
        tokens = [token for it in drafted for token in it.proposal.token_ids]
        assert tokens == continuation(TEXT, 3)


@in_both_worlds
async def test_an_error_arrives_as_the_class_that_was_raised(world):
    async with world("target") as (fake, server):
        fake.faults.append("overload")
        rpc = verify(server, a_call(fake, await open_at(server, fake)))
        with pytest.raises(errors.OverloadedError, match="full") as caught:
            await answer(rpc)
        assert caught.value.retry_after_seconds == 0.01


def lying_about(method, fake, tell):
    fake.liar.begin(ConversationLie(method, "a lie of this test", tell))


async def _undecodable(asked):
    async for honest in asked.answers:
        yield honest.SerializeToString()
        yield b"\xff\xff"


async def _too_large(asked):
    async for _ in asked.answers:
        yield bytes(5 << 20)


async def _ends_in_its_own_words(_asked):
    raise EndingError(grpc.StatusCode.UNKNOWN, "so there", b"\xff no details")
    yield b""


@in_both_worlds
async def test_a_message_that_cannot_be_decoded_ends_a_stream_after_those_before_it(world):
    async with world("drafter") as (fake, server):
        lying_about("Draft", fake, _undecodable)
        call = a_call(fake, await open_at(server, fake))
        async with aclosing(aiter(drafts(draft(server, call)))) as messages:
            assert (await anext(messages)).proposal.token_ids
            with pytest.raises(BadAnswerError, match="decoded"):
                await anext(messages)
        await running(fake, 0)


@in_both_worlds
async def test_an_answer_that_is_too_large_is_none(world):
    async with world("target") as (fake, server):
        lying_about("Verify", fake, _too_large)
        rpc = verify(server, a_call(fake, await open_at(server, fake)))
        with pytest.raises(BadAnswerError, match="larger"):
            await answer(rpc)


@in_both_worlds
async def test_an_end_in_a_servers_own_words_arrives_as_it_is(world):
    async with world("target") as (fake, server):
        lying_about("Verify", fake, _ends_in_its_own_words)
        rpc = verify(server, a_call(fake, await open_at(server, fake)))
        with pytest.raises(errors.InternalError, match="so there"):
            await answer(rpc)


@in_both_worlds
async def test_a_call_ends_at_its_deadline_and_its_server_hears_of_it(world):
    async with world("target") as (fake, server):
        fake.faults.append("hang")
        rpc = verify(server, a_call(fake, await open_at(server, fake)), timeout_seconds=0.2)
        with pytest.raises(errors.DeadlineError):
            await answer(rpc)
        await running(fake, 0)


@in_both_worlds
async def test_who_awaits_a_call_that_another_cancels_hears_that_it_is_lost(world):
    async with world("target") as (fake, server):
        fake.faults.append("hang")
        rpc = verify(server, a_call(fake, await open_at(server, fake)))
        waiting = asyncio.ensure_future(answer(rpc))
        await running(fake)
        assert rpc.cancel()
        with pytest.raises(errors.ConnectionLostError):
            await waiting
        await running(fake, 0)


@in_both_worlds
async def test_a_task_that_is_cancelled_cancels_its_call(world):
    async with world("target") as (fake, server):
        fake.faults.append("hang")
        rpc = verify(server, a_call(fake, await open_at(server, fake)))
        waiting = asyncio.ensure_future(answer(rpc))
        await running(fake)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await running(fake, 0)


@in_both_worlds
async def test_leaving_a_stream_cancels_it(world):
    async with world("drafter") as (fake, server):
        call = a_call(fake, await open_at(server, fake))
        fake.latency_seconds = 0.05
        messages = drafts(draft(server, call, max_tokens=64), max_tokens=64)
        await anext(messages)
        await messages.aclose()
        await running(fake, 0)
        assert len(fake.cancelled) == 1


@in_both_worlds
async def test_a_server_that_dies_breaks_its_calls_and_refuses_others(world):
    async with world("target") as (fake, server):
        fake.faults.append("hang")
        handle = await open_at(server, fake)
        waiting = asyncio.ensure_future(answer(verify(server, a_call(fake, handle))))
        await running(fake)
        await fake.kill()
        with pytest.raises(errors.ConnectionLostError):
            await waiting
        with pytest.raises(errors.ConnectionLostError):
            await answer(verify(server, a_call(fake, handle)))


@in_both_worlds
async def test_health_is_told_again_when_the_server_is_back(world):
    async with world("target") as (fake, server):

        async def said():
            # The first may go out on the connection that is just breaking.
            with suppress(errors.ConnectionLostError):
                return await anext(health_changes(server.channel, seconds=20))
            return await anext(health_changes(server.channel, seconds=20))

        assert await said()
        await fake.kill()
        waiting = asyncio.ensure_future(said())
        await asyncio.sleep(0.01)
        await fake.start()
        assert await waiting


@in_both_worlds
async def test_a_channel_that_is_closed_loses_its_calls_and_makes_no_more(world):
    async with world("target") as (fake, server):
        fake.faults.append("hang")
        call = a_call(fake, await open_at(server, fake))
        waiting = asyncio.ensure_future(answer(verify(server, call)))
        await running(fake)
        await server.channel.close(None)
        with pytest.raises(errors.ConnectionLostError):
            await waiting
        with pytest.raises(errors.ConnectionLostError):
            await answer(verify(server, call))


@in_both_worlds
async def test_a_call_without_a_timeout_is_refused(world):
    async with world("target") as (_, server):
        with pytest.raises(ValueError, match="without a timeout"):
            verify(server, a_call(VirtualLiar("target", name="it"), "it"), timeout_seconds=None)


@virtually
async def test_a_call_that_was_cancelled_at_the_door_still_comes_after_its_successor():
    async with over_nothing("target") as (fake, server):
        handle = await open_at(server, fake)
        fake.link.hold("Verify")
        late = verify(server, a_call(fake, handle))
        await asyncio.sleep(0.01)
        late.cancel()
        await asyncio.sleep(0.01)
        fake.link.held.clear()  # for those who come now
        await answer(verify(server, a_call(fake, handle, sequence=2)))
        fake.link.release()
        await asyncio.sleep(0.01)
        assert [it.call.sequence for it in fake.calls] == [2, 1]
        (first, _) = (it for it in fake.link.records if it.method == "Verify")
        assert (first.end, first.left) == ("withdrawn", "STALE_CALL")
