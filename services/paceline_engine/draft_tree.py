"""A draft that grows as a tree: the chain, its runners-up, and what follows on the likeliest."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from paceline_engine.proposal import Proposal

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["DraftTree", "Ranked"]

Ranked: TypeAlias = "Sequence[tuple[int, float]]"
"""Tokens that may stand at a place, the likeliest first, each with its probability."""


@dataclass(frozen=True, slots=True)
class DraftTree:
    """What was found so far, and what the next forward follows.

    A forward follows the chain's last token, and beside it the tokens of the largest worth that
    none has followed yet. What it finds is ordered by worth.

    Attributes:
        branch_count: How many tokens beside the chain's a forward may follow.
        found: All that was found; its parents are explicit.
        worths: Of each token: the product of the probabilities on its path.
        followed: Which of them forwards have followed, in this order.
        due: Which the next one follows, the chain's at first; none before the first forward.
    """

    branch_count: int = 0
    found: Proposal = field(default_factory=Proposal)
    worths: tuple[float, ...] = ()
    followed: tuple[int, ...] = ()
    due: tuple[int, ...] = ()

    @property
    def rows(self) -> Proposal:
        """What has been followed and is due, as a tree of its own."""
        rows = (*self.followed, *self.due)
        row_of = {index + 1: row + 1 for row, index in enumerate(rows)}
        parents = (self.found.parents[index] for index in rows)
        return Proposal(self.found.along(rows), tuple(row_of.get(each, 0) for each in parents))

    def grown(self, ranked: Sequence[Ranked]) -> DraftTree:
        """Take in what a forward found.

        Args:
            ranked: What may follow each due token, or at first the prefix; one token or more.
        """
        parents = [index + 1 for index in self.due] or [0]
        new = [
            (self._worth_of(parent) * probability, parent, token)
            for parent, own in zip(parents, ranked, strict=True)
            for token, probability in own
        ]
        # Stable, so siblings stay in their order, and the chain's token is its parent's first.
        new.sort(key=lambda each: -each[0])
        worths, new_parents, token_ids = zip(*new, strict=True)
        found = Proposal((*self.found.token_ids, *token_ids), (*self.found.parents, *new_parents))
        tip = len(self.found) + new_parents.index(parents[0])
        grown = DraftTree(
            self.branch_count, found, (*self.worths, *worths), (*self.followed, *self.due)
        )
        return grown._following(tip)

    def news_since(self, older: DraftTree) -> Proposal:
        """Return what was found since then; its parents refer to all that was found."""
        start = len(older.found)
        return Proposal(self.found.token_ids[start:], self.found.parents[start:])

    def _following(self, tip: int) -> DraftTree:
        taken = {*self.followed, tip}
        is_open = (
            index for index, worth in enumerate(self.worths) if worth > 0 and index not in taken
        )
        best = heapq.nlargest(self.branch_count, is_open, key=lambda index: self.worths[index])
        return DraftTree(self.branch_count, self.found, self.worths, self.followed, (tip, *best))

    def _worth_of(self, parent: int) -> float:
        return self.worths[parent - 1] if parent else 1.0
