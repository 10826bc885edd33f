"""Targets' own guesses in SI and DSI: they ride along where the plan says so."""

from __future__ import annotations

import pytest

from paceline.v1 import orchestrator_service_pb2 as pb
from paceline_orchestrator.planning import planner
from support.fake_text import continuation
from support.orchestrating import PROMPT
from support.virtual_servers import drafters, targets
from support.virtual_system import virtual_system
from support.virtual_time import virtually

TOKENS = 60


@pytest.mark.parametrize("strategy", [pb.STRATEGY_SPECULATIVE, pb.STRATEGY_DISTRIBUTED])
@pytest.mark.parametrize(
    ("dispatch", "rides"),
    [(pb.DISPATCH_POLICY_WORK_CONSERVING, True), (pb.DISPATCH_POLICY_BLOCKS, False)],
)
@virtually
async def test_what_a_target_guesses_saves_forwards(dispatch, rides, strategy, monkeypatch):
    forwards = []
    for ride in (False, True):
        monkeypatch.setattr(planner, "own_guesses_are_free", lambda *_, ride=ride: ride)
        own = targets(2, self_draft_depth=3)
        async with virtual_system(*drafters(1, agrees=lambda it: it % 3 > 0), *own) as system:
            stream = await system.generate(
                max_tokens=TOKENS,
                strategy=strategy,
                lookahead=2,
                dispatch_policy=dispatch,
            )
        assert stream.token_ids == continuation(PROMPT, TOKENS)
        forwards.append(stream.finished.statistics.target_forward_count)
    without, with_guesses = forwards
    assert (with_guesses < 0.85 * without) == rides
