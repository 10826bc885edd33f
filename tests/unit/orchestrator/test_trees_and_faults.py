"""Servers that fail while token trees are in flight: no token is lost, and nothing is left."""

from __future__ import annotations

import asyncio

import pytest

from paceline.v1 import orchestrator_service_pb2 as pb
from support.fake_text import continuation
from support.orchestrating import PROMPT
from support.virtual_servers import drafters, targets
from support.virtual_system import virtual_system
from support.virtual_time import virtually

TOKENS = 120
STRATEGIES = [pb.STRATEGY_SPECULATIVE, pb.STRATEGY_DISTRIBUTED]


def agrees(position):
    """At each third position the drafter's second choice is the right one."""
    return position % 3 > 0


def judges_a_tree(target):
    return target.running and bool(target.calls[-1].proposal.parents)


def drafts_behind_a_runner_up(drafter):
    """Whether it drafts a tree on a text that its own chain left."""
    if not drafter.running:
        return False
    call = drafter.calls[-1].call
    end = len(drafter.prefixes[call.session_id, call.sequence])
    return any(not agrees(position) for position in range(len(PROMPT), end))


async def first_of(models, condition):
    """Return the first of these for which it holds."""
    waiting = {asyncio.ensure_future(model.until(condition)): model for model in models}
    done, pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    return waiting[done.pop()]


def generating(system, strategy):
    return asyncio.ensure_future(
        system.generate(
            strategy=strategy,
            width=3,
            branches=2,
            lookahead=3,
            target_count=3,
            max_tokens=TOKENS,
            include_timeline=True,
        )
    )


async def assert_nothing_was_lost_or_left(system, stream):
    assert stream.token_ids == continuation(PROMPT, TOKENS)
    took = stream.finished.statistics
    became = took.accepted_token_count + took.rejected_token_count + took.discarded_token_count
    assert took.drafted_token_count == became
    assert took.corrections_ahead_count > 0
    await system.settle()
    assert not system.leftovers()
    assert not any(model.running or model.sessions for model in system.models)


@pytest.mark.parametrize("comes_back", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@virtually
async def test_a_target_that_dies_over_a_tree_costs_no_token(strategy, comes_back):
    models = [*drafters(1, agrees=agrees), *targets(3)]
    async with virtual_system(*models) as system:
        running = generating(system, strategy)
        struck = await first_of(models[1:], judges_a_tree)
        call_count = len(struck.calls)
        await struck.kill()
        if comes_back:
            await struck.start()
        stream = await running
        assert stream.fallbacks["target_lost"] > 0
        survivors = [model for model in models[1:] if model is not struck]
        assert any(call.proposal.parents for model in survivors for call in model.calls)
        assert comes_back or len(struck.calls) == call_count
        await assert_nothing_was_lost_or_left(system, stream)


@pytest.mark.parametrize("strategy", STRATEGIES)
@virtually
async def test_a_drafter_that_restarts_on_a_branch_goes_on_with_trees(strategy):
    models = [*drafters(1, agrees=agrees), *targets(3)]
    drafter = models[0]
    async with virtual_system(*models) as system:
        running = generating(system, strategy)
        await drafter.until(drafts_behind_a_runner_up)
        call_count = len(drafter.calls)
        await drafter.kill()
        await drafter.start()
        stream = await running
        assert stream.fallbacks["drafter_lost"] > 0
        later = drafter.calls[call_count:]
        assert later
        assert all((it.width, it.branch_count) == (3, 2) for it in later)
        await assert_nothing_was_lost_or_left(system, stream)
