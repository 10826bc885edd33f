"""How many draft tokens a target would accept, from how often a drafter is right."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

MOST_LOOKAHEAD = 5
"""Up to which curves and cards say how many tokens are accepted."""


@dataclass(frozen=True, slots=True)
class Runs:
    """How many draft tokens would be accepted from each place of a target's texts on.

    As long as all tokens before it are accepted, a drafter sees the target's own text. So runs of
    hits say it for every lookahead.

    Attributes:
        lengths: (M,) the hits that follow without a miss, up to the text's end.
        left: (M,) the tokens up to the text's end.
    """

    lengths: Tensor
    left: Tensor

    @classmethod
    def of(cls, hits: Tensor, counted: Tensor) -> Runs:
        """Find them in a text.

        Args:
            hits: (L,) bool; whether the draft token of a place is the target's.
            counted: (L,) bool; a text ends before a place that is not counted.
        """
        found, run, left = [], 0, 0
        for hit, is_counted in zip(
            reversed(hits.tolist()), reversed(counted.tolist()), strict=True
        ):
            run = run + 1 if hit and is_counted else 0
            left = left + 1 if is_counted else 0
            if is_counted:
                found.append((run, left))
        lengths, ends = torch.tensor(found[::-1], dtype=torch.int64).view(-1, 2).unbind(-1)
        return cls(lengths, ends)

    @classmethod
    def together(cls, runs: Sequence[Runs]) -> Runs:
        """Put those of several texts together."""
        return cls(torch.cat([it.lengths for it in runs]), torch.cat([it.left for it in runs]))

    def accepted(self, most_lookahead: int) -> tuple[float, ...]:
        """Return how many tokens of a block are accepted on average, by lookahead from 1 on.

        A block that the text's end would cut counts for the places that it has.
        """
        chances = (
            _share(self.lengths >= place, self.left >= place)
            for place in range(1, most_lookahead + 1)
        )
        return tuple(accumulate(chances))

    def by_place(self, most_places: int) -> tuple[float, ...]:
        """Return how often a block's token is right if those before it are, by its place."""
        return tuple(
            _share(self.lengths >= place, (self.left >= place) & (self.lengths >= place - 1))
            for place in range(1, most_places + 1)
        )


def _share(such: Tensor, among: Tensor) -> float:
    return float((such & among).sum()) / max(1.0, float(among.sum()))
