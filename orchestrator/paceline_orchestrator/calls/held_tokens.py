"""What a session at a model server is believed to hold: the other end of the one rule.

    held = [0 ........ settled)[settled ........ length)
            final tokens        assumed ones: drafts, or not final when they were sent

Final tokens never change, so they are never compared again: a call costs what lies beyond them,
however long the text is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.prefix import TokenPrefix

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["HeldTokens"]


class HeldTokens:
    """The tokens that a session can be relied on to hold.

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


def _common_length(held: Sequence[int], prefix: Sequence[int], offset: int) -> int:
    """Count the equal tokens at the starts of `held` and `prefix[offset:]`."""
    limit = min(len(held), len(prefix) - offset)
    for index in range(limit):
        if held[index] != prefix[offset + index]:
            return index
    return limit
