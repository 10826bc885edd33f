"""What is proposed to a target: a chain of tokens, or a tree of them, that may follow a prefix."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Sequence


class Distribution(Protocol):
    """What a token was drawn from: a SparseDistribution, or the message of that name, unread."""

    @property
    def token_ids(self) -> Sequence[int]:
        """The possible tokens."""

    @property
    def probabilities(self) -> Sequence[float]:
        """The probability of each."""


@dataclass(frozen=True, slots=True)
class SparseDistribution:
    """A distribution with a short list of possible tokens; probabilities sum to 1 within 1e-4."""

    token_ids: Sequence[int]
    probabilities: Sequence[float]

    @classmethod
    def certain(cls, token_id: int) -> Self:
        """Return the distribution in which only one token is possible."""
        return cls((token_id,), (1.0,))


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that may follow a prefix; see proposal.proto.

    A *row* is a place in the tree: 0 is the prefix, i + 1 is the i-th token.

    Invariants:
        A parent comes before its children.

    Attributes:
        token_ids: The tokens.
        parents: Empty for a chain, in which each token follows the one before. For a tree one row
            for each token: the row that the token follows.
        distributions: Under REJECTION the distribution of each token's draw. Else empty.
        forced: The indices of tokens that a grammar forces, ascending, as a model server says it.
            No part of what is judged.
    """

    token_ids: Sequence[int] = ()
    parents: Sequence[int] = ()
    distributions: Sequence[Distribution] = ()
    forced: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        """Whether each token follows the one before."""
        return not self.parents or all(parent == row for row, parent in enumerate(self.parents))

    @property
    def all_parents(self) -> Sequence[int]:
        """The row before each token, of a chain too."""
        return self.parents or range(len(self.token_ids))

    @property
    def trunk(self) -> tuple[int, ...]:
        """The indices of the tree's chain: the first child of each row, from the prefix on."""
        if not self.parents:
            return tuple(range(len(self.token_ids)))
        first: dict[int, int] = {}
        for index, parent in enumerate(self.parents):
            first.setdefault(parent, index)
        path = []
        row = 0
        while row in first:
            path.append(first[row])
            row = first[row] + 1
        return tuple(path)

    @property
    def branch_count(self) -> int:
        """How many tokens are beside the chain."""
        return len(self.token_ids) - len(self.trunk)

    @property
    def depth(self) -> int:
        """How many tokens the longest path has."""
        return max(self.depths(), default=-1) + 1 if self.parents else len(self.token_ids)

    def depths(self) -> list[int]:
        """Count the tokens before each token on its path."""
        depths: list[int] = []
        for parent in self.all_parents:
            depths.append(depths[parent - 1] + 1 if parent else 0)
        return depths

    def ancestors(self, index: int) -> Iterator[int]:
        """Yield a token's index, its parent's, and so on up to the prefix."""
        parents = self.all_parents
        row = index + 1
        while row:
            yield row - 1
            row = parents[row - 1]

    def along(self, path: Iterable[int]) -> tuple[int, ...]:
        """Return the tokens at these indices."""
        return tuple(self.token_ids[index] for index in path)

    def leads_along(self, path: Iterable[int]) -> bool:
        """Whether these are the indices of a path, root first."""
        row = 0
        for index in path:
            if not 0 <= index < len(self.token_ids) or self.all_parents[index] != row:
                return False
            row = index + 1
        return True

    def goes_on_after(self, path: Sequence[int]) -> bool:
        """Whether a token follows the last token of a path."""
        return (path[-1] + 1 if path else 0) in self.all_parents

    def follow(self, choose: Callable[[int, int], int]) -> tuple[tuple[int, ...], int]:
        """Walk from the prefix to the child that was chosen, until the choice is no child.

        Args:
            choose: Returns the token after a row, from the row and the length of the path to it.

        Returns:
            The path, as indices, and the choice after it.
        """
        children = self._children()
        path: list[int] = []
        row = 0
        while (index := children.get((row, token := choose(row, len(path))))) is not None:
            path.append(index)
            row = index + 1
        return tuple(path), token

    def path_of(self, token_ids: Iterable[int]) -> tuple[int, ...]:
        """Return the indices of the first of these tokens, as far as the tree has them."""
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

    def is_part_of(self, other: Proposal) -> bool:
        """Whether each token is also in another proposal, on the same path."""
        children, rows = other._children(), [0]
        for parent, token_id in zip(self.all_parents, self.token_ids, strict=True):
            index = children.get((rows[parent], token_id))
            if index is None:
                return False
            rows.append(index + 1)
        return True

    def only(self, kept: Sequence[int]) -> Proposal:
        """Return the tree of these tokens, ascending; each has its parent among them.

        Of a chain these are the first tokens, and they are a chain.
        """
        if not self.parents:
            count = len(kept)
            return Proposal(self.along(kept), distributions=tuple(self.distributions[:count]))
        rows = {0: 0} | {index + 1: row for row, index in enumerate(kept, start=1)}
        parents = self.all_parents
        return Proposal(self.along(kept), tuple(rows[parents[index]] for index in kept))

    def compact(self) -> Proposal:
        """Return the same proposal, without parents if it is a chain."""
        return replace(self, parents=()) if self.parents and self.is_chain else self

    def useful_part(self, *, longest: int, end_ids: Container[int]) -> Proposal:
        """Leave out the tokens after an end token, and the tokens of a path beyond `longest`."""
        depths: list[int] = []  # 0: left out
        for parent in self.all_parents:
            before = depths[parent - 1] if parent else 0
            is_open = not parent or (before > 0 and self.token_ids[parent - 1] not in end_ids)
            depths.append(before + 1 if is_open and before < longest else 0)
        return self.only([index for index, depth in enumerate(depths) if depth]).compact()

    def followed_by(self, other: Proposal) -> Proposal:
        """Return this chain, followed by another."""
        if not other:
            return self
        count = len(self.token_ids)
        return Proposal(
            (*self.token_ids, *other.token_ids),
            distributions=(*self.distributions, *other.distributions),
            forced=(*self.forced, *(count + index for index in other.forced)),
        )

    def beside(self, other: Proposal) -> Proposal:
        """Return this tree, followed by another's tokens that this tree does not have."""
        token_ids, parents = [*self.token_ids], [*self.all_parents]
        rows = {child: row for row, child in enumerate(zip(parents, token_ids, strict=True), 1)}
        row_here = [0]
        for parent, token_id in zip(other.all_parents, other.token_ids, strict=True):
            child = (row_here[parent], token_id)
            if child not in rows:
                parents.append(child[0])
                token_ids.append(token_id)
                rows[child] = len(token_ids)
            row_here.append(rows[child])
        return Proposal(tuple(token_ids), tuple(parents)).compact()

    def _children(self) -> dict[tuple[int, int], int]:
        return {
            child: index
            for index, child in enumerate(zip(self.all_parents, self.token_ids, strict=True))
        }


NOTHING = Proposal()
