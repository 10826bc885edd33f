"""Drafting from the text itself: alone, while a drafter is away, and beyond it."""

from __future__ import annotations

import pytest

from paceline import errors
from paceline.v1 import orchestrator_service_pb2 as pb
from paceline_orchestrator.planning.planner import DrafterKind
from support.fake_text import continuation
from support.orchestrating import PROMPT, STRATEGIES, a_drafter, orchestrating, targets

SPECULATIVE = STRATEGIES[1:]
PERIOD = 8
COUNT = 48


def repeats(text):
    return text[-PERIOD]


EXPECTED = [PROMPT[-PERIOD + index % PERIOD] for index in range(COUNT)]


def repeating(count, **settings):
    found = targets(count, **settings)
    for target in found:
        target.token_after = repeats
    return found


def of_max_gram(received):
    return [
        event.token_ids
        for event in received.finished.timeline
        if event.server == "max-gram" and event.kind == pb.TIMELINE_EVENT_KIND_DRAFTED
    ]


@pytest.mark.parametrize("strategy", SPECULATIVE)
async def test_without_a_drafter_a_text_that_repeats_takes_few_forwards(strategy):
    async with orchestrating(targets=repeating(2)) as system:
        received = await system.generate(
            strategy=strategy,
            drafter=pb.DRAFTER_KIND_MAX_GRAM,
            max_tokens=COUNT,
            lookahead=5,
            include_timeline=True,
        )
        assert received.token_ids == EXPECTED
        took = received.finished.statistics
        # The first ones come before the period has been seen once; then 5 and one for each.
        assert took.target_forward_count < COUNT / 2
        assert took.max_gram_accepted_token_count == took.accepted_token_count > COUNT / 2
        assert took.max_gram_drafted_token_count == took.drafted_token_count
        assert sum(map(len, of_max_gram(received))) == took.max_gram_drafted_token_count
        assert not took.drafter_forward_count
        assert not received.fallbacks, "nothing was missing"


@pytest.mark.parametrize("kind", [None, *DrafterKind])
@pytest.mark.parametrize("strategy", SPECULATIVE)
async def test_whoever_drafts_the_tokens_are_the_same(strategy, kind):
    word = f"DRAFTER_KIND_{kind.name if kind else 'UNSPECIFIED'}"
    async with orchestrating(drafters=[a_drafter()], targets=targets(3)) as system:
        received = await system.generate(
            strategy=strategy, drafter=pb.DrafterKind.Value(word), lookahead=2
        )
        assert received.token_ids == continuation(PROMPT, 24)
        took = received.finished.statistics
        asked_server = kind is None or kind.has_servers
        assert bool(took.drafter_forward_count) == asked_server
        assert bool(system.drafters[0].opened) == asked_server


async def test_beside_a_drafter_max_gram_goes_on_for_targets_that_would_idle():
    drafter = a_drafter()
    drafter.token_after = repeats
    async with orchestrating(drafters=[drafter], targets=repeating(3)) as system:
        received = await system.generate(
            strategy=pb.STRATEGY_DISTRIBUTED,
            drafter=pb.DRAFTER_KIND_SERVER_AND_MAX_GRAM,
            lookahead=8,
            max_tokens=COUNT,
            include_timeline=True,
        )
        assert received.token_ids == EXPECTED
        assert of_max_gram(received)
        assert received.finished.statistics.max_gram_accepted_token_count


@pytest.mark.parametrize("strategy", SPECULATIVE)
async def test_a_server_alone_means_no_guessing(strategy):
    async with orchestrating(targets=repeating(1)) as system:
        received = await system.generate(
            strategy=strategy, drafter=pb.DRAFTER_KIND_SERVER, max_tokens=COUNT
        )
        assert received.token_ids == EXPECTED
        assert not received.finished.statistics.drafted_token_count


async def test_auto_guesses_where_there_is_no_drafter_as_long_as_that_pays():
    async with orchestrating(targets=targets(1)) as system:
        for _ in range(40):
            received = await system.generate()
            assert received.token_ids == continuation(PROMPT, 24)
            if received.started.strategy == pb.STRATEGY_AUTOREGRESSIVE:
                break
        assert "SI" in received.started.plan_note, "it says what guessing promised"
    # Slow enough that a call, which a machine at work makes dear, is a small part of a forward.
    async with orchestrating(targets=repeating(1, latency_seconds=0.03)) as system:
        for _ in range(3):
            received = await system.generate(max_tokens=COUNT)
        assert received.started.strategy == pb.STRATEGY_SPECULATIVE
        assert "the text itself" in received.started.plan_note


async def test_an_unknown_drafter_is_refused():
    async with orchestrating(targets=targets(1)) as system:
        with pytest.raises(errors.InvalidFieldError, match="drafter"):
            await system.generate(drafter=17)
