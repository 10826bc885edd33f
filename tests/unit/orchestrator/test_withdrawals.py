"""What became worthless is told to stop, in time and without exception; on virtual time."""

from __future__ import annotations

import asyncio
import time
from unittest.mock import MagicMock

import pytest

from paceline import errors
from paceline.v1 import orchestrator_service_pb2 as pb
from paceline_orchestrator.decoding.calls_in_flight import CallsInFlight
from paceline_protocol.messages import StartDraft
from support.fake_text import EOS, continuation, next_token
from support.orchestrating import PROMPT
from support.virtual_servers import drafters, targets
from support.virtual_system import VirtualDiscovery, now, virtual_system
from support.virtual_time import virtually

COURTESY_SECONDS = 0.002
HOP_SECONDS = 0.0005
INSTANT = 1e-6
TOKENS = 40
TRUTH = [*PROMPT, *continuation(PROMPT, TOKENS + 600)]


def known_wrong_at(call, stream, *, prefix):
    """Return when it was known that a call is on a wrong path; None if it never was."""
    text = [*prefix]
    told_at = [0.0] * len(text)
    if call.method == "Draft":
        for at, message in call.messages:
            text += message.proposal.token_ids
            told_at += [at] * len(message.proposal.token_ids)
    final_at = {}
    position = len(PROMPT)
    for at, token_ids in stream.arrivals:
        final_at.update(dict.fromkeys(range(position, position + len(token_ids)), at))
        position += len(token_ids)
    for index, token_id in enumerate(text):
        if token_id != TRUTH[index]:
            return max(told_at[index], final_at[index]) if index in final_at else None
    return None


def withdrawn(calls):
    return [it for it in calls if it.end in {"withdrawn", "SUPERSEDED"}]


@pytest.mark.parametrize("agrees", [lambda _: False, lambda it: it % 3 > 0])
@pytest.mark.parametrize("lookahead", [1, 3])
@virtually
async def test_what_a_rejection_makes_worthless_is_withdrawn_within_two_milliseconds(
    agrees, lookahead
):
    models = [*drafters(1, agrees=agrees), *targets(3)]
    by_name = {it.name: it for it in models}
    async with virtual_system(*models) as system:
        stream = await system.generate(
            strategy=pb.STRATEGY_DISTRIBUTED,
            lookahead=lookahead,
            target_count=3,
            max_tokens=TOKENS,
            include_timeline=True,
        )
        await system.settle()
        calls = system.records("Verify", "Decode", "Draft")
        late = []
        wrong_count = 0
        for call in calls:
            prefix = by_name[call.server].prefixes[call.session_id, call.request.call.sequence]
            wrong_at = known_wrong_at(call, stream, prefix=prefix)
            if wrong_at is not None:
                wrong_count += 1
                if call.ended_at > max(call.sent_at, wrong_at) + COURTESY_SECONDS + INSTANT:
                    late.append(call)
        assert wrong_count > 10
        assert not late
        took = stream.finished.statistics
        before_the_end = [it for it in withdrawn(calls) if it.ended_at < stream.ended - INSTANT]
        assert took.cancelled_rpc_count == len(before_the_end)


@virtually
async def test_what_a_texts_end_leaves_running_counts_as_no_rejection():
    def token_after(text):
        return EOS if len(text) == len(PROMPT) + 12 else next_token(text)

    models = [*drafters(1, token_after=token_after), *targets(3, token_after=token_after)]
    async with virtual_system(*models) as system:
        stream = await system.generate(
            strategy=pb.STRATEGY_DISTRIBUTED, lookahead=2, target_count=3, max_tokens=TOKENS
        )
        await system.settle()
        assert stream.finished.finish_reason == pb.FINISH_REASON_EOS
        over = stream.arrivals[-1][0]
        calls = withdrawn(system.records("Verify", "Draft"))
        assert any(it.ended_at >= over for it in calls)
        told = stream.finished.statistics.cancelled_rpc_count
        assert told == sum(it.ended_at < over for it in calls)


@virtually
async def test_si_gets_a_block_in_one_message():
    async with virtual_system(*drafters(1), *targets(1)) as system:
        await system.generate(
            strategy=pb.STRATEGY_SPECULATIVE,
            dispatch_policy=pb.DISPATCH_POLICY_BLOCKS,
            lookahead=4,
            max_tokens=TOKENS,
        )
        drafts = system.records("Draft")
        assert {len(message.proposal.token_ids) for _, message in drafts[0].messages} == {4}


@pytest.mark.parametrize(
    "strategy", [pb.STRATEGY_AUTOREGRESSIVE, pb.STRATEGY_SPECULATIVE, pb.STRATEGY_DISTRIBUTED]
)
@virtually
async def test_a_client_that_leaves_withdraws_everything_at_once(strategy):
    models = [*drafters(1), *targets(3)]
    async with virtual_system(*models) as system:
        for milliseconds in range(0, 200, 7):
            running = asyncio.ensure_future(
                system.generate(strategy=strategy, lookahead=2, target_count=3)
            )
            await asyncio.sleep(milliseconds / 1000)
            running.cancel()
            await asyncio.wait([running])
            left = now()
            calls = system.records("Verify", "Decode", "Draft")
            assert all(it.ended_at <= left + INSTANT for it in calls)
            await asyncio.sleep(5 * HOP_SECONDS)
            assert not any(it.running or it.sessions for it in models)
            assert not system.leftovers()


@virtually
async def test_the_planner_hears_of_each_request_that_runs_so_that_it_makes_way(monkeypatch):
    async with virtual_system(*drafters(1), *targets(1)) as system:
        told = []
        monkeypatch.setattr(system.planning.refinement, "note_request", told.append)
        for _ in range(3):
            await system.generate(strategy=pb.STRATEGY_AUTO)
        assert len(told) == 3


@virtually
async def test_after_a_request_that_was_broken_off_there_is_time_to_simulate_but_not_at_the_end():
    async with virtual_system(*drafters(1), *targets(1)) as system:
        for drains in (False, True):
            running = asyncio.ensure_future(system.generate(strategy=pb.STRATEGY_AUTO))
            beside = asyncio.ensure_future(system.generate(strategy=pb.STRATEGY_AUTO))
            await asyncio.sleep(0.1)
            if drains:
                system.servicer.drain()
            for each in (running, beside):
                each.cancel()
                await asyncio.wait([each])
            assert system.planning.refinement.count == 1


async def decode_while_targets_come(target_count, *, drafter_seconds):
    """Let two more targets come to a request of two; return those that verified."""
    models = [*drafters(1, latency_seconds=drafter_seconds), *targets(4)]
    discovery = VirtualDiscovery(*models[:3])
    wish = {} if target_count is None else {"target_count": target_count}
    async with (
        virtual_system(*models, discovery=discovery) as system,
        asyncio.TaskGroup() as tasks,
    ):
        await system.until(lambda: sum(it.ready for it in system.pool.servers) == 3)
        running = tasks.create_task(
            system.generate(strategy=pb.STRATEGY_DISTRIBUTED, max_tokens=400, **wish)
        )
        await asyncio.sleep(0.5)
        discovery.list(*models)
        stream = await running
        assert stream.token_ids == TRUTH[len(PROMPT) : len(PROMPT) + 400]
        return {
            it.server for it in system.records("Verify", "Decode")
        }, stream.finished.targets_used


@pytest.mark.parametrize(
    ("target_count", "drafter_seconds", "used"),
    [
        (1, 0.002, 1),
        (2, 0.002, 2),
        (None, 0.002, 4),
        (None, 0.012, 3),  # Equation 1: 30 ms / 12 ms
    ],
)
@virtually
async def test_a_stream_grows_with_the_targets_that_are_of_use_and_never_beyond_its_target_count(
    target_count, drafter_seconds, used
):
    servers, targets_used = await decode_while_targets_come(
        target_count, drafter_seconds=drafter_seconds
    )
    assert len(servers) == targets_used == used


# --- leaving -----------------------------------------------------------------------------------


async def say_not_serving(target, _discovery, _others):
    await target.set_serving(False)


async def be_listed_as_terminating(target, discovery, others):
    discovery.list(*others, leaving=[target])


@pytest.mark.parametrize("leave", [say_not_serving, be_listed_as_terminating])
@pytest.mark.parametrize(
    "strategy", [pb.STRATEGY_AUTOREGRESSIVE, pb.STRATEGY_SPECULATIVE, pb.STRATEGY_DISTRIBUTED]
)
@pytest.mark.parametrize("name", ["target-0", "drafter-0"])
@virtually
async def test_a_server_that_is_about_to_end_is_left_after_its_call(leave, strategy, name):
    models = [*drafters(2), *targets(3)]
    discovery = VirtualDiscovery(*models)
    leaving = next(it for it in models if it.name == name)
    async with (
        virtual_system(*models, discovery=discovery) as system,
        asyncio.TaskGroup() as tasks,
    ):
        await system.until(lambda: sum(it.ready for it in system.pool.servers) == len(models))
        running = tasks.create_task(
            system.generate(strategy=strategy, lookahead=2, target_count=2, max_tokens=300)
        )
        await asyncio.sleep(0.5)
        await leave(leaving, discovery, [it for it in models if it is not leaving])
        said = now()
        await asyncio.sleep(0.5)
        assert not running.done()
        late = [
            it
            for it in system.records("OpenSession", "Verify", "Decode", "Draft", server=name)
            if it.sent_at > said + 6 * HOP_SECONDS  # by then another session is open
        ]
        assert not late
        assert not leaving.sessions
        stream = await running
        assert stream.token_ids == TRUTH[len(PROMPT) : len(PROMPT) + 300]
        assert not stream.fallbacks


@virtually
async def test_a_target_that_is_about_to_end_is_done_without_where_there_is_no_other():
    leaving, other = targets(2)
    async with (
        virtual_system(*drafters(1), leaving, other) as system,
        asyncio.TaskGroup() as tasks,
    ):
        running = tasks.create_task(
            system.generate(
                strategy=pb.STRATEGY_DISTRIBUTED, lookahead=2, target_count=2, max_tokens=300
            )
        )
        await asyncio.sleep(0.5)
        await leaving.set_serving(False)
        await asyncio.sleep(0.1)
        assert not running.done()
        assert not leaving.sessions
        assert not (await running).fallbacks


@virtually
async def test_a_server_that_is_about_to_end_while_it_pauses_is_left_too():
    paused, other = targets(2)
    async with virtual_system(paused, other) as system, asyncio.TaskGroup() as tasks:
        running = tasks.create_task(
            system.generate(strategy=pb.STRATEGY_AUTOREGRESSIVE, max_tokens=100)
        )
        await asyncio.sleep(0.5)
        error = errors.DrainingError("it is shutting down")  # what another request met there
        system.pool.report_failure(system.server("target-0"), error, asked_at=time.monotonic())
        await paused.set_serving(False)
        await asyncio.sleep(0.1)
        assert not running.done()
        assert not paused.sessions
        assert not (await running).fallbacks


@virtually
async def test_who_listens_hears_of_a_server_that_is_listed_no_more():
    models = targets(2)
    discovery = VirtualDiscovery(*models)
    async with virtual_system(*models, discovery=discovery) as system:
        await system.until(lambda: sum(it.ready for it in system.pool.servers) == 2)
        discovery.list(models[1])
        assert await system.until(lambda: len(system.pool.servers) == 1) == 0


@virtually
async def test_the_calls_of_a_server_that_is_listed_no_more_go_elsewhere():
    models = targets(2)
    discovery = VirtualDiscovery(*models)
    async with (
        virtual_system(*models, discovery=discovery) as system,
        asyncio.TaskGroup() as tasks,
    ):
        await system.until(lambda: sum(it.ready for it in system.pool.servers) == 2)
        running = tasks.create_task(
            system.generate(strategy=pb.STRATEGY_AUTOREGRESSIVE, max_tokens=100)
        )
        await asyncio.sleep(0.5)
        discovery.list(models[1])
        stream = await running
        assert stream.token_ids == TRUTH[len(PROMPT) : len(PROMPT) + 100]
        assert stream.fallbacks == {"target_lost": 1}


def test_a_call_that_nobody_can_wait_for_any_more_does_not_keep_others_from_being_withdrawn():
    started = []

    def create_task(waiting, *, name):
        waiting.close()
        if started:
            raise RuntimeError(f"the group is shutting down: {name}")
        started.append(MagicMock())
        return started[0]

    calls = CallsInFlight(
        MagicMock(create_task=create_task),
        recorder=MagicMock(),
        pool=MagicMock(),
        decided=MagicMock(),
        logprobs=False,
        top_logprobs=0,
        likeliest=None,
        answered=MagicMock(),
        failed=MagicMock(),
    )
    session = MagicMock()
    calls.start(StartDraft(1, 0, (1, 2), max_tokens=1), session)
    with pytest.raises(RuntimeError, match="draft 2"):
        calls.start(StartDraft(2, 0, (1, 2), max_tokens=1), session)
    calls.close()
    started[0].cancel.assert_called_once_with()
