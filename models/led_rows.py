"""Leads many texts at once, in tensors, as a `Writer` says of each.

Theory of operation
-------------------

What comes next in a text depends on the token that was drawn before. With thousands of texts on a
GPU, Python would take longer for that than the GPU for its forward. But what a writer *gives* does
not depend on what is drawn, only *when* it is given. So all that a writer would give in a text of L
tokens is taken from it beforehand and written into one row, its script. The script's passages are
the turns' beginnings and, in a chat, the template between question and answer:

    script   | before the user | answer | again | answer | again | ...
    passage  | 0               | 1      | 2     | 3      | 4     | ...
    stops                      ^        ^       ^        ^       ^     where each passage ends

A text reads its script up to the passage's stop. Then its tokens are drawn until an end; with the
end the next passage begins. In a chat, the user's words follow an even passage and the answer an
odd one. A text of L tokens never needs more than L tokens of its script, nor more than L + 1
passages, because each passage but the first follows a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import torch

from text_writers import ANSWER_TOKENS, OWN, TEMPLATE, USER, USER_TEMPERATURE, USER_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from text_writers import Writer


class LedRows:
    """Leads the texts of a batch; all its tensors stay where they are, as CUDA graphs need it.

    Letters: B texts, L positions.
    """

    def __init__(self, *, rows: int, length: int, device: torch.device) -> None:
        """Make room for texts; `begin` says which."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=device)

        self._length = length
        self._script, self._origins = zeros(length), zeros(length)
        self._stops = zeros(length + 1)
        self._is_chat = zeros(dtype=torch.bool)
        self._temperatures = zeros(dtype=torch.float32)
        self._ends = zeros(2)
        self._given = zeros()  # How many tokens of its script each text has.
        self._passage = zeros()
        self._drawn = zeros()  # Tokens of this turn that were drawn.

    def begin(self, scripts: Sequence[Script]) -> None:
        """Begin a batch, of one script for each text."""
        for tensor, rows in (
            (self._script, [it.token_ids for it in scripts]),
            (self._origins, [it.origins for it in scripts]),
            (self._stops, [it.stops for it in scripts]),
            (self._is_chat, [it.is_chat for it in scripts]),
            (self._temperatures, [it.temperature for it in scripts]),
            (self._ends, [(it.end_ids[0], it.end_ids[-1]) for it in scripts]),
        ):
            tensor.copy_(torch.tensor(rows, dtype=tensor.dtype))
        for tensor in (self._given, self._passage, self._drawn):
            tensor.zero_()

    def advance(self, drawn: Tensor) -> tuple[Tensor, Tensor]:
        """Go on by one position; return what stands there, and where it comes from: (B,) int64.

        Args:
            drawn: (B,) int64; what was drawn for this position, if a token is to be drawn here.
        """
        stop = self._stops.gather(1, self._passage[:, None])[:, 0]
        is_given = self._given < stop
        is_user = self._is_users()
        limit = torch.where(is_user, USER_TOKENS, ANSWER_TOKENS)
        is_cut = ~is_given & self._is_chat & (self._drawn >= limit)
        at = self._given.clamp(max=self._length - 1)[:, None]
        token_ids = torch.where(is_cut, self._ends[:, 0], drawn)
        token_ids = torch.where(is_given, self._script.gather(1, at)[:, 0], token_ids)
        origins = torch.where(is_cut, TEMPLATE, torch.where(is_user, USER, OWN))
        origins = torch.where(is_given, self._origins.gather(1, at)[:, 0], origins)
        self._given += is_given
        self._drawn += ~(is_given | is_cut)
        has_ended = (token_ids[:, None] == self._ends).any(1) & (self._given >= stop)
        self._passage += has_ended
        self._drawn *= ~has_ended
        return token_ids, origins

    def temperatures(self) -> Tensor:
        """Return at which temperature the next tokens are drawn, (B,) float32."""
        return torch.where(self._is_users(), USER_TEMPERATURE, self._temperatures)

    def _is_users(self) -> Tensor:
        return self._is_chat & (self._passage % 2 == 0)


@dataclass(frozen=True, slots=True)
class Script:
    """All that a writer would give in a text of L tokens, and how it draws the others.

    Attributes:
        token_ids: L of them; those that no passage reaches are 0.
        origins: Where each comes from.
        stops: Where each of L + 1 passages ends.
        is_chat: Whether its passages open turns of a user and answers in turn.
        temperature: Of the answers and the continuations.
        end_ids: The tokens that end a turn, one or two.
    """

    token_ids: Sequence[int]
    origins: Sequence[int]
    stops: Sequence[int]
    is_chat: bool
    temperature: float
    end_ids: Sequence[int]

    @classmethod
    def of(cls, writer: Writer, *, length: int) -> Script:
        """Take it from a writer, which is used up."""
        given: list[tuple[int, int]] = []
        stops: list[int] = []
        for passage in islice(_passages(writer), length + 1):
            given += passage
            stops.append(min(length, len(given)))
            if stops[-1] == length:
                break
        given = given[:length] + [(0, TEMPLATE)] * (length - len(given))
        return cls(
            token_ids=[token_id for token_id, _ in given],
            origins=[origin for _, origin in given],
            stops=stops + [length] * (length + 1 - len(stops)),
            is_chat=bool(writer.answer),
            temperature=writer.temperature,
            end_ids=writer.end_ids,
        )


def _passages(writer: Writer) -> Iterator[Sequence[tuple[int, int]]]:
    """Return what a writer gives, passage by passage."""
    while True:
        yield writer.open_turn()
        if writer.answer:
            yield [(each, TEMPLATE) for each in writer.answer]
