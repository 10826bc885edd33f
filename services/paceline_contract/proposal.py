"""What is proposed to a target: a tree of tokens that may follow a prefix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Sequence


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that may follow a prefix: a chain, or a tree of them.

    Invariants:
        A parent comes before its children.

    Attributes:
        parents: Empty for a chain, in which each token follows on the one before. For a tree one
            for each token: 0 where it follows the prefix, i + 1 where it follows the i-th token.
        distributions: Under rejection sampling one for each token, opaque here: what it was drawn
            from. Else empty.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    distributions: tuple[object, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        """Whether each token follows on the one before."""
        return not self.parents or self.parents == tuple(range(len(self.token_ids)))

    @property
    def trunk(self) -> tuple[int, ...]:
        """Which tokens are its chain's: indices of the first child of each, from the prefix on."""
        if not self.parents:
            return tuple(range(len(self.token_ids)))
        first: dict[int, int] = {}
        for index, parent in enumerate(self.parents):
            first.setdefault(parent, index)
        path = []
        place = 0
        while place in first:
            path.append(first[place])
            place = first[place] + 1
        return tuple(path)

    @property
    def branch_count(self) -> int:
        """How many tokens are beside the chain."""
        return len(self.token_ids) - len(self.trunk)

    @property
    def all_parents(self) -> Sequence[int]:
        """The parents, also of a chain."""
        return self.parents or range(len(self.token_ids))

    def only(self, kept: Sequence[int]) -> Proposal:
        """Return the proposal of these tokens, ascending; each has its parent among them."""
        place = {0: 0} | {index + 1: number for number, index in enumerate(kept, start=1)}
        parents = tuple(place[self.all_parents[index]] for index in kept)
        part = Proposal(self.along(kept), parents)
        return Proposal(part.token_ids) if part.is_chain else part

    def useful_part(self, *, longest: int, end_ids: Container[int]) -> Proposal:
        """Leave out what comes after an end id, and paths' tokens beyond so many."""
        depths: list[int] = []  # 0: left out
        for parent in self.all_parents:
            before = depths[parent - 1] if parent else 0
            is_open = not parent or (before > 0 and self.token_ids[parent - 1] not in end_ids)
            depths.append(before + 1 if is_open and before < longest else 0)
        return self.only([index for index, depth in enumerate(depths) if depth])

    def beside(self, other: Proposal) -> Proposal:
        """Return the tree of this one, and behind it what of another's tokens it does not have."""
        token_ids, parents = [*self.token_ids], [*self.all_parents]
        rows = {place: row for row, place in enumerate(zip(parents, token_ids, strict=True), 1)}
        own = [0]
        for parent, token_id in zip(other.all_parents, other.token_ids, strict=True):
            place = (own[parent], token_id)
            if place not in rows:
                parents.append(place[0])
                token_ids.append(token_id)
                rows[place] = len(token_ids)
            own.append(rows[place])
        both = Proposal(tuple(token_ids), tuple(parents))
        return Proposal(both.token_ids) if both.is_chain else both

    def along(self, path: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens at these indices: a path, root first."""
        return tuple(self.token_ids[index] for index in path)

    def leads_along(self, path: Sequence[int]) -> bool:
        """Whether these are indices of a path, root first."""
        before = 0
        for index in path:
            if not 0 <= index < len(self.token_ids):
                return False
            if (self.parents[index] if self.parents else index) != before:
                return False
            before = index + 1
        return True


NOTHING = Proposal()
