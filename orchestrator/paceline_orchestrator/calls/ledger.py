"""The last check before a token leaves: that a target has decided it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.errors import InvariantViolatedError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Ledger"]


class Ledger:
    """Which tokens targets have decided, by position, beyond those that are final.

    A verdict speaks under the assumption of its prefix, so there may be several for a position. It
    is a net under the decoding methods, not a second proof of them.

    Attributes:
        final_length: How many tokens are final, the prompt counted.
    """

    def __init__(self, prompt_length: int) -> None:
        self.final_length = prompt_length
        self._decided: dict[int, set[int]] = {}

    def note(self, position: int, token_ids: Sequence[int]) -> None:
        """Note what a target decided, from a position on."""
        for offset, token_id in enumerate(token_ids, start=position):
            if offset >= self.final_length:
                self._decided.setdefault(offset, set()).add(token_id)

    def settle(self, token_ids: Sequence[int]) -> None:
        """Let tokens become final.

        Raises:
            InvariantViolatedError: No target has decided one of them.
        """
        for token_id in token_ids:
            if token_id not in self._decided.pop(self.final_length, ()):
                raise InvariantViolatedError("a token was about to be sent that no target decided")
            self.final_length += 1
