"""The rows of Table 2 of the paper on cascades, in our terms: ways to draft, with their parameters.

Chen et al. 2023, "Cascade Speculative Drafting" (arXiv 2312.11462). Its table has two models below
the target; the bundled models are one, so the rows of the second one are missing. Max-Gram alone is
no row of it.

Difference: the paper has Max-Gram propose ten tokens wherever it is asked. Here that is searched,
too, and Max-Gram may draft for the drafter alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline_engine.cascade import Matrix

__all__ = ["CASCADE", "GRIDS", "MAX_GRAM", "SPECULATIVE", "Recipe"]

SPECULATIVE = "SD, drafter"
CASCADE = "CSD, drafter + Max-Gram"
MAX_GRAM = "Max-Gram alone"

_LOOKAHEADS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)


@dataclass(frozen=True, slots=True)
class Recipe:
    """A way to draft.

    Attributes:
        lookahead: Draft tokens in a verification, at most.
        matrix: Of the drafter, and of Max-Gram below it if it has a second stage; None: Max-Gram
            alone.
    """

    lookahead: int
    matrix: Matrix | None = None

    def __str__(self) -> str:
        if self.matrix is None or len(self.matrix) == 1:
            return f"k = {self.lookahead}"
        (count, beyond), (_, inner) = self.matrix
        return f"k = {count}+{beyond}, {inner} for the drafter"

    @property
    def drafter_flags(self) -> Sequence[str]:
        """What a drafter server is told of it."""
        if self.matrix is None or len(self.matrix) == 1:
            return ()
        rows = ",".join(f"[{','.join(map(str, row))}]" for row in self.matrix)
        return ("--then=max-gram", f"--cascade=[{rows}]")


def _cascade(count: int, beyond: int, inner: int) -> Recipe:
    return Recipe(count + beyond, ((count, beyond), (0, inner)))


GRIDS: Mapping[str, Sequence[Recipe]] = {
    SPECULATIVE: [Recipe(count, ((1,),)) for count in _LOOKAHEADS],
    CASCADE: [
        _cascade(*counts) for counts in product((1, 2, 3, 4, 6, 8, 12), (0, 4, 10), (2, 4, 10))
    ],
    MAX_GRAM: [Recipe(count) for count in _LOOKAHEADS],
}
