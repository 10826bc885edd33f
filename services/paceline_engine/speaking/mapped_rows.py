"""Rows of the drafter's scores, as rows of the target's vocabulary.

Letters: V_D and V_T are the sizes of the drafter's and the target's vocabularies. A row holds
probabilities, and a row of the target's kind is a distribution over the target's tokens: what is
drawn from it is drawn from exactly these numbers, under both rules.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline_engine.speaking.token_map import MOST_PARTS, NO_TOKEN

if TYPE_CHECKING:
    from array import array
    from collections.abc import Mapping

    from paceline_engine.speaking.spoken_text import SpokenText
    from paceline_engine.speaking.token_map import TokenMap

_LEAST_SHARE = 0.02
"""What is less likely is not drafted on for: the forward would hardly ever find a token."""

_CACHED_PATHS = 4096


class KnownRows:
    """The rows that were computed of a sequence, for a few of its last lengths."""

    def __init__(self) -> None:
        self._ids: array[int] | None = None
        self._rows: dict[int, Tensor] = {}

    def of(self, ids: array[int], lengths: range) -> Mapping[int, Tensor] | int:
        """Return the rows after the first tokens; or the first length of which there is none."""
        known = self._ids
        rows = {
            length: self._rows[length]
            for length in lengths
            if known is not None and length in self._rows and known[:length] == ids[:length]
        }
        return next((length for length in lengths if length not in rows), None) or rows

    def take(self, ids: array[int], first: int, *, rows: Tensor, least: int) -> None:
        """Take in rows, (n, V_D), after the first `first` tokens of a sequence and those after.

        Args:
            least: Rows of fewer tokens are of no use, but for a few.
        """
        known = self._ids
        kept = {
            length: row
            for length, row in self._rows.items()
            if length >= least - MOST_PARTS and known is not None and known[:length] == ids[:length]
        }
        self._ids = ids[:]
        self._rows = {**kept, **{first + n: row for n, row in enumerate(rows)}}

    def forget(self) -> None:
        """Forget all rows, and their memory."""
        self._ids, self._rows = None, {}


class RowMap:
    """Turns the drafter's rows into the target's.

    Attributes:
        size: V_T.
    """

    def __init__(self, token_map: TokenMap, *, size: int) -> None:
        self.size = size
        self._map = token_map
        # What means nothing to the target goes into a column that is cut off.
        columns = [size if each == NO_TOKEN else each for each in token_map.first]
        self._first = torch.tensor(columns)
        self._after = lru_cache(_CACHED_PATHS)(self._new_after)

    def begins(self, row: Tensor) -> Tensor:
        """Return how likely each target token is the first one of the drafter's next: (V_T,)."""
        wide = torch.zeros(self.size + 1, dtype=torch.float64, device=row.device)
        wide.index_add_(0, self._on(row.device), row.double())
        return wide[: self.size]

    def bounds(
        self, text: SpokenText, prefix: array[int], ids: array[int]
    ) -> list[tuple[int, int]]:
        """Return where the drafter could have written a longer token than the prefix ends with.

        Each bound is how many of the last target tokens that one begins with, and the length of the
        drafter's sequence before it. The first is the prefix's own end: (0, length).

        Args:
            text: The text, of the prefix or longer.
            ids: The drafter's sequence for the prefix.
        """
        found = [(0, len(ids))]
        for count in range(1, min(MOST_PARTS, len(prefix) - 1) + 1):
            if tuple(prefix[-count:]) not in self._map.longer:
                continue
            before = text.ids(len(prefix) - count)
            if 0 < len(before) < len(ids) and ids[: len(before)] == before:
                found.append((count, len(before)))
        return found

    def joined(
        self,
        rows: Mapping[int, Tensor],
        bounds: list[tuple[int, int]],
        *,
        prefix: array[int],
        ids: array[int],
    ) -> tuple[Tensor, float]:
        """Return the distribution of the target's next token, (V_T,), and the last row's part.

        `token_map.py` has the theory.

        Args:
            rows: The drafter's rows from the first bound on, by the length before them.
            bounds: See `bounds`.
        """
        lengths = {length: count for count, length in bounds}
        total = torch.zeros(self.size, dtype=torch.float64, device=rows[len(ids)].device)
        share = 1.0  # how likely the drafter writes its sequence from the first bound up to here
        for length in range(min(lengths), len(ids)):
            row = rows[length]
            if length in lengths:
                owners, columns = self._after(tuple(prefix[-lengths[length] :]))
                total.index_add_(
                    0, columns.to(row.device), share * row[owners.to(row.device)].double()
                )
            share *= float(row[ids[length]])
        total += share * self.begins(rows[len(ids)])
        mass = float(total.sum())
        if not mass:  # the model holds the sequence to be impossible
            return self.begins(rows[len(ids)]), 1.0
        return total / mass, share / mass

    def composes(self, row: Tensor, path: tuple[int, ...], share: float) -> tuple[int, float]:
        """Return the drafter's token to draft on with, and how likely the path is with it.

        The token is NO_TOKEN where no token of the target can be reached so.
        """
        token = int(row.argmax())
        share *= float(row[token])
        goes_on = share >= _LEAST_SHARE and len(path) + 1 < MOST_PARTS
        return (token if goes_on and (*path, token) in self._map.composed else NO_TOKEN), share

    def move(self, total: Tensor, row: Tensor, path: tuple[int, ...], share: float) -> None:
        """Give tokens that a path of the drafter's composes their part of its probability."""
        found = [each for each in self._map.composed.after(path) if each[2]]
        start = self._map.first[path[0]]
        if not found or start == NO_TOKEN:
            return
        last, composed, _ = zip(*found, strict=True)
        moved = share * row[torch.tensor(last, device=row.device)].double()
        moved *= (total[start] / moved.sum()).clamp(max=1) if bool(moved.sum() > 0) else 0
        total.index_add_(0, torch.tensor(composed, device=row.device), moved)
        total[start] -= moved.sum()
        total.clamp_(min=0)

    def _on(self, device: torch.device) -> Tensor:
        if self._first.device != device:
            self._first = self._first.to(device)
        return self._first

    def _new_after(self, path: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        found = self._map.longer.after(path)
        return (
            torch.tensor([token for _, token, _ in found]),
            torch.tensor([following for following, _, _ in found]),
        )
