"""What a draft or a decode was asked for, and how much of it has come."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_protocol.proposal import Proposal

__all__ = ["Window"]


class Window:
    """A window of tokens after a prefix, and those that were found so far.

    Args:
        prefix: What they follow.
        max_tokens: The most that are wanted: of a tree, of its chain.
        final_length: How many tokens of the prefix can never change again.
        width: With 2 or more a tree was asked for.

    Attributes:
        found_count: Tokens found, of a tree those of its chain.
    """

    def __init__(
        self, prefix: Sequence[int], max_tokens: int, *, final_length: int, width: int = 1
    ) -> None:
        self.prefix = prefix
        self.max_tokens = max_tokens
        self.final_length = final_length
        self.found_count = 0
        self._width = width
        self._tip = 0  # what the chain's next token follows: 0 is the prefix, i + 1 the i-th token
        self._places: list[set[int]] = [set()]  # what was found after the prefix, and each token
        self._depths = [0]  # of the prefix, and each token

    @property
    def length(self) -> int:
        """How many tokens precede the chain's next one."""
        return len(self.prefix) + self.found_count

    def chain_of(self, piece: Proposal) -> tuple[int, ...] | None:
        """Take in a piece of a draft, and return what it has of the chain; None if it is none."""
        if self._width == 1:
            follows_on = tuple(range(self.found_count, self.found_count + len(piece)))
            return piece.token_ids if piece.parents in ((), follows_on) else None
        if len(piece.parents) != len(piece):
            return None
        chain = []
        for token_id, parent in zip(piece.token_ids, piece.parents, strict=True):
            if not 0 <= parent < len(self._places):
                return None
            siblings = self._places[parent]
            depth = self._depths[parent] + 1
            if token_id in siblings or len(siblings) == self._width or depth > self.max_tokens:
                return None
            siblings.add(token_id)
            self._places.append(set())
            self._depths.append(depth)
            if parent == self._tip:
                self._tip = len(self._places) - 1
                chain.append(token_id)
        return tuple(chain)

    def take(self, count: int) -> None:
        """Note that so many tokens, of a tree of its chain, have come."""
        self.found_count += count
