"""The rows of Table 2 of the paper on cascades, in our terms: who drafts, with which parameters.

Chen et al. 2023, "Cascade Speculative Drafting" (arXiv 2312.11462). Max-Gram alone is no row of it.

Difference: the paper has Max-Gram propose ten tokens wherever it is asked. Here that is searched,
too, and Max-Gram may draft for a model alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from paceline_engine.deciding.cascade import MAX_GRAM

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from paceline_engine.deciding.cascade import Matrix

DRAFTER, TINY = "drafter", "tiny"
DRAFTER_AND_TEXT, TINY_AND_TEXT = "drafter + Max-Gram", "tiny + Max-Gram"
ALL_STAGES = "drafter + tiny + Max-Gram"
TEXT_ALONE = "Max-Gram"

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


def _alone(model: str) -> list[Recipe]:
    return [Recipe(count, (model,), ((1,),)) for count in _LOOKAHEADS]


def _above_the_text(model: str) -> list[Recipe]:
    return [
        Recipe(count + beyond, (model,), ((count, beyond), (0, inner)))
        for count, beyond, inner in product((1, 2, 3, 4, 6, 8, 12), (0, 4, 10), (2, 4, 10))
    ]


def _all_stages() -> list[Recipe]:
    """Say what to try of three stages: fewer of each, since all go with all."""
    return [
        Recipe(
            count + smaller + beyond,
            (DRAFTER, TINY),
            ((count, smaller, beyond), (0, *inner), (0, 0, below)),
        )
        for count, smaller, beyond, inner, below in product(
            (1, 2, 4, 6), (0, 4), (4, 10), ((1, 0), (1, 4), (2, 0), (2, 4), (4, 0)), (0, 4)
        )
    ]


GRIDS: Mapping[str, Sequence[Recipe]] = {
    DRAFTER: _alone(DRAFTER),
    TINY: _alone(TINY),
    DRAFTER_AND_TEXT: _above_the_text(DRAFTER),
    TINY_AND_TEXT: _above_the_text(TINY),
    ALL_STAGES: _all_stages(),
    TEXT_ALONE: [Recipe(count) for count in _LOOKAHEADS],
}
"""What is searched, by who drafts."""

ONE_STAGE_MORE: Mapping[str, str] = {
    DRAFTER_AND_TEXT: DRAFTER,
    TINY_AND_TEXT: TINY,
    ALL_STAGES: DRAFTER_AND_TEXT,
}
"""What has a stage more than what: the paper has it that none of them is worse."""
