"""A request that is cancelled, out of time, rejected in part or drained leaves nothing behind."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager

import grpc
import pytest

from paceline import errors
from paceline.status import decode
from paceline.v1 import orchestrator_service_pb2 as pb
from paceline.v1.orchestrator_service_pb2_grpc import OrchestratorServiceStub
from paceline_orchestrator.front.tokenizer import Codec
from paceline_orchestrator.settings import OrchestratorSettings
from support.fake_models import serving
from support.fake_text import continuation
from support.orchestrating import (
    PROMPT,
    STRATEGIES,
    a_drafter,
    new_orchestrator,
    orchestrating,
    targets,
)


async def test_a_rejection_cancels_what_it_made_worthless_at_the_servers():
    drafter = a_drafter(agrees=lambda _: False)

    def drafts_two_tokens(drafted):
        if drafted.start_length > len(PROMPT):
            drafter.answers.clear()

    drafter.distort = drafts_two_tokens
    async with orchestrating(drafters=[drafter], targets=targets(3)) as system:
        for target in system.targets:
            target.answers.clear()
        call = asyncio.create_task(
            system.generate(strategy=pb.STRATEGY_DISTRIBUTED, lookahead=1, max_tokens=16)
        )
        for target in system.targets:
            await target.until(lambda it: it.running)
        # Who verifies no draft decides once, against the first; nothing but a cancel ends the rest.
        decider = next(it for it in system.targets if not it.calls[0].proposal.token_ids)
        decider.distort = lambda _: decider.answers.clear()
        decider.answers.set()
        for server in (it for it in system.models if it is not decider):
            await server.until(lambda it: it.cancelled)
        assert not call.done()
        for server in system.models:
            server.distort = lambda _: None
            server.answers.set()
        received = await call
    assert received.token_ids == continuation(PROMPT, 16)
    assert received.finished.statistics.cancelled_rpc_count >= 3


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_leaving_at_any_message_leaves_nothing_behind(strategy):
    async with orchestrating(drafters=[a_drafter()], targets=targets(2)) as system:
        for message_count in range(12):
            call = system.call(strategy=strategy, lookahead=2, stream_timeline=True)
            received = 0
            while received < message_count:
                await call.read()
                received += 1
            call.cancel()
        await system.settled()
        assert all(model.opened == model.closed for model in system.models)


async def test_leaving_while_a_session_is_being_opened_closes_it_too():
    async with orchestrating(drafters=[a_drafter()], targets=targets(2)) as system:
        for _ in range(10):
            call = system.call(strategy=pb.STRATEGY_DISTRIBUTED)
            await asyncio.sleep(0)
            call.cancel()
        received = await system.generate(strategy=pb.STRATEGY_DISTRIBUTED)
        assert received.token_ids == continuation(PROMPT, 24)
        await system.settled()
        assert all(model.opened == model.closed for model in system.models)


async def test_the_deadline_ends_a_request_and_frees_everything():
    target = targets(1)[0]
    async with orchestrating(targets=[target]) as system:
        target.faults.extend(["hang"])
        with pytest.raises(errors.DeadlineError):
            await system.generate(timeout=0.1)
        await system.settled()


async def test_a_request_without_a_deadline_gets_one():
    target = targets(1)[0]
    async with orchestrating(targets=[target], default_deadline_seconds=0.1) as system:
        target.faults.extend(["hang"])
        with pytest.raises(errors.DeadlineError):
            await system.generate(timeout=None)


@asynccontextmanager
async def hastily_draining(target):
    """An orchestrator in a hurry; yields a client's stub and what drains it to its end."""
    async with serving(target):
        process, _ = new_orchestrator(
            OrchestratorSettings(
                listen="127.0.0.1:0",
                health_listen="",
                targets=(target.address,),
                drain_seconds=0.05,
            )
        )
        await process.begin()
        async with grpc.aio.insecure_channel(process.addresses["address"]) as channel:
            yield OrchestratorServiceStub(channel), process.finish


async def hears_draining_while_it_waits(stub, request, drain):
    """Whether a request that is not yet decoded is told why it ends."""
    call = stub.Generate(request, timeout=60)
    while not (await stub.GetSystemInfo(pb.GetSystemInfoRequest())).running_request_count:
        assert not call.done()
    await drain()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    return isinstance(decode(caught.value), errors.DrainingError)


async def test_a_request_that_waits_for_a_target_at_the_end_of_a_drain_hears_draining():
    target = targets(1)[0]
    async with hastily_draining(target) as (stub, drain):
        await target.set_serving(False)
        while (await stub.GetSystemInfo(pb.GetSystemInfoRequest())).servers[0].ready:
            pass
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), max_tokens=4)
        assert await hears_draining_while_it_waits(stub, request, drain)


async def test_a_request_whose_text_is_read_at_the_end_of_a_drain_hears_draining(monkeypatch):
    goes_on = threading.Event()
    monkeypatch.setattr(Codec, "encode", lambda *_, **__: goes_on.wait(60))
    async with hastily_draining(targets(1)[0]) as (stub, drain):
        request = pb.GenerateRequest(text="long " * 1000, max_tokens=4)
        assert await hears_draining_while_it_waits(stub, request, drain)
        goes_on.set()
