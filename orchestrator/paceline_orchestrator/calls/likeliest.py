"""What targets held likely at each place, kept until the token there is final."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from paceline.errors import InvariantViolatedError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["LikeliestKept", "LikeliestTokens"]

LikeliestTokens: TypeAlias = tuple[tuple[int, float], ...]
"""Token ids and log probabilities, the likeliest first."""


class LikeliestKept:
    """What counts is what was said of the very text that became final.

    A verdict speaks under the assumption of its prefix, so there may be several for a place. Each
    is kept with the text that it assumes, beyond what was final from the start.

    Args:
        prompt_length: How many tokens are final from the start.
    """

    def __init__(self, prompt_length: int) -> None:
        self._prompt_length = prompt_length
        self._text: tuple[int, ...] = ()
        self._said: dict[int, dict[tuple[int, ...], LikeliestTokens]] = {}

    def note(
        self,
        prefix: Sequence[int],
        token_ids: Sequence[int],
        *,
        likeliest: Sequence[LikeliestTokens],
    ) -> None:
        """Note what a target said of the places of the tokens that it decided after a prefix."""
        assumed = tuple(prefix[self._prompt_length :])
        for token_id, tokens in zip(token_ids, likeliest, strict=True):
            if len(assumed) >= len(self._text):
                self._said.setdefault(len(assumed), {}).setdefault(assumed, tokens)
            assumed = (*assumed, token_id)

    def settle(self, token_ids: Sequence[int]) -> tuple[LikeliestTokens, ...]:
        """Let tokens become final, and return what was likely at the place of each.

        Raises:
            InvariantViolatedError: No target has said it.
        """
        found = []
        for token_id in token_ids:
            said = self._said.pop(len(self._text), {}).get(self._text)
            if said is None:
                raise InvariantViolatedError(
                    "no target has said what was likely at a token's place"
                )
            found.append(said)
            self._text = (*self._text, token_id)
        return tuple(found)
