"""SI that drafts ahead: the same text, and no token later than if its drafter rested."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline_contract.calls import VerificationRule
from paceline_protocol.laboratory.oracles import AgreementOracle
from paceline_protocol.laboratory.simulation import ServerLatency, simulate
from paceline_protocol.laboratory.spans import SpanKind
from paceline_protocol.messages import (
    BlockVerified,
    CapacityChanged,
    StartDraft,
    StartVerify,
    StopDraft,
)
from paceline_protocol.methods import Strategy, create_method
from paceline_protocol.task import DecodingTask
from support.chains import drafted
from support.examples import examples

TOKENS = 40
# A tree that is drafted ahead was begun before its root was known, so beside the next block it may
# have fewer branches than one that is drafted anew. By so many forwards a token may be late, with
# trees, and all tokens of a few texts together by 2 %; chains are never late.
TREE_TOLERANCE = 3


def run(task, *, seed, rate, target=30, drafter=4, call=0):
    oracle = AgreementOracle(rate, seed=seed, length=len(task.prompt) + task.max_tokens)
    capacity = CapacityChanged(targets=(0,), drafters=(0,))
    method = create_method(Strategy.SPECULATIVE, task, capacity=capacity)
    result = simulate(
        method,
        oracle,
        targets=[ServerLatency(3 * target, target, call=call)],
        drafters=[ServerLatency(2 * drafter, drafter, call=call)],
    )
    # Plain decoding's text: right tokens are even.
    assert result.token_ids == [2 * (len(task.prompt) + n) for n in range(task.max_tokens)]
    return result


def task(**options):
    return DecodingTask(**{"prompt": (0, 2), "max_tokens": TOKENS, "drafts_ahead": True} | options)


@settings(max_examples=examples(200), deadline=None)
@given(
    lookahead=st.integers(1, 8),
    window=st.sampled_from([1, 3, 64]),
    rule=st.sampled_from(VerificationRule),
    rate=st.sampled_from([0.0, 0.4, 0.8, 0.95, 1.0]),
    seed=st.integers(0, 10**6),
    target=st.integers(1, 60),
    drafter=st.integers(1, 80),
    call=st.integers(0, 5),
)
def test_a_chain_is_the_same_text_and_no_token_of_it_comes_later(
    lookahead, window, rule, rate, seed, target, drafter, call
):
    ahead = task(lookahead=lookahead, draft_window=window, rule=rule)
    latencies = {"rate": rate, "seed": seed, "target": target, "drafter": drafter, "call": call}
    resting = run(replace(ahead, drafts_ahead=False), **latencies)
    drafting = run(ahead, **latencies)
    pairs = zip(resting.token_times, drafting.token_times, strict=True)
    assert all(after <= before for before, after in pairs)
    assert drafting.target_forwards <= resting.target_forwards


@pytest.mark.parametrize("rate", [0.5, 0.8, 0.95])
@pytest.mark.parametrize(("width", "branches", "tree_tokens"), [(2, 0, 64), (4, 4, 64), (4, 4, 1)])
def test_a_tree_is_the_same_text_and_hardly_a_token_comes_later(width, branches, tree_tokens, rate):
    total = rested = 0
    for seed in range(6):
        ahead = task(lookahead=4, width=width, branches=branches, tree_tokens=tree_tokens)
        resting = run(replace(ahead, drafts_ahead=False), rate=rate, seed=seed)
        drafting = run(ahead, rate=rate, seed=seed)
        pairs = zip(resting.token_times, drafting.token_times, strict=True)
        assert max(after - before for before, after in pairs) <= TREE_TOLERANCE * 30
        total += drafting.total_time
        rested += resting.total_time
    assert total < 1.02 * rested


def test_with_every_token_right_a_round_is_a_verification():
    """Ten tokens are drafted in a forward of the target, and a block and its next one are three."""
    result = run(task(lookahead=2, max_tokens=12), rate=1, seed=0, target=40)
    first = 2 * 4 + 4 + 3 * 40
    assert result.token_times == [first + 40 * (n // 3) for n in range(12)]


def test_a_drafter_slower_than_its_target_is_never_ahead():
    ahead = task(lookahead=2)
    latencies = {"rate": 0.9, "seed": 3, "target": 4, "drafter": 30}
    resting = run(replace(ahead, drafts_ahead=False), **latencies)
    assert run(ahead, **latencies).token_times == resting.token_times


def test_outcomes_drafted_ahead_are_worth_more_than_the_chain_alone():
    """With chains judged, too: what is won is the time of drafting."""
    times = {}
    for name, shape in (("chain", {}), ("corrections", {"width": 4, "branches": 4})):
        ahead = task(lookahead=4, tree_tokens=1, **shape)
        times[name] = sum(run(ahead, rate=0.63, seed=n, drafter=2).total_time for n in range(8))
    assert times["corrections"] < 0.97 * times["chain"]


def test_the_drafter_rests_only_once_it_has_drafted_to_the_end():
    result = run(task(lookahead=3, max_tokens=80), rate=0.7, seed=1)
    drafts = [span for span in result.spans if span.kind is SpanKind.DRAFT]
    replaced = [(a, b) for a, b in pairwise(drafts) if a.withdrawn]
    assert len(replaced) > 5
    assert all(after.start == before.end for before, after in replaced)


def test_a_restart_is_asked_for_with_the_verdict_itself():
    method = create_method(
        Strategy.SPECULATIVE, task(lookahead=2), capacity=CapacityChanged((0,), (0,))
    )
    (first,) = method.start()
    commands = method.handle(drafted(first.draft_id, [5, 7, 9, 11]))
    (verify,) = (each for each in commands if isinstance(each, StartVerify))
    answered = method.handle(BlockVerified(verify.verify_id, (0,), 8))
    assert StopDraft(first.draft_id) in answered
    (anew,) = (each for each in answered if isinstance(each, StartDraft))
    assert anew.prefix == (0, 2, 5, 8)


def test_the_text_is_not_asked_ahead_since_it_takes_no_time():
    servers = CapacityChanged((0,), (0,), text=0)
    method = create_method(Strategy.SPECULATIVE, task(lookahead=2), capacity=servers)
    (first,) = method.start()
    assert first.max_tokens == 2
    commands = method.handle(drafted(first.draft_id, [4, 6]))
    assert [type(each) for each in commands] == [StartVerify]
