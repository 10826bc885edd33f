"""What may follow a prefix: a chain of tokens, or a tree of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


@dataclass(frozen=True, slots=True)
class SparseDistribution:
    """A distribution with a short list of possible tokens; probabilities sum to 1 within 1e-4."""

    token_ids: Sequence[int]
    probabilities: Sequence[float]


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that may follow a prefix; see proposal.proto.

    Attributes:
        token_ids: The tokens; a parent comes before its children.
        parents: Empty for a chain. Else one for each token: 0 where it follows the prefix, i + 1
            where it follows the i-th token.
        distributions: Under REJECTION one for each token: what it was drawn from. Else empty.
    """

    token_ids: Sequence[int] = ()
    parents: Sequence[int] = ()
    distributions: Sequence[SparseDistribution] = ()

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        """Whether each token follows the one before."""
        return not self.parents or all(parent == place for place, parent in enumerate(self.parents))

    @property
    def depth(self) -> int:
        """How many tokens its longest path has."""
        return max(self.depths(), default=-1) + 1 if self.parents else len(self.token_ids)

    def depths(self) -> list[int]:
        """Count how many tokens come before each on its path."""
        depths: list[int] = []
        for parent in self._all_parents:
            depths.append(depths[parent - 1] + 1 if parent else 0)
        return depths

    def ancestors(self, index: int) -> Iterator[int]:
        """Yield a token's index, its parent's, and so on up to the prefix."""
        parents = self._all_parents
        row = index + 1
        while row:
            yield row - 1
            row = parents[row - 1]

    def only(self, kept: Sequence[int]) -> Proposal:
        """Return the tree of these tokens alone, ascending; each has its parent among them."""
        rows = {0: 0} | {index + 1: row for row, index in enumerate(kept, start=1)}
        parents = self._all_parents
        return Proposal(self.along(kept), tuple(rows[parents[index]] for index in kept))

    def is_part_of(self, other: Proposal) -> bool:
        """Whether each of its tokens is one of another proposal's, on the same path."""
        children, places = other._children(), [0]
        for parent, token_id in zip(self._all_parents, self.token_ids, strict=True):
            index = children.get((places[parent], token_id))
            if index is None:
                return False
            places.append(index + 1)
        return True

    def goes_on_after(self, path: Sequence[int]) -> bool:
        """Whether it proposes a token after the last one of a path."""
        return (path[-1] + 1 if path else 0) in self._all_parents

    def along(self, path: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens at these indices."""
        return tuple(self.token_ids[index] for index in path)

    def follow(self, choose: Callable[[int, int], int]) -> tuple[tuple[int, ...], int]:
        """Walk from the prefix to the child that is what is chosen, as far as there is one.

        Args:
            choose: From a row, 0 for the prefix and i + 1 for the i-th token, and the length of
                the path to it, to the token after it.

        Returns:
            The path, as indices, and what was chosen after it.
        """
        children = self._children()
        path: list[int] = []
        row = 0
        while (index := children.get((row, token := choose(row, len(path))))) is not None:
            path.append(index)
            row = index + 1
        return tuple(path), token

    def path_of(self, token_ids: Iterable[int]) -> tuple[int, ...]:
        """Return the path along the first of these tokens, as far as there is one."""
        children = self._children()
        path: list[int] = []
        row = 0
        for token in token_ids:
            index = children.get((row, token))
            if index is None:
                break
            path.append(index)
            row = index + 1
        return tuple(path)

    def _children(self) -> dict[tuple[int, int], int]:
        return {
            child: index
            for index, child in enumerate(zip(self._all_parents, self.token_ids, strict=True))
        }

    @property
    def _all_parents(self) -> Sequence[int]:
        return self.parents or range(len(self.token_ids))


NOTHING = Proposal()
