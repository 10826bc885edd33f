"""Plans under load: DSI retreats as targets fill up, and nobody is worse off than with plain
decoding."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_orchestrator.fleet.row_prices import RowPrices
from paceline_orchestrator.planning.measurements import Measurements
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


# --- forwards that are shared -------------------------------------------------------------------


def sharing(row_ms, *, step_ms=40.0):
    """Forwards of all calls that wait, with a price for each row beyond the first."""
    return RowPrices(((1, 1.0), (101, 1.0 + 100 * row_ms / step_ms)), shares_forwards=True)


def shared_node(*, row_ms=0.2, drafter_row_ms=0.02, node=NODE):
    return replace(
        node,
        target_prices=sharing(row_ms),
        drafter_prices=sharing(drafter_row_ms, step_ms=node.drafter_step_ns / MS),
    )


def test_while_rows_are_nearly_free_everybody_speculates_however_many_there_are():
    for requests in (1, 4, 16, 64):
        assert plan_with(requests, node=shared_node(drafter_row_ms=0)).strategy is not PLAIN
    assert plan_with(64, node=shared_node(drafter_row_ms=0)).lookahead >= 4


def test_as_rows_become_dear_blocks_become_shorter_and_then_there_are_none():
    lookaheads = [
        plan_with(64, node=shared_node(row_ms=row_ms, drafter_row_ms=0)).lookahead
        for row_ms in (0, 0.5, 1, 2, 8)
    ]
    assert lookaheads == sorted(lookaheads, reverse=True)
    assert lookaheads[0] >= 6
    assert lookaheads[-1] == 0


def test_a_price_for_rows_that_one_request_pays_alone_counts_as_well():
    dear = replace(NODE, target_prices=RowPrices(((1, 1.0), (5, 3.0))), target_count=1)
    assert plan_with(1, node=dear, strategy=SI).lookahead < plan_with(1, strategy=SI).lookahead
    nothing = replace(dear, target_prices=RowPrices(((1, 1.0), (2, 3.0))))
    assert plan_with(1, node=nothing).strategy is PLAIN


@given(measurements, st.floats(0, 1), st.floats(0, 1), st.booleans())
def test_no_plan_expects_more_where_forwards_are_shared(load, price, drafter_price, shares):
    load = replace(
        load,
        target_prices=RowPrices(((1, 1.0), (2, 1.0 + price)), shares_forwards=True),
        drafter_prices=RowPrices(((1, 1.0), (2, 1.0 + drafter_price)), shares_forwards=shares),
    )
    planner = Planner()
    plan, plain = planner.choose(load), planner.choose(load, Wish(strategy=PLAIN))
    assert plan.token_ns <= plain.token_ns


# --- what comes of it, in a model of the servers ------------------------------------------------


@dataclass
class Stream:
    """A request that decodes for ever: drafts one by one at the drafter, then its own target."""

    target: int
    lookahead: int
    missing: int = 0
    tokens: int = 0


class Servers:
    """Targets and a drafter. A forward takes one call or, where they are shared, all that wait.

    Who decodes plainly waits again as soon as a forward has ended, before the next begins.
    """

    def __init__(self, node, *, seed=5):
        self._node = node
        self._luck = random.Random(seed)
        self._waiting = {place: [] for place in ("drafter", *range(node.target_count))}
        self._running = {}
        self._due = []  # (when, order, server): its forward is done

    def run(self, streams, *, seconds):
        for stream in streams:
            self._begin_round(stream)
        now = 0.0
        while now < seconds:
            for place in [it for it in self._waiting if it not in self._running]:
                self._begin_forward(now, place)
            now, _, place = heapq.heappop(self._due)
            for stream in self._running.pop(place):
                self._go_on(stream, place)

    def _begin_round(self, stream):
        stream.missing = stream.lookahead
        self._waiting["drafter" if stream.missing else stream.target].append(stream)

    def _begin_forward(self, now, place):
        node, is_drafter = self._node, place == "drafter"
        prices = node.drafter_prices if is_drafter else node.target_prices
        waiting = self._waiting[place]
        running = waiting[: len(waiting) if prices.shares_forwards else 1]
        if not running:
            return
        del waiting[: len(running)]
        rows = sum(1 if is_drafter else 1 + it.lookahead for it in running)
        step_ns = node.drafter_step_ns if is_drafter else node.target_step_ns
        self._running[place] = running
        end = now + step_ns / 1e9 * prices.of(rows)
        heapq.heappush(self._due, (end, self._luck.random(), place))

    def _go_on(self, stream, place):
        if place == "drafter":
            stream.missing -= 1
            self._waiting["drafter" if stream.missing else stream.target].append(stream)
            return
        accepted = 0
        while accepted < stream.lookahead and self._luck.random() < self._node.acceptance_rate:
            accepted += 1
        stream.tokens += accepted + 1
        self._begin_round(stream)


def tokens_per_second(lookaheads, *, node, seconds=60.0):
    """Let requests share servers, first come, first served."""
    streams = [
        Stream(index % node.target_count, lookahead) for index, lookahead in enumerate(lookaheads)
    ]
    Servers(node).run(streams, seconds=seconds)
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


@pytest.mark.parametrize("requests", [5, 16, 64])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("drafter_ms", [0.5, 4, 15])
@pytest.mark.parametrize("row_ms", [0, 0.2, 1, 5])
def test_shared_forwards_serve_no_fewer_tokens_than_with_plain_decoding(
    requests, rate, drafter_ms, row_ms
):
    node = replace(NODE, drafter_step_ns=round(drafter_ms * MS), acceptance_rate=rate)
    node = shared_node(node=node, row_ms=row_ms, drafter_row_ms=row_ms * drafter_ms / 40)
    lookaheads, strategies = planned_lookaheads(requests, node=node)
    assert not strategies[DSI]
    plain = tokens_per_second([0] * requests, node=node, seconds=10)
    assert tokens_per_second(lookaheads, node=node, seconds=10) >= 0.99 * plain


def test_shared_forwards_serve_half_as_many_again_where_rows_are_nearly_free():
    node = shared_node()
    lookaheads, _ = planned_lookaheads(64, node=node)
    plain = tokens_per_second([0] * 64, node=node, seconds=10)
    assert tokens_per_second(lookaheads, node=node, seconds=10) > 1.5 * plain
