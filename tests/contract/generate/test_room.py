"""Room: what requests ask for, what happens where there is none, and who may have how much."""

from __future__ import annotations

import asyncio
import random

import grpc

from paceline import AsyncClient, errors
from paceline.v1 import orchestrator_service_pb2 as pb
from support.fake_models import FakeModelServer
from support.fake_text import continuation
from support.orchestrating import PROMPT, a_drafter, orchestrating, targets
from support.waiting import until


async def test_a_target_without_room_is_passed_over(monkeypatch):
    monkeypatch.setattr(random, "random", lambda: 0.0)  # alike: the first one is asked first
    full, free = targets(2)
    full.open_error = errors.CacheExhaustedError("full", retry_after_seconds=30)
    async with orchestrating(targets=[full, free]) as system:
        received = await system.generate(strategy=pb.STRATEGY_AUTOREGRESSIVE, max_tokens=6)
        assert received.token_ids == continuation(PROMPT, 6)
        assert received.fallbacks == {"session_refused": 1}


async def test_a_target_at_work_is_waited_for_while_another_has_no_room(monkeypatch):
    wait_seconds, retry_seconds = 0.1, 0.02
    monkeypatch.setattr("paceline_orchestrator.fleet.shortage.WAIT_SECONDS", wait_seconds)
    slow, full = targets(2)
    full.open_error = errors.CacheExhaustedError("full", retry_after_seconds=retry_seconds)
    async with orchestrating(drafters=[a_drafter()], targets=[slow, full]) as system:
        slow.answers.clear()
        call = asyncio.create_task(system.generate(strategy=pb.STRATEGY_DISTRIBUTED, max_tokens=2))
        await slow.until(lambda it: it.running)
        # For longer than a request goes without any target.
        refused = full.refused + 2 * wait_seconds / retry_seconds
        await full.until(lambda it: it.refused > refused)
        slow.answers.set()
        assert (await call).token_ids == continuation(PROMPT, 2)


async def test_a_request_that_finds_room_within_its_patience_is_served():
    async with orchestrating(targets=targets(1)) as system:
        (target,) = system.targets
        target.open_error = errors.CacheExhaustedError("full", retry_after_seconds=0.01)
        call = asyncio.create_task(system.generate(max_tokens=6))
        await target.until(lambda it: it.refused >= 3)
        target.open_error = None
        assert (await call).token_ids == continuation(PROMPT, 6)


async def test_a_session_reserves_in_steps_and_says_how_far_it_may_grow():
    async with orchestrating(targets=targets(1)) as system:
        call = system.call(max_tokens=2000)
        await system.targets[0].until(lambda it: it.calls)
        call.cancel()
        await system.settled()
        (spec,) = system.targets[0].specs
        assert spec.limit_length == len(PROMPT) + 2000
        assert len(PROMPT) < spec.reserve_length < len(PROMPT) + 1000
        assert spec.share


async def test_one_client_cannot_take_all_requests_there_may_be():
    """Two addresses of this machine are two clients."""
    target = FakeModelServer("target", stalls=lambda _: True)
    async with orchestrating(
        targets=[target], request_limit=10, listen="[::]:0", insecure=True
    ) as system:
        port = system.address.rpartition(":")[2]
        async with (
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as greedy,
            grpc.aio.insecure_channel(f"[::1]:{port}") as modest,
        ):
            calls = [system.call(channel=greedy) for _ in range(10)]
            firsts = [asyncio.ensure_future(call.read()) for call in calls]
            servicer = system.application.servicer

            def two_of_all_wait():
                """Before all have come, two may wait for the moment in which places are given."""
                waiting = servicer.waiting_count
                return waiting == 2 and servicer.running_count + waiting == len(calls)

            await until(two_of_all_wait, what="two requests wait")
            assert servicer.running_count == 8, "it gets four fifths"
            late = system.call(channel=modest)
            assert (await late.read()).HasField("started")
            for call in (*calls, late):
                call.cancel()
            await asyncio.gather(*firsts, return_exceptions=True)
        # On a busy machine it was found silent meanwhile, and a probe would wait for ever, too.
        target.stalls = lambda _: False
        await system.settled()


async def test_hundreds_of_requests_at_once_over_one_connection_are_all_answered():
    """gRPC's own limit of streams used to refuse every third of 200 before anything read it."""
    # All of them share one event loop: no target is to be found silent because that is busy.
    patient = targets(2, latency_seconds=0, forward_latencies=((1, 60 * 10**9),))
    async with orchestrating(targets=patient) as system, AsyncClient(system.address) as client:
        generations = [client.generate(PROMPT, max_tokens=1, timeout=300) for _ in range(300)]
        completions = await asyncio.gather(*(it.collect() for it in generations))
        assert {it.token_ids for it in completions} == {tuple(continuation(PROMPT, 1))}
        assert not any(it.resumption_count for it in generations)
