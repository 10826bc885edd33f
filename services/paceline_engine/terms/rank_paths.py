"""Static trees over ranks, which turn guesses into a proposal; and how a tree is pruned. Pure.

A *rank path* names a node by the ranks of the guesses on its way from the root: (0,) is the best
first guess, (0, 1) the second-best second guess after it. Guesses at a depth are the same under
every parent, so a set of rank paths is a whole tree, for any sequence.
"""

from __future__ import annotations

import heapq
from itertools import product
from typing import TYPE_CHECKING, TypeAlias

from paceline_contract.proposal import Proposal

if TYPE_CHECKING:
    from collections.abc import Sequence

RankPath: TypeAlias = tuple[int, ...]


def cartesian_tree(widths: Sequence[int]) -> tuple[RankPath, ...]:
    """Return the tree of all combinations, breadth first: `widths[g]` guesses at depth g + 1.

    Speculative Streaming's draft tree without its root, which is decided already: the sum over
    depths of the product of widths so far.
    """
    return tuple(
        path
        for depth in range(1, len(widths) + 1)
        for path in product(*(range(width) for width in widths[:depth]))
    )


def likeliest_tree(rates: Sequence[Sequence[float]], *, node_count: int) -> tuple[RankPath, ...]:
    """Return the tree of the nodes that are most likely accepted, as Medusa's sparse trees are.

    A node's probability is the product of the hit rates on its path, as if they were independent.
    No other tree of this size has a larger sum (tests/unit/engine/test_rank_paths.py).

    Args:
        rates: For each depth, how often each rank is right.
        node_count: How many nodes at most; nodes that are never right are left out.
    """
    chosen: list[RankPath] = []
    waiting: list[tuple[float, RankPath]] = [(-1.0, ())]
    while waiting and len(chosen) <= node_count:
        probability, path = heapq.heappop(waiting)
        chosen.append(path)
        if len(path) < len(rates):
            for rank, rate in enumerate(rates[len(path)]):
                if rate > 0:
                    heapq.heappush(waiting, (probability * rate, (*path, rank)))
    return tuple(sorted(filter(None, chosen), key=lambda path: (len(path), path)))


def likeliest_comb(rates: Sequence[Sequence[float]], *, node_count: int) -> tuple[RankPath, ...]:
    """Return the likeliest tree in which only the best guesses have guesses after them.

    Args:
        rates: For each depth, how often each rank is right where all before it were the best.
        node_count: How many nodes at most; nodes that are never right are left out.
    """
    likely: list[tuple[float, int, RankPath]] = []
    before = 1.0
    for depth, own in enumerate(rates):
        likely.extend(
            (-before * rate, depth, (*(0,) * depth, rank))
            for rank, rate in enumerate(own)
            if before * rate > 0
        )
        before *= own[0] if own else 0.0
    chosen = [path for _, _, path in sorted(likely)[:node_count]]
    return tuple(sorted(chosen, key=lambda path: (len(path), path)))


def check_tree(paths: Sequence[RankPath], *, reach: int, most_ranks: int) -> None:
    """Check that rank paths are a tree: parents before children, no node twice.

    Raises:
        ValueError: they are not; says which path is wrong.
    """
    seen: set[RankPath] = {()}
    for path in paths:
        if not path or len(path) > reach or not all(0 <= rank < most_ranks for rank in path):
            raise ValueError(f"{path} is not up to {reach} ranks in [0, {most_ranks})")
        if path in seen:
            raise ValueError(f"{path} is there twice")
        if path[:-1] not in seen:
            raise ValueError(f"{path} stands before its parent")
        seen.add(path)


def rank_counts(paths: Sequence[RankPath]) -> list[int]:
    """Count how many guesses a tree asks for at each depth."""
    counts = [0] * max(map(len, paths), default=0)
    for path in paths:
        counts[len(path) - 1] = max(counts[len(path) - 1], path[-1] + 1)
    return counts


def propose(paths: Sequence[RankPath], guesses: Sequence[Sequence[int]]) -> Proposal:
    """Put guessed tokens into a tree.

    Args:
        paths: The tree, parents before children.
        guesses: For each depth the guessed tokens, best first. Nodes that ask for more guesses than
            there are, and what hangs on them, are left out.
    """
    places: dict[RankPath, int] = {(): 0}
    token_ids: list[int] = []
    parents: list[int] = []
    for path in paths:
        depth, rank = len(path) - 1, path[-1]
        if path[:-1] in places and depth < len(guesses) and rank < len(guesses[depth]):
            token_ids.append(guesses[depth][rank])
            parents.append(places[path[:-1]])
            places[path] = len(token_ids)
    return Proposal(tuple(token_ids), tuple(parents))


def prune_by_threshold(
    parents: Sequence[int], probabilities: Sequence[float], *, threshold: float
) -> tuple[int, ...]:
    """Return the nodes to keep: likely enough after their parent, and the parent is kept, too.

    Speculative Streaming, parallel tree pruning. At threshold 0 all are kept; above 1 none.

    Args:
        parents: A proposal's, one for each node.
        probabilities: The early exit's probability of each node after its parent.
        threshold: A node of a lower probability is dropped with its whole subtree.

    Returns:
        Indices, ascending.
    """
    kept: set[int] = {0}
    for index, (parent, probability) in enumerate(zip(parents, probabilities, strict=True)):
        if parent in kept and probability >= threshold:
            kept.add(index + 1)
    return tuple(sorted(index - 1 for index in kept if index))
