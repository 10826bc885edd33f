"""What targets said about tokens, until the tokens are final: decided tokens and likely tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.errors import InvariantViolatedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_contract.calls import LikeliestTokens


class DecidedTokens:
    """The tokens that targets decided, by position: the last check before a token is sent.

    A verdict assumes its prefix, so a position may have several. The check finds bugs of decoding
    methods; it does not prove the methods.

    Attributes:
        final_length: How many tokens are final, the prompt counted.
    """

    def __init__(self, prompt_length: int) -> None:
        self.final_length = prompt_length
        self._decided: dict[int, set[int]] = {}

    def add(self, position: int, token_ids: Sequence[int]) -> None:
        """Take in what a target decided, from a position on."""
        for offset, token_id in enumerate(token_ids, start=position):
            if offset >= self.final_length:
                self._decided.setdefault(offset, set()).add(token_id)

    def finalize(self, token_ids: Sequence[int]) -> None:
        """Let tokens become final.

        Raises:
            InvariantViolatedError: No target has decided one of them.
        """
        for token_id in token_ids:
            if token_id not in self._decided.pop(self.final_length, ()):
                raise InvariantViolatedError("a token was about to be sent that no target decided")
            self.final_length += 1


class LikeliestByPosition:
    """The likeliest tokens at each position of the sequence that became final.

    A verdict assumes its prefix, so a position may have several. Each is kept with the sequence
    that it assumes, beyond what was final from the start.

    Args:
        prompt_length: How many tokens are final from the start.
    """

    def __init__(self, prompt_length: int) -> None:
        self._prompt_length = prompt_length
        self._text: tuple[int, ...] = ()
        self._said: dict[int, dict[tuple[int, ...], LikeliestTokens]] = {}

    def add(
        self,
        prefix: Sequence[int],
        token_ids: Sequence[int],
        *,
        likeliest: Sequence[LikeliestTokens],
    ) -> None:
        """Take in what a target said about the positions of the tokens that it decided."""
        assumed = tuple(prefix[self._prompt_length :])
        for token_id, tokens in zip(token_ids, likeliest, strict=True):
            if len(assumed) >= len(self._text):
                self._said.setdefault(len(assumed), {}).setdefault(assumed, tokens)
            assumed = (*assumed, token_id)

    def finalize(self, token_ids: Sequence[int]) -> tuple[LikeliestTokens, ...]:
        """Let tokens become final, and return what was likely at the position of each.

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
