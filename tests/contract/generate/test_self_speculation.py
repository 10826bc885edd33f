"""Targets that draft for themselves: asked by name, and what is said where there are none."""

from __future__ import annotations

import asyncio

import pytest

from paceline.errors import UnsupportedError
from paceline.v1 import orchestrator_service_pb2 as pb
from paceline.v1 import sampling_pb2
from paceline_contract.calls import VerificationRule
from support.fake_text import continuation
from support.orchestrating import PROMPT, orchestrating, targets

SELF = pb.STRATEGY_SELF_SPECULATIVE


def mostly(position):
    return position % 5 != 0


async def test_a_targets_own_guesses_change_nothing_but_the_number_of_calls():
    async with orchestrating(targets=targets(1, self_draft_depth=3, agrees=mostly)) as system:
        received = await system.generate(strategy=SELF, include_timeline=True)
        assert received.token_ids == continuation(PROMPT, 24)
        assert received.started.strategy == SELF
        took = received.finished.statistics
        assert took.target_forward_count <= 12
        assert took.accepted_token_count >= 12
        assert took.rejected_token_count
        assert took.drafted_token_count == (
            took.accepted_token_count + took.rejected_token_count + took.discarded_token_count
        )
        origins = [origin for chunk in received.chunks for origin in chunk.origins]
        assert origins.count(pb.TOKEN_ORIGIN_ACCEPTED_DRAFT) == took.accepted_token_count
        assert not took.cancelled_rpc_count
        await system.settled()


async def test_of_several_targets_one_is_used_that_drafts_for_itself():
    plain, drafting = targets(2), targets(1, self_draft_depth=3)
    async with orchestrating(targets=[*plain, *drafting]) as system:
        for _ in range(5):
            received = await system.generate(strategy=SELF)
            assert received.token_ids == continuation(PROMPT, 24)
        assert drafting[0].calls
        assert not any(target.calls for target in plain)


async def test_guesses_of_a_target_that_is_lost_are_judged_by_another_one():
    plain, drafting = targets(1), targets(1, self_draft_depth=3)
    async with orchestrating(targets=[*plain, *drafting]) as system:
        generating = asyncio.create_task(system.generate(strategy=SELF))
        await drafting[0].until(lambda it: len(it.calls) > 2)
        await drafting[0].kill()
        received = await generating
        assert received.token_ids == continuation(PROMPT, 24)
        assert received.fallbacks["target_lost"]
        assert plain[0].calls


async def test_where_no_target_drafts_for_itself_it_is_refused_by_its_name():
    async with orchestrating(targets=targets(1)) as system:
        with pytest.raises(UnsupportedError, match="no target of this model drafts for itself"):
            await system.generate(strategy=SELF)


async def test_it_is_refused_under_rejection_sampling():
    models = targets(1, self_draft_depth=3, rules=tuple(VerificationRule))
    async with orchestrating(targets=models) as system:
        with pytest.raises(UnsupportedError, match="EXACT"):
            await system.generate(
                strategy=SELF,
                verification_rule=sampling_pb2.VERIFICATION_RULE_REJECTION,
                sampling=sampling_pb2.SamplingParameters(temperature=0.7),
            )


# Where there is none, and no drafter, the text itself may draft.
@pytest.mark.parametrize(("depth", "strategy"), [(8, SELF), (0, pb.STRATEGY_SPECULATIVE)])
async def test_auto_takes_it_where_it_pays_and_there_is_one(depth, strategy):
    async with orchestrating(targets=targets(1, self_draft_depth=depth)) as system:
        received = await system.generate()
        assert received.started.strategy == strategy
        assert received.token_ids == continuation(PROMPT, 24)
        assert ("self-SI" in received.started.plan_note) == bool(depth)
