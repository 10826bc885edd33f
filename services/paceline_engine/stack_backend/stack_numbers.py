"""The costs of a stack's models and how often its stages agree, measured while it drafts."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from paceline_engine.scheduling.latencies import LatencyMeter, measure
from paceline_engine.stack_backend.ewif import choose_matrix
from paceline_engine.terms.latencies import StageMeasures

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_engine.deciding.cascade import Matrix, ReviewTask
    from paceline_engine.terms.backend import Backend, Interrupt

_log = logging.getLogger(__name__)

_ROUNDS = 2
_REVIEWS_BETWEEN = 64
"""The matrix is chosen again after so many reviews."""
# The prior: a usual acceptance of models and of Max-Gram, with the weight of so many tokens.
_MODEL_ACCEPTANCE, _MAX_GRAM_ACCEPTANCE = 0.6, 0.3
_PRIOR_TOKENS = 20.0
_MOST_JUDGED = 2000.0
"""Beyond so many tokens, older ones count half, because acceptance changes over time."""


class MeasuredStack:
    """The numbers of one stack: `ewif.StackNumbers`. Worker thread only."""

    def __init__(self, models: Sequence[Backend], *, has_max_gram: bool) -> None:
        """Build it without measurements.

        Args:
            models: Largest first.
            has_max_gram: Whether Max-Gram is one more stage, which costs nothing.
        """
        self._models = models
        self.model_count = len(models)
        self.stage_count = len(models) + has_max_gram
        self._meters = [LatencyMeter() for _ in models]
        self._judged: dict[tuple[int, int], float] = {}
        self._accepted: dict[tuple[int, int], float] = {}
        self._unread = 0
        self._matrix: Matrix | None = None

    def measure(self, interrupt: Interrupt) -> None:
        """Measure each model's forwards."""
        for model, meter in zip(self._models, self._meters, strict=True):
            measure(model, meter, rounds=_ROUNDS, interrupt=interrupt)

    def record(self, stage: int, row_count: int, forward_ns: int) -> None:
        """Record a forward."""
        self._meters[stage].record(row_count, forward_ns)

    def judge(self, task: ReviewTask, *, accepted_count: int) -> None:
        """Record a review of a chain: tokens after the first rejected one were not judged."""
        for index, draw in enumerate(task.draws[: accepted_count + 1]):
            if draw.is_forced:
                continue  # which says nothing about the stage
            pair = task.stage, draw.stage
            self._judged[pair] = self._judged.get(pair, 0.0) + 1
            self._accepted[pair] = self._accepted.get(pair, 0.0) + (index < accepted_count)
            if self._judged[pair] > _MOST_JUDGED:
                self._judged[pair] /= 2
                self._accepted[pair] /= 2
        self._unread += 1
        if self._matrix is not None and self._unread >= _REVIEWS_BETWEEN:
            self._matrix = self._choose()

    def cost_ns(self, stage: int, row_count: int) -> float:
        """Return the time of a model's forward; 1 before any measurement."""
        return self._meters[stage].cost_ns(row_count) or 1.0

    def acceptance(self, reviewer: int, drafter: int) -> float:
        """Return how often a stage accepts another one's token."""
        prior = _MODEL_ACCEPTANCE if drafter < self.model_count else _MAX_GRAM_ACCEPTANCE
        judged = self._judged.get((reviewer, drafter), 0.0) + _PRIOR_TOKENS
        accepted = self._accepted.get((reviewer, drafter), 0.0) + prior * _PRIOR_TOKENS
        return accepted / judged

    def measures(self, names: Sequence[str]) -> tuple[StageMeasures, ...]:
        """Return the measurements of each stage. May be called on any thread."""
        stages = range(self.stage_count)
        return tuple(
            StageMeasures(
                names[stage],
                self._meters[stage].latencies().forwards if stage < self.model_count else (),
                tuple(self._verdicts(stage, drafter) for drafter in stages[stage + 1 :]),
            )
            for stage in stages
        )

    def _verdicts(self, reviewer: int, drafter: int) -> tuple[int, int]:
        pair = reviewer, drafter
        return round(self._judged.get(pair, 0)), round(self._accepted.get(pair, 0))

    def matrix(self) -> Matrix:
        """Return the matrix with which the largest model drafts fastest by recent measurements."""
        if self._matrix is None:
            self._matrix = self._choose()
        return self._matrix

    def _choose(self) -> Matrix:
        self._unread = 0
        chosen = choose_matrix(self)
        if self._matrix is not None and chosen != self._matrix:
            _log.info("cascade", extra={"matrix": str(chosen)})
        return chosen
