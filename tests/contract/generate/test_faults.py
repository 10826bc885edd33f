"""Faults of model servers cost time and nothing else."""

from __future__ import annotations

import asyncio
import random

import pytest

from paceline import errors
from paceline.v1 import orchestrator_service_pb2 as pb
from paceline_orchestrator.front.tokenizer import Codecs
from support.fake_models import FakeModelServer
from support.fake_text import EOS, continuation, next_token
from support.orchestrating import PROMPT, STRATEGIES, a_drafter, orchestrating, targets
from support.ports import free_address
from support.waiting import until


def after_two_tokens(text):
    return len(text) >= len(PROMPT) + 2


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("lose_session", "session_lost"),
        ("lose_tokens", "prefix_resent"),
        ("tamper", "prefix_resent"),
    ],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_what_a_server_forgets_is_sent_again(strategy, fault, kind):
    drafter, target = a_drafter(), targets(1)[0]
    async with orchestrating(drafters=[drafter], targets=[target]) as system:
        target.faults.extend(["", "", fault, "", "", fault])
        drafter.faults.extend(["", fault])
        received = await system.generate(strategy=strategy, lookahead=2)
        assert received.token_ids == continuation(PROMPT, 24)
        assert received.fallbacks[kind] >= 2
        await system.settled()


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_target_that_vanishes_is_replaced(strategy):
    async with orchestrating(drafters=[a_drafter()], targets=targets(3)) as system:
        token_ids, victim = [], None
        async for message in system.call(strategy=strategy, lookahead=2, target_count=2):
            token_ids += message.chunk.token_ids
            if len(token_ids) >= 5 and victim is None:
                victim = max(system.targets, key=lambda it: len(it.calls))
                await victim.kill()
        assert victim is not None
        assert token_ids == continuation(PROMPT, 24)


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
async def test_a_drafter_that_vanishes_is_done_without(strategy):
    drafter = a_drafter()
    async with orchestrating(drafters=[drafter], targets=targets(2)) as system:
        drafter.faults.extend(["", "hang"])
        call = asyncio.create_task(system.generate(strategy=strategy, lookahead=2))
        await drafter.until(lambda it: len(it.calls) >= 2)
        await drafter.kill()
        received = await call
        assert received.token_ids == continuation(PROMPT, 24)
        assert received.fallbacks["no_drafter"]
        assert received.fallbacks.keys() <= {"drafter_lost", "deadline", "no_drafter"}


async def test_a_target_that_hangs_is_given_up_at_its_deadline():
    async with orchestrating(targets=targets(2)) as system:
        for target in system.targets:
            target.faults.extend(["", "", "hang"])
        received = await system.generate(strategy=pb.STRATEGY_AUTOREGRESSIVE, max_tokens=6)
        assert received.token_ids == continuation(PROMPT, 6)
        assert received.fallbacks["deadline"] >= 1


async def test_a_target_that_answers_nonsense_is_not_believed():
    async with orchestrating(targets=targets(2)) as system:
        system.targets[0].faults.extend(["", "wrong_answer"])
        system.targets[1].faults.extend(["", "wrong_answer"])
        received = await system.generate(strategy=pb.STRATEGY_AUTOREGRESSIVE, max_tokens=6)
        assert received.token_ids == continuation(PROMPT, 6)
        assert received.fallbacks["target_lost"] >= 1


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_target_whose_session_does_not_open_holds_up_nothing(strategy, monkeypatch):
    monkeypatch.setattr(random, "random", lambda: 0.0)  # alike: the first one is asked first
    hung, well = targets(2)
    hung.opens.clear()
    async with orchestrating(drafters=[a_drafter()], targets=[hung, well]) as system:
        received = await system.generate(strategy=strategy, max_tokens=6)
        assert received.token_ids == continuation(PROMPT, 6)
        assert not hung.calls
        hung.opens.set()
        await system.settled()


async def test_an_overloaded_target_is_asked_again():
    async with orchestrating(targets=targets(1)) as system:
        system.targets[0].faults.extend(["", "overload"])
        received = await system.generate(strategy=pb.STRATEGY_AUTOREGRESSIVE, max_tokens=6)
        assert received.token_ids == continuation(PROMPT, 6)
        assert received.fallbacks == {"session_refused": 1}


async def test_without_any_target_the_request_ends_with_no_target(monkeypatch):
    """Before its first token, and after it: with the same time to wait."""
    monkeypatch.setattr("paceline_orchestrator.fleet.shortage.WAIT_SECONDS", 0.05)
    monkeypatch.setattr("paceline_orchestrator.fleet.shortage.RETRY_SECONDS", 7.0)
    target = targets(1)[0]
    async with orchestrating(drafters=[a_drafter()], targets=[target]) as system:
        target.faults.extend(["", "", "hang"])
        call = asyncio.create_task(system.generate(strategy=pb.STRATEGY_DISTRIBUTED))
        await target.until(lambda it: it.begun >= 3)
        await target.kill()
        with pytest.raises(errors.NoTargetError) as after:
            await call
        await system.drafters[0].until(lambda it: not it.sessions and not it.running)
        with pytest.raises(errors.NoTargetError) as before:
            await system.generate()
        assert after.value.retry_after_seconds == before.value.retry_after_seconds == 7.0


async def test_a_target_that_comes_back_in_time_goes_on():
    target = targets(1, address=free_address(), stalls=after_two_tokens)[0]
    async with orchestrating(targets=[target]) as system:
        call = asyncio.create_task(system.generate(max_tokens=6))
        await target.until(lambda it: it.begun >= 3)
        await target.kill()
        target.stalls = lambda _: False
        await target.start()
        received = await call
        assert received.token_ids == continuation(PROMPT, 6)
        # Once more where it is asked for a session before its port is open again.
        assert received.fallbacks.keys() == {"target_lost"}


async def test_a_target_with_another_model_never_takes_over(monkeypatch):
    monkeypatch.setattr("paceline_orchestrator.fleet.shortage.WAIT_SECONDS", 0.05)
    first = targets(1)[0]
    other = FakeModelServer(
        "target", fingerprint="other", token_after=lambda text: (next_token(text) + 1) % EOS
    )
    async with orchestrating(targets=[first, other]) as system:
        used = first if (await system.generate()).started.model_fingerprint != "other" else other
        used.stalls = after_two_tokens
        begun = used.begun
        call = asyncio.create_task(system.generate())
        await used.until(lambda it: it.begun >= begun + 3)
        await used.kill()
        with pytest.raises(errors.NoTargetError):
            await call


async def test_an_orchestrator_begins_though_its_first_target_vanishes_right_after_its_tokenizer(
    monkeypatch,
):
    target = FakeModelServer("target", address=free_address())
    fetch, returning = Codecs.fetch, []

    async def fetch_from_one_that_vanishes(codecs, server):
        is_first = not codecs.has(server.facts.tokenizer_fingerprint)
        await fetch(codecs, server)
        if is_first:
            await target.kill()
            await until(lambda: not server.ready, what="it is known to be gone")
            returning.append(asyncio.ensure_future(target.start()))

    monkeypatch.setattr(Codecs, "fetch", fetch_from_one_that_vanishes)
    async with orchestrating(targets=[target]) as system:
        await asyncio.gather(*returning)
        assert (await system.generate()).token_ids == continuation(PROMPT, 24)
