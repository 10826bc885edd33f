"""What token trees are worth to SI where nothing but forwards takes time.

Speeds are over plain decoding, prefill apart, in the long run: tokens for each target forward's
time. A drafter's forward takes the part c of a target's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from paceline_protocol.laboratory.drafted_tree import DraftedTree

if TYPE_CHECKING:
    from collections.abc import Sequence

RankPath: TypeAlias = tuple[int, ...]
"""A token of a tree: at which rank each token on its path is, itself the last; 0 is the first."""

_MOST_LOOKAHEAD = 64


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
        forward_count: How many forwards the drafter computes.
    """
    tree, ranked = DraftedTree(branch_count), list(enumerate(hit_rates))
    total, worths = 0.0, []
    for _ in range(forward_count):
        due = tree.due
        total += sum(path_worth(tuple(tree.path_to(each)), hit_rates) for each in due)
        tree.grow([ranked] * len(due))
        worths.append(total * sum(hit_rates))
    return worths
