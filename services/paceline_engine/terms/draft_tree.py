"""A draft that grows as a tree: a chain, its runners-up, and branches after likely tokens."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from paceline_contract.proposal import NOTHING, Proposal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Ranked: TypeAlias = "Sequence[tuple[int, float]]"
"""The likeliest tokens at a position, each with its probability, in descending order."""


@dataclass(frozen=True, slots=True)
class DraftTree:
    """The tokens that were found so far, and the tokens that the next forward extends.

    A token's *path probability* is the product of the probabilities on its path. A forward extends
    the chain's last token, and beside it the tokens of the largest path probability that no forward
    has extended yet. The tokens that it finds are ordered by path probability.

    Attributes:
        branch_count: How many tokens beside the chain's a forward may extend.
        found: All tokens that were found; its parents are explicit.
        path_probabilities: The path probability of each token.
        depths: How many tokens come before each token on its path.
        followed: The tokens that forwards have extended, in this order.
        due: The tokens that the next forward extends, the chain's first; none before the first
            forward.
        rows: The tokens in `followed` and `due`, as a tree of their own.

    Cost: a step takes some 0.1 ms for each thousand tokens found.
    """

    branch_count: int = 0
    _: KW_ONLY
    found: Proposal = NOTHING
    path_probabilities: tuple[float, ...] = ()
    depths: tuple[int, ...] = ()
    followed: tuple[int, ...] = ()
    due: tuple[int, ...] = ()
    rows: Proposal = NOTHING
    _open: Sequence[tuple[float, int]] = ()
    """(-path probability, index) of each token that may be extended, in ascending order."""
    _row_of: Mapping[int, int] = field(default_factory=lambda: {0: 0})
    """For each token in `rows`: its number as a parent in `found` -> its number in `rows`."""

    def grown(self, ranked: Sequence[Ranked]) -> DraftTree:
        """Return the tree with the tokens that a forward found.

        Args:
            ranked: For each due token (at first for the prefix) one or more tokens that may follow.
        """
        parents = [index + 1 for index in self.due] or [0]
        new = [
            (self._path_probability(parent) * probability, parent, token)
            for parent, own in zip(parents, ranked, strict=True)
            for token, probability in own
        ]
        # Stable, so siblings stay in their order, and the chain's token is its parent's first.
        new.sort(key=lambda found: -found[0])
        path_probabilities, new_parents, token_ids = zip(*new, strict=True)
        start = len(self.found)
        tip = start + new_parents.index(parents[0])
        followed = (*self.followed, *self.due)
        opened = [
            (-path_probability, start + n)
            for n, path_probability in enumerate(path_probabilities)
            if path_probability > 0
        ]
        openings = sorted([*self._open, *opened])
        if (own := (-path_probabilities[tip - start], tip)) in opened:
            openings.remove(own)
        best = openings[: self.branch_count]
        found = Proposal((*self.found.token_ids, *token_ids), (*self.found.parents, *new_parents))
        due = (tip, *(index for _, index in best))
        first_row = len(followed) + 1
        return DraftTree(
            self.branch_count,
            found=found,
            path_probabilities=(*self.path_probabilities, *path_probabilities),
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
        """Return the tokens found since an older tree; their parents refer to all of `found`."""
        start = len(older.found)
        return Proposal(self.found.token_ids[start:], self.found.parents[start:])

    def _path_probability(self, parent: int) -> float:
        return self.path_probabilities[parent - 1] if parent else 1.0

    def _depth_after(self, parent: int) -> int:
        return self.depths[parent - 1] + 1 if parent else 0
