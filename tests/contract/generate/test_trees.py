"""Generate with trees: who is asked for what, and who is not."""

from __future__ import annotations

import pytest

from paceline.v1 import orchestrator_service_pb2 as pb
from support.fake_text import continuation
from support.orchestrating import PROMPT, a_drafter, orchestrating, targets

STRATEGIES = (pb.STRATEGY_SPECULATIVE, pb.STRATEGY_DISTRIBUTED)


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_drafters_are_asked_for_trees_and_targets_are_given_them(strategy):
    async with orchestrating(drafters=[a_drafter()], targets=targets(2)) as system:
        received = await system.generate(strategy=strategy, width=3, branches=2, lookahead=2)
        assert received.token_ids == continuation(PROMPT, 24)
        assert (received.started.width, received.started.branches) == (3, 2)
        asked = {(it.width, it.branch_count) for it in system.drafters[0].calls}
        assert asked == {(3, 2)}
        judged = [it.proposal for each in system.targets for it in each.calls]
        assert any(it.parents for it in judged)
        took = received.finished.statistics
        assert took.branch_token_count > 0
        if strategy == pb.STRATEGY_SPECULATIVE:  # in DSI a target may be ahead of the drafter
            assert took.corrections_ahead_count > 0
        counts = took.accepted_token_count + took.rejected_token_count
        assert took.drafted_token_count == counts + took.discarded_token_count


async def test_the_timeline_tells_branches_from_the_chain():
    async with orchestrating(drafters=[a_drafter()], targets=targets(2)) as system:
        received = await system.generate(
            strategy=pb.STRATEGY_DISTRIBUTED, width=3, lookahead=2, include_timeline=True
        )
        told = received.finished.timeline
        drafted = [it for it in told if it.kind == pb.TIMELINE_EVENT_KIND_DRAFTED]
        assert sum(it.branch_token_count for it in drafted) > 0
        judged = [it for it in told if it.kind == pb.TIMELINE_EVENT_KIND_VERIFYING]
        rows = sum(it.branch_token_count for it in judged)
        branches = sum(it.is_branch for it in judged)
        # What was sent when the text ended is not in the timeline, nor what a branch begins with.
        assert 0 < rows <= received.finished.statistics.branch_token_count
        assert branches < len(judged)


@pytest.mark.parametrize("strategy", [*STRATEGIES, pb.STRATEGY_AUTOREGRESSIVE, pb.STRATEGY_AUTO])
async def test_servers_that_judge_no_trees_get_chains(strategy):
    async with orchestrating(
        drafters=[a_drafter()], targets=targets(1, takes_trees=False)
    ) as system:
        received = await system.generate(strategy=strategy, width=4, branches=4)
        assert received.token_ids == continuation(PROMPT, 24)
        assert (received.started.width, received.started.branches) == (1, 0)
        assert all(it.width == 1 for it in system.drafters[0].calls)


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_drafter_of_chains_is_asked_for_chains(strategy):
    async with orchestrating(drafters=[a_drafter(takes_trees=False)], targets=targets(2)) as system:
        received = await system.generate(strategy=strategy, width=3, branches=2, lookahead=2)
        assert received.token_ids == continuation(PROMPT, 24)
        assert {(it.width, it.branch_count) for it in system.drafters[0].calls} == {(1, 0)}
        assert received.finished.statistics.accepted_token_count > 0


@pytest.mark.parametrize("knows", [(True, False, False), (False, True, True)])
async def test_in_a_mixed_fleet_each_target_gets_what_it_knows(knows):
    fleet = [target for it in knows for target in targets(1, takes_trees=it)]
    async with orchestrating(drafters=[a_drafter()], targets=fleet) as system:
        received = await system.generate(
            strategy=pb.STRATEGY_DISTRIBUTED,
            width=3,
            lookahead=1,
            target_count=3,
            include_timeline=True,
        )
        assert received.token_ids == continuation(PROMPT, 24)
        told = [it for it in received.finished.timeline if it.branch_token_count]
        chains_only = {f"target-{index}" for index, it in enumerate(knows) if not it}
        assert bool(told) == (received.started.width > 1)
        assert chains_only.isdisjoint(it.server for it in told)
        for target in system.targets:
            assert target.takes_trees or not any(it.proposal.parents for it in target.calls)
