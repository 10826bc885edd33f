"""Random token trees, and the chains that they are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_contract.proposal import Proposal

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Sequence


def random_tree(
    chance: random.Random, right: Sequence[int], *, size: int, vocabulary_size: int
) -> Proposal:
    """Grow a tree: some of what is right, and wrong tokens anywhere; parents before children."""
    token_ids: list[int] = []
    parents: list[int] = []
    depths = [0]
    # The path along what is right, as far as it has grown: its last row and its length.
    row, length = 0, 0
    for _ in range(size):
        if length < len(right) and chance.random() < 0.5:
            parent, token = row, right[length]
            row, length = len(token_ids) + 1, length + 1
        else:
            parent = chance.randint(0, len(token_ids))
            # What is right elsewhere is a likely mistake.
            near = [*right[depths[parent] : depths[parent] + 2], chance.randrange(vocabulary_size)]
            token = chance.choice(near)
            if parent == row and length < len(right) and token == right[length]:
                row, length = len(token_ids) + 1, length + 1
        if (parent, token) in zip(parents, token_ids, strict=True):
            continue
        parents.append(parent)
        token_ids.append(token)
        depths.append(depths[parent] + 1)
    return Proposal(tuple(token_ids), tuple(parents))


def chains_of(tree: Proposal) -> Iterator[tuple[int, ...]]:
    """Yield the path to each leaf, as indices."""
    for leaf in set(range(len(tree))) - {parent - 1 for parent in tree.parents}:
        yield tuple(tree.ancestors(leaf))[::-1]
