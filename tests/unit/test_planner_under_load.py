"""Plans under load: DSI retreats as targets fill up, and nobody is worse off than with plain
decoding."""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_orchestrator.planning.estimates import Measurements
from paceline_orchestrator.planning.planner import Planner, Wish
from paceline_protocol.methods import Strategy

MS = 1_000_000
NODE = Measurements(
    target_step_ns=40 * MS,
    target_first_ns=60 * MS,
    drafter_step_ns=4 * MS,
    acceptance_rate=0.8,
    target_count=4,
    call_ns=MS,
    dispatch_ns=MS,
)
PLAIN, SI, DSI = Strategy.AUTOREGRESSIVE, Strategy.SPECULATIVE, Strategy.DISTRIBUTED


def plan_with(requests, *, drafting=None, node=NODE, **asked):
    loaded = replace(
        node, request_count=requests, drafting_count=requests if drafting is None else drafting
    )
    return Planner().choose(loaded, Wish(**asked))


# --- the ladder: one request, a few, as many as targets, many -----------------------------------


def test_alone_a_request_has_all_the_targets():
    plan = plan_with(1)
    assert (plan.strategy, plan.target_count) == (DSI, 4)
    assert "requests" not in plan.note


@pytest.mark.parametrize(
    ("targets", "requests", "part"),
    [(7, 1, 7), (7, 2, 4), (7, 3, 2), (7, 4, 2), (7, 5, 1), (7, 7, 1), (7, 50, 1), (1, 1, 1)],
)
def test_a_request_counts_on_its_part_of_the_targets(targets, requests, part):
    node = replace(NODE, target_count=targets, request_count=requests)
    assert node.part == part
    plan = Planner().choose(node, Wish(strategy=DSI, lookahead=1))
    assert plan.target_count == part


def test_with_a_target_for_each_request_dsi_has_retreated_to_si():
    plan = plan_with(4)
    assert (plan.strategy, plan.target_count) == (SI, 1)
    assert "4 requests on 4 target(s), 4 at the drafter" in plan.note


@pytest.mark.parametrize("requests", [8, 16, 64])
def test_where_targets_are_full_si_drafts_as_much_as_the_drafter_can_for_all(requests):
    # A round of all requests takes the targets requests x 40 / 4 ms, and the drafter
    # requests x lookahead x 4 ms.
    plan = plan_with(requests)
    assert (plan.strategy, plan.lookahead) == (SI, 2)
    tokens = 1 + 0.8 + 0.8**2
    assert plan.token_ns == pytest.approx(requests / 4 * 40 * MS / tokens)


def test_the_first_requests_leave_the_drafter_to_those_that_follow():
    assert plan_with(64, drafting=1).lookahead == plan_with(64).lookahead


def test_a_drafter_that_cannot_serve_all_drafts_one_token_for_some():
    slow = replace(NODE, drafter_step_ns=20 * MS)
    few, many = (plan_with(64, drafting=drafting, node=slow) for drafting in (20, 64))
    assert (few.strategy, few.lookahead) == (SI, 1)
    assert many.strategy is PLAIN


def test_a_second_drafter_lets_si_draft_twice_as_much():
    assert plan_with(16, drafting=8, node=replace(NODE, drafter_count=2)).lookahead == 5


def test_what_is_asked_for_is_planned_for_the_load_too():
    assert plan_with(16, strategy=SI).lookahead == 2
    asked = plan_with(16, strategy=SI, lookahead=7)
    assert asked.lookahead == 7
    assert plan_with(16, strategy=DSI).target_count == 1
    assert plan_with(2, strategy=DSI, target_count=3, lookahead=1).target_count == 3


measurements = st.builds(
    Measurements,
    target_step_ns=st.integers(1, 10**9),
    target_first_ns=st.integers(1, 10**10),
    drafter_step_ns=st.integers(1, 10**9),
    acceptance_rate=st.floats(0, 1),
    target_count=st.integers(1, 64),
    drafter_count=st.integers(0, 8),
    call_ns=st.integers(0, 10**8),
    dispatch_ns=st.integers(0, 10**8),
    request_count=st.integers(1, 500),
    drafting_count=st.integers(1, 500),
)


@given(measurements)
def test_no_plan_expects_more_than_plain_decoding_takes(load):
    planner = Planner()
    plan, plain = planner.choose(load), planner.choose(load, Wish(strategy=PLAIN))
    assert plan.token_ns <= plain.token_ns
    assert 1 <= plan.target_count <= max(1, load.part)
    assert plan.lookahead <= 64
    assert (plan.lookahead == 0) == (plan.strategy is PLAIN)


# --- what comes of it, in a model of the servers ------------------------------------------------


@dataclass
class Stream:
    """A request that decodes for ever: drafts one by one at the drafter, then its own target."""

    home: int
    lookahead: int
    missing: int = 0
    tokens: int = 0


def tokens_per_second(lookaheads, *, node, seconds=120.0, seed=5):
    """Let requests share servers that take one forward at a time, first come, first served."""
    luck = random.Random(seed)
    streams = [
        Stream(index % node.target_count, lookahead) for index, lookahead in enumerate(lookaheads)
    ]
    drafter = "drafter"
    durations = {drafter: node.drafter_step_ns / 1e9}
    waiting = {place: deque() for place in (drafter, *range(node.target_count))}
    due = []  # (when, order, server): the head of its queue is done

    def join(now, place, stream):
        waiting[place].append(stream)
        if len(waiting[place]) == 1:
            begin(now, place)

    def begin(now, place):
        end = now + durations.get(place, node.target_step_ns / 1e9)
        heapq.heappush(due, (end, luck.random(), place))

    def go_on(now, stream):
        join(now, drafter if stream.missing else stream.home, stream)

    for stream in streams:
        stream.missing = stream.lookahead
        go_on(0.0, stream)
    now = 0.0
    while now < seconds:
        now, _, place = heapq.heappop(due)
        stream = waiting[place].popleft()
        if waiting[place]:
            begin(now, place)
        if place == drafter:
            stream.missing -= 1
        else:
            accepted = 0
            while accepted < stream.lookahead and luck.random() < node.acceptance_rate:
                accepted += 1
            stream.tokens += accepted + 1
            stream.missing = stream.lookahead
        go_on(now, stream)
    return sum(stream.tokens for stream in streams) / seconds


def planned_lookaheads(requests, *, node):
    """Plan requests one after the other, as long as the load they meet is the same."""
    lookaheads, strategies = [], Counter()
    for _ in range(requests):
        drafting = 1 + strategies[SI] + strategies[DSI]
        plan = plan_with(requests, drafting=drafting, node=node)
        strategies[plan.strategy] += 1
        lookaheads.append(plan.lookahead)
    return lookaheads, strategies


@pytest.mark.parametrize("requests", [8, 16, 64])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("drafter_ms", [0.5, 4, 15, 30, 60])
def test_full_targets_serve_no_fewer_tokens_than_with_plain_decoding(requests, rate, drafter_ms):
    node = replace(NODE, drafter_step_ns=round(drafter_ms * MS), acceptance_rate=rate)
    lookaheads, strategies = planned_lookaheads(requests, node=node)
    assert not strategies[DSI]
    plain = tokens_per_second([0] * requests, node=node)
    assert plain == pytest.approx(4 / 0.040, rel=0.01)
    assert tokens_per_second(lookaheads, node=node) >= 0.99 * plain


@pytest.mark.parametrize(("drafter_ms", "gain"), [(4, 2.3), (15, 1.5), (30, 1.2)])
def test_full_targets_serve_more_tokens_as_far_as_the_drafter_goes(drafter_ms, gain):
    node = replace(NODE, drafter_step_ns=drafter_ms * MS)
    lookaheads, _ = planned_lookaheads(64, node=node)
    plain = tokens_per_second([0] * 64, node=node)
    assert tokens_per_second(lookaheads, node=node) > gain * plain
