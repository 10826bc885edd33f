"""The tokens of a session: what its server holds, and what its call under way has brought."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_contract.prefix import TokenPrefix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_contract.proposal import Proposal


class HeldTokens:
    """The tokens that a session can be relied on to hold: the other end of the one rule.

        held = [0 ........ settled)[settled ........ length)
                final tokens        assumed ones: drafts, or not final when they were sent

    Final tokens never change, so they are never compared again: a call costs what lies beyond them,
    however long the text is.

    A server that holds more, or others beyond these, does no harm: `base_length` never reaches past
    what is believed, and the server checks the digest.
    """

    def __init__(self) -> None:
        self._tokens = TokenPrefix()
        self._settled_length = 0
        self._assumed: list[int] = []

    def begin(self, prefix: Sequence[int]) -> tuple[int, bytes]:
        """Choose what of the held tokens a call for `prefix` keeps, and believe in no more.

        Not more, because until it is answered the call may or may not have begun.

        Returns:
            `base_length`, and the digest of that many tokens.
        """
        if len(prefix) < self._settled_length:
            self.forget()
        kept = _common_length(self._assumed, prefix, self._settled_length)
        del self._assumed[kept:]
        self._tokens.truncate(self._settled_length + kept)
        return len(self._tokens), self._tokens.digest()

    def confirm(
        self, prefix: Sequence[int], accepted: Sequence[int] = (), *, final_length: int
    ) -> None:
        """Take the answer to the call begun last as proof that the session holds what it asked for.

        Args:
            prefix: The prefix of that call.
            accepted: What the server accepted of what the call proposed, and so holds too.
            final_length: How many tokens of the prefix can never change again.
        """
        self._tokens.extend(prefix[len(self._tokens) :])
        self._tokens.extend(accepted)
        self._settled_length = max(self._settled_length, min(final_length, len(prefix)))
        self._assumed = [*prefix[self._settled_length :], *accepted]

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take streamed tokens as proof that the session holds them too."""
        self._tokens.extend(token_ids)
        self._assumed.extend(token_ids)

    def forget(self) -> None:
        """Believe in nothing: the session is new, or was found to hold something else."""
        self._tokens = TokenPrefix()
        self._settled_length = 0
        self._assumed = []


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
        """Take in a piece of a draft, and return the indices of its tokens that are the chain's.

        None if it is no piece of this draft.
        """
        if self._width == 1:
            follows_on = tuple(range(self.found_count, self.found_count + len(piece)))
            return tuple(range(len(piece))) if piece.parents in ((), follows_on) else None
        if len(piece.parents) != len(piece):
            return None
        chain = []
        for index, (token_id, parent) in enumerate(
            zip(piece.token_ids, piece.parents, strict=True)
        ):
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
                chain.append(index)
        return tuple(chain)

    def advance(self, count: int) -> None:
        """Note that so many tokens, of a tree of its chain, have come."""
        self.found_count += count


def _common_length(held: Sequence[int], prefix: Sequence[int], offset: int) -> int:
    """Count the equal tokens at the starts of `held` and `prefix[offset:]`."""
    limit = min(len(held), len(prefix) - offset)
    for index in range(limit):
        if held[index] != prefix[offset + index]:
            return index
    return limit
