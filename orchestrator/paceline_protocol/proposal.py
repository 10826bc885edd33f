"""What is proposed to a target: a tree of tokens that may follow a prefix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["NOTHING", "Proposal"]


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that may follow a prefix: a chain, or a tree of them.

    Invariants:
        A parent comes before its children.

    Attributes:
        token_ids: The tokens.
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
