"""Which call of a session counts: the newer one replaces the older, or takes its work over."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from paceline.errors import (
    InvalidFieldError,
    PrefixMismatchError,
    PrefixNotHeldError,
    StaleCallError,
    SupersededError,
)
from paceline_contract.calls import DraftOptions
from unit.engine.asking import ORACLE, PROMPT, asked, drafted, entered, opened, verifying
from unit.engine.conftest import Gate, call_on, chain, instant, path, running, until


async def test_stale_and_misfounded_calls_are_told_what_is_wrong():
    async with running(instant()) as host:
        session = opened(host)
        await host.verify(asked(session, 5))
        with pytest.raises(StaleCallError):
            await host.verify(asked(session, 5))
        with pytest.raises(PrefixNotHeldError) as caught:
            await host.verify(call_on(session, 6, base=[1, 2, 3, 4], append=[]))
        assert caught.value.metadata == {"held_length": "3"}
        with pytest.raises(PrefixMismatchError):
            await host.verify(call_on(session, 7, base=[1, 2, 4], append=[]))
        assert (await host.verify(asked(session, 8))).next_token == ORACLE[0]
        assert host.statistics().calls_refused == 3


async def test_a_call_that_is_refused_as_invalid_changes_nothing():
    async with running(instant()) as host:
        session = opened(host)
        await host.verify(asked(session))
        forwards = host.statistics().forwards
        for call, block in [
            (asked(session, 2, append=[1, 2048]), []),
            (asked(session, 2), [-1]),
            (asked(session, 2, append=[]), []),
            (asked(session, 2, append=[1] * 401), []),
            (replace(asked(session, 2), base_digest=b"short"), []),
        ]:
            with pytest.raises(InvalidFieldError):
                await host.verify(call, chain(block))
        with pytest.raises(InvalidFieldError):
            await drafted(host, asked(session, 2), max_tokens=398)
        assert host.statistics().forwards == forwards
        await host.verify(call_on(session, 2, base=PROMPT, append=[]))


@pytest.mark.parametrize("tampering", ["list", "cache"])
async def test_tampering_is_found_or_healed(tampering):
    async with running(instant()) as host:
        session = opened(host)
        await host.verify(asked(session), chain(ORACLE[:4]))
        inside = host._sessions.find(session)
        call = call_on(session, 2, base=PROMPT + ORACLE[:4], append=[])
        if tampering == "list":
            inside._prefix = type(inside._prefix)([7] * 7)
            with pytest.raises(PrefixMismatchError):
                await host.verify(call)
        else:
            inside.cache.clear()
            assert (await host.verify(call)).next_token == ORACLE[4]


async def test_a_newer_call_supersedes_a_running_one_at_once():
    gate = Gate()
    async with running(gate) as host, asyncio.TaskGroup() as group:
        session = opened(host)
        older = verifying(group, host, asked(session), ORACLE[:2])
        await entered(gate)
        newer = verifying(group, host, asked(session, 2), ORACLE[:3])
        assert isinstance(await older, SupersededError)
        gate.open.set()
        assert (await newer).accepted_path == path(3)
        statistics = host.statistics()
        assert (statistics.forwards, statistics.forwards_interrupted) == (1, 1)
        assert statistics.calls_superseded == 1
        assert statistics.forwards_wasted == 1
        assert statistics.wasted_ns > statistics.freeing_ns > 0


async def test_a_newer_call_supersedes_a_queued_one():
    gate = Gate()
    async with running(gate) as host, asyncio.TaskGroup() as group:
        blocker, session = opened(host), opened(host)
        first = verifying(group, host, asked(blocker))
        await entered(gate)
        older = verifying(group, host, asked(session), ORACLE[:2])
        await until(lambda: host.statistics().queue_length == 1)
        newer = verifying(group, host, asked(session, 2), ORACLE[:3])
        assert isinstance(await older, SupersededError)
        assert host.statistics().queue_length == 1
        gate.open.set()
        await first
        await newer
        assert len(gate.entered) == 2


async def test_a_newer_call_that_fails_its_checks_still_supersedes():
    gate = Gate()
    async with running(gate) as host, asyncio.TaskGroup() as group:
        session = opened(host)
        older = verifying(group, host, asked(session))
        await entered(gate)
        with pytest.raises(PrefixNotHeldError):
            await host.verify(call_on(session, 2, base=PROMPT, append=[]))
        assert isinstance(await older, SupersededError)
        gate.open.set()


async def test_the_same_call_takes_over_a_running_forward():
    gate = Gate()
    async with running(gate) as host, asyncio.TaskGroup() as group:
        session = opened(host)
        older = verifying(group, host, asked(session), ORACLE[:2], depth=3)
        await entered(gate)
        newer = verifying(group, host, asked(session, 2), ORACLE[:2], depth=0)
        error = await older
        assert isinstance(error, SupersededError)
        assert error.metadata == {"taken_over_by": "2"}
        gate.open.set()
        assert (await newer).accepted_path == path(2)
        statistics = host.statistics()
        assert (statistics.forwards, statistics.forwards_interrupted) == (1, 0)
        assert statistics.calls_adopted == 1
        assert statistics.forwards_wasted == 0
        await host.verify(call_on(session, 3, base=PROMPT + ORACLE[:2], append=[]))


async def test_the_same_question_about_another_prefix_takes_nothing_over():
    gate = Gate()
    async with running(gate) as host, asyncio.TaskGroup() as group:
        session = opened(host)
        older = verifying(group, host, asked(session), ORACLE[:2])
        await entered(gate)
        newer = verifying(group, host, asked(session, 2, append=[3, 2, 1]), ORACLE[:2])
        error = await older
        assert isinstance(error, SupersededError)
        assert not error.metadata
        gate.open.set()
        assert (await newer).accepted_path == ()
        assert host.statistics().calls_adopted == 0


async def test_the_same_draft_again_starts_anew():
    """What the older one found may have gone to its caller."""
    gate = Gate()
    async with running(gate) as host:
        session = opened(host)
        older = asyncio.create_task(drafted(host, asked(session), max_tokens=3), name="older")
        await entered(gate)
        newer = asyncio.create_task(drafted(host, asked(session, 2), max_tokens=3), name="newer")
        with pytest.raises(SupersededError):
            await older
        gate.open.set()
        assert await newer == ORACLE[:3]
        assert host.statistics().calls_adopted == 0


async def test_the_same_call_at_a_lower_depth_overtakes_in_the_queue():
    gate, order = Gate(), []
    async with running(gate) as host, asyncio.TaskGroup() as group:
        sessions = [opened(host) for _ in range(3)]
        first = verifying(group, host, asked(sessions[0]))
        await entered(gate)
        calls = [
            verifying(group, host, asked(sessions[1]), ORACLE[:1], depth=1),
            verifying(group, host, asked(sessions[2]), ORACLE[:2], depth=2),
        ]
        await until(lambda: host.statistics().queue_length == 2)
        calls.append(verifying(group, host, asked(sessions[2], 2), ORACLE[:2], depth=0))
        for index, call in enumerate(calls):
            call.add_done_callback(lambda _, index=index: order.append(index))
        await until(lambda: order == [1])
        gate.open.set()
        await first
        await asyncio.wait(calls)
        assert order == [1, 2, 0]


async def test_a_superseded_draft_keeps_what_it_streamed():
    async with running(instant()) as host:
        session = opened(host)
        async with aclosing(host.draft(asked(session), DraftOptions(max_tokens=50))) as stream:
            assert [(await anext(stream)).proposal.token_ids[0] for _ in range(4)] == ORACLE[:4]
            follow = call_on(session, 2, base=PROMPT + ORACLE[:4], append=[])
            assert await drafted(host, follow, max_tokens=2) == ORACLE[4:6]
            with pytest.raises(SupersededError):
                await anext(stream)
