"""Which parameters are best: drafts played against texts that are known."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import ceil
from statistics import median
from typing import TYPE_CHECKING

from paceline_bench.pair.acceptance import common_run
from paceline_bench.pair.engine import measure_rows, text_alone
from paceline_bench.variants import walltime_improvement
from paceline_contract.max_gram import MaxGram
from paceline_engine.scheduling.model_text import ModelText
from paceline_engine.stack_backend.stack import StackBackend
from paceline_engine.terms.calls import SessionSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from paceline_bench.cascade.recipes import Recipe
    from paceline_engine.terms.backend import Backend

_FIRST_TEXTS = 2
_COST_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class KnownText:
    """A prompt, and what the target says after it."""

    prompt: tuple[int, ...]
    continuation: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tally:
    """What texts took."""

    token_count: int = 0
    target_forwards: int = 0
    drafter_forwards: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.token_count + other.token_count,
            self.target_forwards + other.target_forwards,
            self.drafter_forwards + other.drafter_forwards,
        )

    def improvement(self, costs: Mapping[str, float]) -> float:
        """Return its standardised walltime improvement."""
        return walltime_improvement(
            self.token_count,
            target_forwards=self.target_forwards,
            drafter_forwards=self.drafter_forwards,
            costs=costs,
        )


class Search:
    """Finds the best of some recipes; each is played against a text once.

    The target is not asked: greedily it says the known text, whatever was drafted for it.

    Args:
        drafters: The models that draft.
        texts: Some are enough for most recipes, all decide between the last.
    """

    def __init__(self, drafters: Mapping[str, Backend], texts: Sequence[KnownText]) -> None:
        self._drafters = drafters
        self._texts = texts
        self._played: dict[tuple[Recipe, int], Tally] = {}

    def best(self, recipes: Sequence[Recipe], *, costs: Mapping[str, float]) -> Recipe:
        """Return the one with the largest improvement, at these costs of drafters' forwards."""

        def improvement(recipe: Recipe, text_count: int) -> float:
            return self.tally(recipe, text_count).improvement(costs)

        return halved(recipes, text_count=len(self._texts), score=improvement)

    def tally(self, recipe: Recipe, text_count: int | None = None) -> Tally:
        """Return what the first texts take with a recipe; None: all of them."""
        places = range(len(self._texts))[:text_count]
        return sum((self._play(recipe, place) for place in places), Tally())

    def _play(self, recipe: Recipe, place: int) -> Tally:
        key = recipe, place
        if key not in self._played:
            self._played[key] = _played(self._drafters, recipe, self._texts[place])
        return self._played[key]


def halved(
    recipes: Sequence[Recipe], *, text_count: int, score: Callable[[Recipe, int], float]
) -> Recipe:
    """Return the best of some recipes: again and again the better half, on twice as many texts.

    Args:
        text_count: How many texts there are.
        score: Of a recipe on the first so many of them.
    """
    left, count = list(recipes), min(_FIRST_TEXTS, text_count)
    while count < text_count:
        scores = {recipe: score(recipe, count) for recipe in left}
        left = sorted(left, key=lambda recipe: -scores[recipe])[: ceil(len(left) / 2)]
        count = min(2 * count, text_count)
    return max(left, key=lambda recipe: score(recipe, text_count))


def measured_cost(target: Backend, drafter: Backend, prefix: Sequence[int]) -> float:
    """Return what the drafter's forward of one row takes of the target's; they take turns."""

    def forward_ms(model: Backend) -> float:
        return measure_rows(model, prefix, (1,), repeats=_COST_ROUNDS)[1]

    return median(forward_ms(drafter) / forward_ms(target) for _ in range(_COST_ROUNDS))


def _played(drafters: Mapping[str, Backend], recipe: Recipe, text: KnownText) -> Tally:
    stack = _stack(drafters, recipe)
    known, end = [*text.prompt, *text.continuation], len(text.prompt)
    spec = SessionSpec(reserve_length=len(known) + recipe.lookahead)
    draft = text_alone() if stack is None else ModelText(stack, spec).draft_chain
    forwards = 0
    while end < len(known):
        # A verification gives one token more than it accepts.
        block = draft(known[:end], count=min(recipe.lookahead, len(known) - end - 1))
        end += common_run(block, known[end:]) + 1
        forwards += 1
    ran = stack.forward_counts if stack else ()
    return Tally(
        len(text.continuation), forwards, Counter(dict(zip(recipe.models, ran, strict=True)))
    )


def _stack(drafters: Mapping[str, Backend], recipe: Recipe) -> StackBackend | None:
    if not recipe.models:
        return None
    return StackBackend(
        [drafters[model] for model in recipe.models],
        matrix=recipe.matrix,
        new_max_gram=MaxGram if recipe.has_max_gram else None,
    )
