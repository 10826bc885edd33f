"""A host's sessions: their leases, their room, and whose they are."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from paceline.errors import (
    CacheExhaustedError,
    OverloadedError,
    PacelineError,
    PrefixNotHeldError,
    SessionNotFoundError,
    SupersededError,
    UnsupportedError,
)
from paceline_contract.calls import VerificationRule
from paceline_contract.sampling import SamplingParameters
from paceline_engine.scheduling.model_text import ModelText
from paceline_engine.sessions.host import HostLimits
from paceline_engine.terms.calls import SessionSpec
from unit.engine.asking import ORACLE, PROMPT, SPEC, asked, drafted, entered, opened, verifying
from unit.engine.conftest import Gate, call_on, chain, continuation, instant, running, until


async def test_closing_ends_the_live_call_and_is_idempotent():
    gate = Gate()
    async with running(gate) as host, asyncio.TaskGroup() as group:
        session = opened(host)
        call = verifying(group, host, asked(session))
        await entered(gate)
        host.close_session(session)
        assert isinstance(await call, SupersededError)
        host.close_session(session)
        host.close_session("unknown")
        with pytest.raises(SessionNotFoundError):
            await host.verify(asked(session, 2))
        with pytest.raises(SessionNotFoundError):
            host.renew_session(session)
        statistics = host.statistics()
        assert (statistics.sessions_opened, statistics.sessions_released) == (1, 1)
        gate.open.set()


async def test_a_lease_does_not_run_out_during_a_call_and_starts_anew_after_it():
    now = 0.0
    gate = Gate()
    async with running(gate, clock=lambda: now) as host, asyncio.TaskGroup() as group:
        session = opened(host, SessionSpec(100, lease_seconds=2.0))
        call = verifying(group, host, asked(session))
        await entered(gate)
        now = 50.0
        opened(host)  # looks for sessions whose lease is over
        gate.open.set()
        assert (await call).next_token == ORACLE[0]
        now = 51.9
        assert host.renew_session(session) == 2.0
        now = 53.9
        with pytest.raises(SessionNotFoundError):
            host.renew_session(session)
        assert host.statistics().sessions_expired == 1


async def test_a_session_says_which_call_of_it_is_in_sight():
    gate = Gate()
    async with running(gate) as host, asyncio.TaskGroup() as group:
        session = opened(host)
        assert host.live_sequence(session) is None
        call = verifying(group, host, asked(session))
        await entered(gate)
        assert host.live_sequence(session) == 1
        host._worker._running.jobs[0].work.patience_ns = 0
        assert host.live_sequence(session) is None, "a forward that hangs answers nobody"
        host._worker._running.jobs[0].work.patience_ns = None
        gate.open.set()
        await call
        assert host.live_sequence(session) is None
        with pytest.raises(SessionNotFoundError):
            host.live_sequence("another")


@pytest.mark.parametrize("cuts", [True, False])
async def test_only_a_prompt_that_is_not_cut_may_take_as_long_as_a_whole_one(cuts):
    gate = Gate()
    gate.__class__ = type("Cutting", (Gate,), {"cuts_prompts": cuts})
    async with running(gate) as host, asyncio.TaskGroup() as group:
        for rows in (1, 1000):
            host._meter.record(rows, rows * 100_000)
        host._meter.record_prefills((64, 6_400_000), (256, 25_600_000))
        session = opened(host, SessionSpec(100_000))
        call = verifying(group, host, asked(session, append=[7] * 50_000))
        await entered(gate)
        seconds = host._worker._running.patience_ns / 1e9
        assert seconds < 400 if cuts else seconds > 2500
        gate.open.set()
        await call


async def test_a_call_that_fails_after_the_fence_starts_the_lease_anew():
    now = 0.0
    gate = Gate()
    async with running(gate, clock=lambda: now) as host, asyncio.TaskGroup() as group:
        session = opened(host, SessionSpec(100, lease_seconds=2.0))
        older = verifying(group, host, asked(session))
        await entered(gate)
        now = 50.0
        with pytest.raises(PrefixNotHeldError):
            await host.verify(call_on(session, 2, base=PROMPT, append=[]))
        assert isinstance(await older, SupersededError)
        now = 51.9
        assert host.renew_session(session) == 2.0
        gate.open.set()


async def test_the_reaper_runs_by_itself():
    now = 0.0
    limits = HostLimits(warm_up_rounds=0, reap_seconds=0.001)
    async with running(instant(), limits=limits, clock=lambda: now) as host:
        opened(host)
        now = 100.0
        await host.settled()
        assert host.statistics().sessions_open == 0
        assert host.statistics().sessions_expired == 1


async def test_a_rule_the_model_lacks_is_unsupported():
    async with running(instant()) as host:
        sampled = SamplingParameters(temperature=1.0)
        with pytest.raises(UnsupportedError):
            host.open_session(SessionSpec(10, sampled, rule=VerificationRule.REJECTION))


async def test_a_growing_session_has_the_text_of_one_that_reserved_all(target):
    oracle = continuation(ModelText(target, SPEC), PROMPT, 300)
    async with running(target) as host:
        session = opened(host, SessionSpec(3, limit_length=400))
        assert await drafted(host, asked(session), max_tokens=100) == oracle[:100]
        assert host.statistics().tokens_reserved == 103 + 256
        assert await drafted(host, asked(session, 2), max_tokens=300) == oracle
        assert host.statistics().tokens_reserved == 400


async def test_a_call_that_finds_no_room_leaves_the_running_one_and_the_lease_alone():
    now, gate = 0.0, Gate()
    limits = HostLimits(warm_up_rounds=0, token_budget=100)
    async with (
        running(gate, limits=limits, clock=lambda: now) as host,
        asyncio.TaskGroup() as group,
    ):
        opened(host, SessionSpec(80, share="another"))
        session = opened(host, SessionSpec(5, limit_length=50, lease_seconds=2.0))
        older = verifying(group, host, asked(session))
        await entered(gate)
        with pytest.raises(CacheExhaustedError):
            await host.verify(asked(session, 2), chain(ORACLE[:30]))
        with pytest.raises(CacheExhaustedError):
            await drafted(host, asked(session, 2), max_tokens=30)
        gate.open.set()
        assert (await older).next_token == ORACLE[0]
        now = 1.9
        with pytest.raises(CacheExhaustedError):
            await host.verify(asked(session, 2), chain(ORACLE[:30]))
        now = 3.8
        # A session whose calls are refused is in use.
        assert (await host.verify(asked(session, 2))).next_token == ORACLE[0]
        assert host.statistics().calls_refused == 3


async def test_the_calls_of_a_share_leave_the_queue_to_others():
    gate = Gate()
    limits = HostLimits(warm_up_rounds=0, queue_limit=5)
    async with running(gate, limits=limits) as host, asyncio.TaskGroup() as group:
        calls = [verifying(group, host, asked(opened(host, SessionSpec(9, share="greedy"))))]
        await entered(gate)
        greedy = [opened(host, SessionSpec(9, share="greedy")) for _ in range(5)]
        calls += [verifying(group, host, asked(session)) for session in greedy]
        refused = await calls[-1]
        assert isinstance(refused, OverloadedError)
        modest = opened(host, SessionSpec(9, share="modest"))
        calls.append(verifying(group, host, asked(modest)))
        await until(lambda: host.statistics().queue_length == 5 or calls[-1].done())
        gate.open.set()
        answers = [await call for call in calls]
        assert [each for each in answers if isinstance(each, PacelineError)] == [refused]


async def test_a_session_is_there_for_its_owner_only():
    async with running(instant()) as host:
        session = opened(host, SessionSpec(9, owner="mine"))
        call = replace(asked(session), caller="mine")
        for caller in ("", "theirs"):
            with pytest.raises(SessionNotFoundError):
                await host.verify(replace(call, caller=caller))
            with pytest.raises(SessionNotFoundError):
                host.renew_session(session, caller=caller)
            host.close_session(session, caller=caller)
        await host.verify(call)
        host.close_session(session, caller="mine")
        assert host.statistics().sessions_open == 0
