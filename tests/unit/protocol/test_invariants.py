"""The protocol's invariants under arbitrary interleavings, losses, duplicates and faults."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from paceline_contract.calls import VerificationRule
from paceline_protocol.messages import (
    Command,
    FinishReason,
    StartVerify,
)
from paceline_protocol.methods import METHODS, Strategy
from paceline_protocol.task import DecodingTask, DispatchPolicy
from unit.protocol.world import Models, Weather, run_world

tasks = st.builds(
    DecodingTask,
    prompt=st.sampled_from([(1,), (3, 2, 1), (0, 0)]),
    max_tokens=st.integers(0, 30),
    eos_ids=st.sampled_from([frozenset(), frozenset({0})]),
    lookahead=st.integers(1, 6),
    rule=st.sampled_from(VerificationRule),
    dispatch=st.sampled_from(DispatchPolicy),
    draft_window=st.sampled_from([1, 3, 8, 64]),
    broadcast_prefill=st.booleans(),
    keep_prefill=st.booleans(),
    drafts_ahead=st.booleans(),
)
trees = st.builds(
    replace,
    tasks.map(lambda task: replace(task, rule=VerificationRule.EXACT)),
    width=st.integers(2, 4),
    branches=st.sampled_from([0, 0, 1, 3]),
    tree_tokens=st.sampled_from([2, 8, 64]),
    tree_depth=st.sampled_from([1, 3, 64]),
)
guessing = st.builds(
    replace,
    tasks.map(lambda task: replace(task, rule=VerificationRule.EXACT)) | trees,
    own_guesses=st.just(True),
    tree_tokens=st.sampled_from([0, 2, 8, 64]),
)
weathers = st.builds(
    Weather,
    drafter_weight=st.sampled_from([0.1, 1.0, 5.0]),
    target_weight=st.just(1.0),
    failure=st.sampled_from([0.0, 0.05, 0.3]),
    ghosts=st.sampled_from([0.0, 0.1]),
    capacity_change=st.sampled_from([0.0, 0.02, 0.2]),
)
models = st.builds(
    Models, seed=st.integers(0, 10**9), agreement=st.sampled_from([0.0, 0.5, 0.8, 0.95, 1.0])
)


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    strategy=st.sampled_from(
        [Strategy.DISTRIBUTED] * 4 + [Strategy.SPECULATIVE] * 2 + list(METHODS)
    ),
    task=tasks,
    models=models,
    weather=weathers,
    seed=st.integers(0, 10**9),
    target_count=st.integers(1, 3),
    drafter_count=st.integers(0, 2),
    text=st.booleans(),
)
# A chain beside the main path assumed a token, and then the main path took that token over.
@example(
    strategy=Strategy.DISTRIBUTED,
    task=DecodingTask(
        prompt=(3, 2, 1),
        max_tokens=16,
        lookahead=6,
        draft_window=8,
        broadcast_prefill=True,
        keep_prefill=False,
        drafts_ahead=False,
    ),
    models=Models(seed=1132863, agreement=0.8),
    weather=Weather(drafter_weight=5.0, failure=0.3, ghosts=0.1),
    seed=544985,
    target_count=3,
    drafter_count=2,
    text=True,
)
# What the text had found after a token was judged before the drafter found that token, too.
@example(
    strategy=Strategy.DISTRIBUTED,
    task=DecodingTask(prompt=(1,), max_tokens=19, lookahead=2, draft_window=3),
    models=Models(seed=85, agreement=0.8),
    weather=Weather(),
    seed=0,
    target_count=2,
    drafter_count=1,
    text=True,
)
# The text's token was judged, was withdrawn, and was assumed by a block when the root came to it.
@example(
    strategy=Strategy.DISTRIBUTED,
    task=DecodingTask(
        prompt=(0, 0),
        max_tokens=11,
        lookahead=3,
        rule=VerificationRule.REJECTION,
        draft_window=3,
        broadcast_prefill=True,
    ),
    models=Models(seed=0, agreement=0.0),
    weather=Weather(
        drafter_weight=5.0,
        failure=0.0,
        ghosts=0.0,
        short_verdicts=0.0,
        capacity_change=0.0,
    ),
    seed=27,
    target_count=2,
    drafter_count=1,
    text=True,
)
# What follows a token was told while the token itself waited for a verdict that none could join.
@example(
    strategy=Strategy.DISTRIBUTED,
    task=DecodingTask(
        prompt=(1,),
        max_tokens=20,
        lookahead=1,
        rule=VerificationRule.REJECTION,
        draft_window=3,
    ),
    models=Models(seed=0, agreement=0.0),
    weather=Weather(drafter_weight=0.1, failure=0.3, capacity_change=0.2),
    seed=1,
    target_count=2,
    drafter_count=2,
    text=True,
)
def test_the_invariants_hold_whatever_the_weather(strategy, task, **world):
    run_world(strategy, task, **world)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(task=tasks, models=models, seed=st.integers(0, 10**9), target_count=st.integers(2, 3))
# A drafter rested, a verdict cut its chain, and what was left of it lost its verification.
@example(
    task=DecodingTask(prompt=(1,), max_tokens=22, lookahead=4, draft_window=8),
    models=Models(seed=14, agreement=0.5),
    seed=2851,
    target_count=3,
)
def test_the_invariants_hold_with_three_models_and_disagreeing_drafters(task, **world):
    weather = Weather(drafter_weight=3.0, failure=0.02)
    run_world(Strategy.DISTRIBUTED, task, weather=weather, drafter_count=2, **world)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    strategy=st.sampled_from([Strategy.DISTRIBUTED, Strategy.SPECULATIVE]),
    task=trees,
    models=models,
    weather=weathers,
    seed=st.integers(0, 10**9),
    target_count=st.integers(1, 3),
    drafter_count=st.integers(1, 2),
    text=st.booleans(),
)
# A branch that a target had judged became a chain: what it led to has to be in the chain, too.
@example(
    strategy=Strategy.DISTRIBUTED,
    task=DecodingTask(
        prompt=(1,),
        max_tokens=12,
        lookahead=2,
        draft_window=1,
        broadcast_prefill=True,
        width=3,
        tree_tokens=2,
        tree_depth=1,
    ),
    models=Models(seed=4154, agreement=0.0),
    weather=Weather(failure=0.0, ghosts=0.0, short_verdicts=0.0, capacity_change=0.0),
    seed=1,
    target_count=3,
    drafter_count=2,
    text=True,
)
def test_the_invariants_hold_with_trees(strategy, task, weather, **world):
    run_world(strategy, task, weather=replace(weather, short_verdicts=0.1), **world)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    strategy=st.sampled_from([Strategy.DISTRIBUTED, Strategy.SPECULATIVE]),
    task=guessing,
    models=models,
    weather=weathers,
    seed=st.integers(0, 10**9),
    target_count=st.integers(1, 3),
    drafter_count=st.integers(0, 2),
    text=st.booleans(),
)
def test_the_invariants_hold_with_targets_own_guesses(strategy, task, weather, **world):
    run_world(strategy, task, weather=replace(weather, short_verdicts=0.1), **world)


@pytest.mark.parametrize("rule", VerificationRule)
@pytest.mark.parametrize("strategy", METHODS)
def test_a_stop_after_any_event_leaves_nothing_in_flight(strategy, rule):
    task = DecodingTask((1,), 12, lookahead=2, rule=rule, broadcast_prefill=True, drafts_ahead=True)
    for stop_after in range(40):
        world = run_world(
            strategy, task, models=Models(7, 0.8), drafter_count=2, stop_after=stop_after
        )
        if world.method.finish is not FinishReason.STOPPED:
            break
    assert world.method.finish is FinishReason.LENGTH
    assert stop_after > 3


def test_the_worlds_see_everything_there_is_to_see():
    """The properties above would hold for a method that does nothing clever."""
    seen: Counter[type[Command]] = Counter()
    overlap = accepted = rejected = 0
    for seed in range(40):
        world = run_world(
            Strategy.DISTRIBUTED,
            DecodingTask((1,), 30, lookahead=2),
            models=Models(seed, 0.8),
            weather=Weather(drafter_weight=3.0),
            seed=seed,
            target_count=3,
            drafter_count=2,
        )
        plain = run_world(
            Strategy.AUTOREGRESSIVE,
            DecodingTask((1,), 30, draft_window=7),
            models=Models(seed, 0.8),
            weather=Weather(capacity_change=0.2),
            seed=seed,
        )
        seen += world.method.command_counts + plain.method.command_counts
        overlap = max(overlap, world.overlap)
        accepted += world.method.method.statistics.accepted
        rejected += world.method.method.statistics.rejected
    assert all(seen[kind] > 20 for kind in get_args(Command)), seen
    assert overlap == 3
    assert min(accepted, rejected) > 100


def test_the_worlds_have_trees_of_a_targets_own():
    widths, accepted, rejected = set(), 0, 0
    for seed in range(20):
        world = run_world(
            Strategy.SELF_SPECULATIVE,
            DecodingTask((1,), 30),
            models=Models(seed, 0.8),
            weather=Weather(failure=0.05, capacity_change=0.05),
            seed=seed,
        )
        statistics = world.method.method.statistics
        widths |= world.widths
        accepted += statistics.accepted
        rejected += statistics.rejected
    assert {0, 1, 2, 4} <= widths
    assert min(accepted, rejected) > 50


def test_with_no_drafter_it_decodes_plainly():
    world = run_world(
        Strategy.DISTRIBUTED, DecodingTask((1,), 9), models=Models(1, 0.5), drafter_count=0
    )
    assert world.method.command_counts[StartVerify] == 9
