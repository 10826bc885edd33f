"""The rows of Table 2 of the paper on cascades, in our terms: who drafts, with which parameters.

Chen et al. 2023, "Cascade Speculative Drafting" (arXiv 2312.11462). Its table has two models below
the target; the bundled models are one, so the rows of the second one are missing. Max-Gram alone is
no row of it.

Difference: the paper has Max-Gram propose ten tokens wherever it is asked. Here that is searched,
too, and Max-Gram may draft for a model alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from paceline_engine.cascade import MAX_GRAM

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from paceline_engine.cascade import Matrix

__all__ = ["DRAFTER", "DRAFTER_AND_TEXT", "GRIDS", "TEXT_ALONE", "Recipe"]

DRAFTER, DRAFTER_AND_TEXT, TEXT_ALONE = "drafter", "drafter + Max-Gram", "Max-Gram"

_LOOKAHEADS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)


@dataclass(frozen=True, slots=True)
class Recipe:
    """A way to draft.

    Attributes:
        lookahead: Draft tokens in a verification, at most.
        models: Who drafts, largest first; none: Max-Gram alone.
        matrix: Of these models, and of Max-Gram below them if it has one stage more.
    """

    lookahead: int
    models: tuple[str, ...] = ()
    matrix: Matrix = ()

    @property
    def has_max_gram(self) -> bool:
        """Whether Max-Gram drafts below the models."""
        return len(self.matrix) > len(self.models)

    @property
    def counts(self) -> str:
        """How many tokens the stages of a stack draft for the target and for each other."""
        if len(self.matrix) < 2:
            return ""
        rows = ["+".join(map(str, row[place:])) for place, row in enumerate(self.matrix)]
        inner = [f"{row} for {model}" for model, row in zip(self.models, rows[1:], strict=False)]
        return ", ".join([rows[0], *inner])

    def __str__(self) -> str:
        return f"k = {self.counts or self.lookahead}"

    def drafter_flags(self, folders: Mapping[str, Path]) -> Sequence[str]:
        """Return what a drafter server is told beside its largest model.

        Args:
            folders: Where the models are.
        """
        if len(self.matrix) < 2:
            return ()
        stages = [str(folders[model]) for model in self.models[1:]]
        stages += [MAX_GRAM] * self.has_max_gram
        rows = ",".join(f"[{','.join(map(str, row))}]" for row in self.matrix)
        return (*(f"--then={stage}" for stage in stages), f"--cascade=[{rows}]")


GRIDS: Mapping[str, Sequence[Recipe]] = {
    DRAFTER: [Recipe(count, (DRAFTER,), ((1,),)) for count in _LOOKAHEADS],
    DRAFTER_AND_TEXT: [
        Recipe(count + beyond, (DRAFTER,), ((count, beyond), (0, inner)))
        for count, beyond, inner in product((1, 2, 3, 4, 6, 8, 12), (0, 4, 10), (2, 4, 10))
    ],
    TEXT_ALONE: [Recipe(count) for count in _LOOKAHEADS],
}
"""What is searched, by who drafts."""
