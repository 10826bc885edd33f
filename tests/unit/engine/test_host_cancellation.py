"""A caller that leaves takes its work along, and leaves its session as it was."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from paceline_contract.calls import DraftOptions
from paceline_engine.scheduling.model_text import ModelText
from unit.engine.asking import (
    ORACLE,
    PROMPT,
    SPEC,
    asked,
    drafted,
    entered,
    held_length,
    opened,
    verifying,
)
from unit.engine.conftest import Gate, call_on, chain, continuation, instant, path, running, until


async def test_a_cancelled_verification_leaves_its_base_and_no_work():
    gate = Gate()
    async with running(gate) as host:
        session = opened(host)
        gate.open.set()
        await host.verify(asked(session), chain(ORACLE[:3]))
        gate.open.clear()
        call = call_on(session, 2, base=PROMPT, append=ORACLE[:5])
        task = asyncio.create_task(host.verify(call, chain(ORACLE[5:7])), name="cancelled")
        await entered(gate, 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert host.statistics().calls_live == 0
        gate.open.set()
        assert await held_length(host, session, sequence=3) == 3
        follow = call_on(session, 4, base=PROMPT, append=ORACLE[:5])
        assert (await host.verify(follow)).next_token == ORACLE[5]
        assert host.statistics().forwards_interrupted == 1
        assert host.statistics().calls_cancelled == 1


async def test_a_call_cancelled_in_the_queue_never_runs():
    gate = Gate()
    async with running(gate) as host, asyncio.TaskGroup() as group:
        first = verifying(group, host, asked(opened(host)))
        await entered(gate)
        task = asyncio.create_task(host.verify(asked(opened(host))), name="cancelled")
        await until(lambda: host.statistics().queue_length == 1)
        task.cancel()
        await asyncio.wait([task])
        assert host.statistics().queue_length == 0
        gate.open.set()
        await first
        assert len(gate.entered) == 1


async def test_the_old_callers_cancel_does_not_hurt_who_took_over():
    gate = Gate()
    async with running(gate) as host, asyncio.TaskGroup() as group:
        session = opened(host)
        older = asyncio.create_task(host.verify(asked(session), chain(ORACLE[:2])), name="older")
        await entered(gate)
        newer = verifying(group, host, asked(session, 2), ORACLE[:2])
        await until(lambda: host.statistics().calls_adopted == 1)
        older.cancel()
        await asyncio.wait([older])
        gate.open.set()
        assert (await newer).accepted_path == path(2)


async def test_a_draft_that_is_left_stops_and_keeps_what_it_streamed():
    async with running(instant()) as host:
        session = opened(host)
        async with aclosing(host.draft(asked(session), DraftOptions(max_tokens=300))) as stream:
            first = [(await anext(stream)).proposal.token_ids[0] for _ in range(2)]
        assert first == ORACLE[:2]
        assert host.statistics().calls_live == 0
        await until(lambda: not host.statistics().forwards_running)
        assert host.statistics().queue_length == 0
        assert await held_length(host, session, sequence=2) == 5
        follow = call_on(session, 3, base=PROMPT + ORACLE[:2], append=[])
        assert await drafted(host, follow, max_tokens=3) == ORACLE[2:5]


async def test_a_cancelled_real_forward_runs_fewer_layers_and_the_next_answer_is_right(target):
    oracle = continuation(ModelText(target, SPEC), PROMPT, 6)
    async with running(target) as host:
        session = opened(host)
        await host.verify(asked(session), chain(oracle[:2]))
        before = host.statistics().layers_run
        hook = target._before_layer
        target.decoder.layers[2].register_forward_pre_hook(
            lambda *_: target.interrupt.wait(60), prepend=True
        )
        try:
            call = call_on(session, 2, base=PROMPT, append=oracle[:3])
            task = asyncio.create_task(host.verify(call, chain(oracle[3:5])), name="cancelled")
            await until(lambda: host.statistics().layers_run == before + 2)
            task.cancel()
            await asyncio.wait([task])
            await until(lambda: host.statistics().forwards_interrupted == 1)
        finally:
            hooks = target.decoder.layers[2]._forward_pre_hooks
            hooks.popitem(last=False)
            assert list(hooks.values()) == [hook]
        assert host.statistics().layers_run == before + 2
        follow = await host.verify(replace(call, sequence=3), chain(oracle[3:5]))
        assert (follow.accepted_path, follow.next_token) == (path(2), oracle[5])
