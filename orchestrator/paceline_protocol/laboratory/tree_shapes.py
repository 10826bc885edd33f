"""What token trees are worth where nothing but forwards takes time, and which tree is the best.

Speeds are over plain decoding, prefill apart, in the long run: tokens for each target forward's
time. A drafter's forward takes the part c of a target's, and finds the right token with the
acceptance rate a; of its rejections the part h has its correction among the runners-up.

    plain DSI        1 / ((1 - a) + a c)               a token waits for a target or for a drafter
    with leaves      (1 + (1 - a) h) / ((1 - a) + a c)   a hit brings one token more
    with branches    1 / ((1 - a') + a' c), a' = a + (1 - a) h   a hit is as good as an acceptance

The first is exact for lookahead 1 and enough targets, the others are bounds: rows are free, and
the last one has what follows on every runner-up drafted as soon as on the chain's token.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, TypeAlias

from paceline_protocol.laboratory.drafted_tree import DraftedTree

if TYPE_CHECKING:
    from collections.abc import Sequence

RankPath: TypeAlias = tuple[int, ...]
"""A token of a tree: at which rank each token on its path is, itself the last; 0 is the first."""

_MOST_LOOKAHEAD = 64


def distributed_speed(drafter_latency: float, acceptance_rate: float) -> float:
    """Return the speed of DSI with lookahead 1 and enough targets (Timor et al. 2024)."""
    return 1 / ((1 - acceptance_rate) + acceptance_rate * drafter_latency)


def leaves_speed(drafter_latency: float, acceptance_rate: float, *, hit_share: float) -> float:
    """Return what DSI gets at most where alternatives stand beside the chain, as leaves.

    A rejection whose correction is among them tells the token after it, too.
    """
    more = 1 + (1 - acceptance_rate) * hit_share
    return more * distributed_speed(drafter_latency, acceptance_rate)


def branching_speed(drafter_latency: float, acceptance_rate: float, *, hit_share: float) -> float:
    """Return what DSI gets at most where what follows on alternatives is verified ahead, too."""
    found = acceptance_rate + (1 - acceptance_rate) * hit_share
    return distributed_speed(drafter_latency, found)


def speculative_speed(
    drafter_latency: float, hit_rates: Sequence[float], *, branch_count: int = 0
) -> tuple[float, int]:
    """Return the speed of SI at its best lookahead, and that lookahead.

    Args:
        drafter_latency: c.
        hit_rates: How likely each token at a place is right: one for a chain, more for a tree.
        branch_count: How many tokens beside the chain's a drafter's forward follows.
    """
    speeds = (
        ((1 + worth) / (1 + lookahead * drafter_latency), lookahead)
        for lookahead, worth in enumerate(
            drafted_worths(hit_rates, branch_count=branch_count, forward_count=_MOST_LOOKAHEAD), 1
        )
    )
    return max(speeds, key=lambda each: (each[0], -each[1]))


def best_tree(hit_rates: Sequence[float], *, node_count: int, depth: int) -> list[RankPath]:
    """Return the tree of which the most is accepted in expectation, the likeliest token first.

    No token is likelier than the one before it on its path, nor than one of a smaller rank. So
    to take the likeliest of those that may be next is the optimum, as Sequoia's dynamic programme
    is (Chen et al. 2024, arXiv 2402.12374): tests/unit/protocol/test_tree_shapes.py has both.

    Args:
        hit_rates: How likely each token at a place is right, not growing with the rank.
        node_count: Tokens at most.
        depth: Tokens on a path at most, 1 or more.
    """
    tree: list[RankPath] = []
    waiting: list[tuple[float, RankPath]] = [(-hit_rates[0], (0,))]
    while waiting and len(tree) < node_count:
        worth, path = heapq.heappop(waiting)
        tree.append(path)
        *before, rank = path
        if len(path) < depth:
            heapq.heappush(waiting, (worth * hit_rates[0], (*path, 0)))
        if rank + 1 < len(hit_rates):
            sibling = (*before, rank + 1)
            heapq.heappush(waiting, (-path_worth(sibling, hit_rates), sibling))
    return tree


def path_worth(path: RankPath, hit_rates: Sequence[float]) -> float:
    """Return how likely all tokens of a path are right."""
    worth = 1.0
    for rank in path:
        worth *= hit_rates[rank]
    return worth


def drafted_worths(
    hit_rates: Sequence[float], *, branch_count: int, forward_count: int
) -> list[float]:
    """Return how many tokens of a draft tree are accepted in expectation, after each forward.

    Args:
        hit_rates: See `speculative_speed`.
        branch_count: Likewise.
        forward_count: Of the drafter.
    """
    tree, ranked = DraftedTree(branch_count), list(enumerate(hit_rates))
    total, worths = 0.0, []
    for _ in range(forward_count):
        due = tree.due
        total += sum(path_worth(tuple(tree.path_to(each)), hit_rates) for each in due)
        tree.grow([ranked] * len(due))
        worths.append(total * sum(hit_rates))
    return worths
