"""A draft that grows as a tree: the chain, its runners-up, and what follows on the likeliest."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from paceline_engine.terms.proposal import NOTHING, Proposal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
        depths: Of each token: how many come before it on its path.
        followed: Which of them forwards have followed, in this order.
        due: Which the next one follows, the chain's at first; none before the first forward.
        rows: What has been followed and is due, as a tree of its own.

    Cost: a step takes some 0.1 ms for each thousand tokens found.
    """

    branch_count: int = 0
    _: KW_ONLY
    found: Proposal = NOTHING
    worths: tuple[float, ...] = ()
    depths: tuple[int, ...] = ()
    followed: tuple[int, ...] = ()
    due: tuple[int, ...] = ()
    rows: Proposal = NOTHING
    _open: Sequence[tuple[float, int]] = ()
    """What may be followed, with its worth below 0: sorted, so the largest is first."""
    _row_of: Mapping[int, int] = field(default_factory=lambda: {0: 0})
    """Of those in `rows`, from what parents call them in `found` to what they do there."""

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
        start = len(self.found)
        tip = start + new_parents.index(parents[0])
        followed = (*self.followed, *self.due)
        opened = [(-worth, start + n) for n, worth in enumerate(worths) if worth > 0]
        openings = sorted([*self._open, *opened])
        if (own := (-worths[tip - start], tip)) in opened:
            openings.remove(own)
        best = openings[: self.branch_count]
        found = Proposal((*self.found.token_ids, *token_ids), (*self.found.parents, *new_parents))
        due = (tip, *(index for _, index in best))
        first_row = len(followed) + 1
        return DraftTree(
            self.branch_count,
            found=found,
            worths=(*self.worths, *worths),
            depths=(*self.depths, *(self._depth_after(parent) for parent in new_parents)),
            followed=followed,
            due=due,
            rows=Proposal(
                (*self.rows.token_ids, *found.along(due)),
                (*self.rows.parents, *(self._row_of[found.parents[index]] for index in due)),
            ),
            _open=openings[self.branch_count :],
            _row_of={**self._row_of, **{index + 1: first_row + n for n, index in enumerate(due)}},
        )

    def news_since(self, older: DraftTree) -> Proposal:
        """Return what was found since then; its parents refer to all that was found."""
        start = len(older.found)
        return Proposal(self.found.token_ids[start:], self.found.parents[start:])

    def _worth_of(self, parent: int) -> float:
        return self.worths[parent - 1] if parent else 1.0

    def _depth_after(self, parent: int) -> int:
        return self.depths[parent - 1] + 1 if parent else 0
