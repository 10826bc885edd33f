"""A target decodes by itself: what it finds, what it holds, and when it stops."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from paceline.errors import SupersededError
from paceline_contract.calls import DecodeOptions
from paceline_engine.scheduling.jobs import Outlet, Step
from paceline_engine.scheduling.model_text import ModelText
from paceline_engine.terms.calls import SessionSpec
from support.virtual_time import virtually
from unit.engine.conftest import Gate, call_on, continuation, instant, running, until

SPEC = SessionSpec(200)
PROMPT = [3, 1, 4]
ORACLE = continuation(ModelText(instant(), SPEC), PROMPT, 40)


def first_call(session: str):
    return call_on(session, 1, base=[], append=PROMPT)


async def decoded(host, session: str, options: DecodeOptions) -> list[int]:
    found: list[int] = []
    async for each in host.decode(first_call(session), options):
        found += each.token_ids
    return found


async def test_sessions_that_decode_share_their_forwards():
    gate = Gate()
    async with running(gate) as host, asyncio.TaskGroup() as group:
        calls = [
            group.create_task(
                decoded(host, host.open_session(SPEC).session_id, DecodeOptions(max_tokens=20))
            )
            for _ in range(4)
        ]
        await until(lambda: host.statistics().calls_live == 4)
        gate.open.set()
        assert [await call for call in calls] == [ORACLE[:20]] * 4
        statistics = host.statistics()
        assert (statistics.items, statistics.decode_calls) == (80, 4)
        assert statistics.forwards <= 22


async def test_nothing_is_computed_after_an_end_token():
    async with running(instant()) as host:
        session = host.open_session(SPEC).session_id
        ends = (ORACLE[5],)
        count = ORACLE.index(ORACLE[5]) + 1
        assert (
            await decoded(host, session, DecodeOptions(max_tokens=20, end_token_ids=ends))
            == ORACLE[:count]
        )
        assert host.statistics().forwards == count


async def test_a_caller_that_leaves_leaves_no_generator_to_a_collector(monkeypatch):
    parcels, ended = Outlet.parcels, []

    async def watched(outlet, **options):
        try:
            async for each in parcels(outlet, **options):
                yield each
        finally:
            ended.append(outlet)

    monkeypatch.setattr(Outlet, "parcels", watched)
    async with running(instant()) as host:
        decoding = host.decode(
            first_call(host.open_session(SPEC).session_id), DecodeOptions(max_tokens=20)
        )
        await anext(decoding)
        await decoding.aclose()
        assert len(ended) == 1


async def test_a_caller_that_leaves_ends_it():
    gate = Gate()
    async with running(gate) as host:
        session = host.open_session(SPEC).session_id
        gate.open.set()
        async with aclosing(
            host.decode(first_call(session), DecodeOptions(max_tokens=30))
        ) as parcels:
            first = await anext(parcels)
            gate.open.clear()
        await until(lambda: not host.statistics().forwards_running)
        statistics = host.statistics()
        assert (statistics.queue_length, statistics.calls_live) == (0, 0)
        held = [*PROMPT, *first.token_ids]
        gate.open.set()
        call = call_on(session, 2, base=held, append=[])
        assert (await host.verify(call)).next_token == ORACLE[len(first.token_ids)]


async def test_a_newer_call_of_its_session_replaces_it():
    gate = Gate()
    async with running(gate) as host:
        session = host.open_session(SPEC).session_id
        older = asyncio.create_task(decoded(host, session, DecodeOptions(max_tokens=30)))
        await until(lambda: len(gate.entered) == 1)
        newer = asyncio.create_task(host.verify(call_on(session, 2, base=[], append=PROMPT)))
        with pytest.raises(SupersededError):
            await older
        gate.open.set()
        assert (await newer).next_token == ORACLE[0]


class FailsOnce(Gate):
    """Fails in its fifth forward, and is well again."""

    def _forward(self, feeds, interrupt):
        if len(self.entered) == 4:
            self.failures.append(ZeroDivisionError())
        return super()._forward(feeds, interrupt)


async def test_an_error_in_mid_text_ends_it_and_what_was_found_is_held():
    gate = FailsOnce()
    gate.open.set()
    async with running(gate) as host:
        session = host.open_session(SPEC).session_id
        found: list[int] = []
        with pytest.raises(ZeroDivisionError):  # noqa: PT012 - what came before it counts
            async for each in host.decode(first_call(session), DecodeOptions(max_tokens=40)):
                found += each.token_ids
        assert found == ORACLE[: len(found)]
        text = [*PROMPT, *found]
        call = call_on(session, 2, base=text if found else [], append=[] if found else text)
        assert (await host.verify(call)).next_token == ORACLE[len(found)]


def step(number: int) -> Step[int]:
    return Step(number, queue_ns=0, forward_ns=0)


async def test_what_is_there_travels_together_and_the_first_at_once():
    outlet: Outlet[int] = Outlet()
    parcels = outlet.parcels(interval_seconds=0)
    outlet.put([step(1)])
    assert [each.outcome for each in await anext(parcels)] == [1]
    for number in (2, 3, 4):
        outlet.put([step(number)])
    assert [each.outcome for each in await anext(parcels)] == [2, 3, 4]
    outlet.put([step(5)])
    outlet.end()
    assert [each.outcome for each in await anext(parcels)] == [5]
    assert [each async for each in parcels] == []


async def test_within_the_interval_steps_wait_for_each_other_but_not_beyond_the_end():
    outlet: Outlet[int] = Outlet()
    parcels = outlet.parcels(interval_seconds=3600)
    outlet.put([step(1)])
    assert len(await anext(parcels)) == 1
    outlet.put([step(2)])
    waiting = asyncio.ensure_future(anext(parcels))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    outlet.put([step(3)])
    outlet.end()
    assert [each.outcome for each in await waiting] == [2, 3]


async def test_an_error_overtakes_what_waits_for_the_interval():
    outlet: Outlet[int] = Outlet()
    parcels = outlet.parcels(interval_seconds=3600)
    outlet.put([step(1)])
    await anext(parcels)
    outlet.put([step(2)])
    waiting = asyncio.ensure_future(anext(parcels))
    await asyncio.sleep(0)
    outlet.end(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        await waiting


@virtually
async def test_nothing_is_handed_over_after_an_error_in_the_turn_in_which_the_interval_ends():
    outlet: Outlet[int] = Outlet()
    parcels = outlet.parcels(interval_seconds=1)
    outlet.put([step(1)])
    await anext(parcels)
    outlet.put([step(2)])
    waiting = asyncio.ensure_future(anext(parcels))
    loop = asyncio.get_running_loop()
    due_at = loop.time() + 1
    await asyncio.sleep(0)
    loop.call_at(due_at, outlet.end, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        await waiting
