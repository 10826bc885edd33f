"""What may follow a prefix: a chain of tokens, or a tree of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Proposal", "SparseDistribution"]


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
        return all(parent == place for place, parent in enumerate(self.parents))

    def along(self, path: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens at these indices."""
        return tuple(self.token_ids[index] for index in path)
