"""The expected speedup of a cascade: EWIF, the expected walltime improvement factor.

Chen et al. 2023, "Cascade Speculative Drafting" (arXiv 2312.11462), section 4. Acceptances are the
probability that the reviewer accepts a token if it has accepted all tokens before; costs are parts
of the reviewer's own forward, except in arguments named `*_ns`. Plain decoding has the factor 1.
"""

from __future__ import annotations

from itertools import accumulate, product
from operator import mul
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_engine.deciding.cascade import Matrix

_COUNTS = (0, 1, 2, 3, 4, 6, 8, 10, 12, 16)


def chain_factor(acceptances: Sequence[float], *, costs: Sequence[float]) -> float:
    """Return the EWIF of a chain of draft tokens, each by a drafter of its own (Theorem 4.1).

    Args:
        acceptances: The acceptance of each token.
        costs: The cost to draft each token.
    """
    return _expected_tokens(acceptances) / (1 + sum(costs))


class StackNumbers(Protocol):
    """The measurements of a stack of models; Max-Gram, if there is one, is the last stage."""

    @property
    def model_count(self) -> int:
        """How many stages are models."""

    @property
    def stage_count(self) -> int:
        """How many stages there are."""

    def cost_ns(self, stage: int, row_count: int) -> float:
        """Return the time of a model's forward."""

    def acceptance(self, reviewer: int, drafter: int) -> float:
        """Return how often a stage accepts another one's token."""


def choose_matrix(numbers: StackNumbers) -> Matrix:
    """Choose how many tokens each stage drafts for each, so that the largest drafts fastest.

    The stack knows nothing about the target. So only the largest model drafts for the target: its
    tokens come soonest, and no token of a smaller model replaces them.

    Cost: ten to the number of stages below the largest model, in evaluations of a formula.
    """
    rows, _ = _best_rows(numbers)
    return tuple(rows)


def best_rate(numbers: StackNumbers) -> float:
    """Return how many tokens the largest model drafts in a nanosecond with that matrix."""
    _, token_ns = _best_rows(numbers)
    return 1 / token_ns


def _best_rows(numbers: StackNumbers) -> tuple[list[tuple[int, ...]], float]:
    """Return the matrix, and the time of the largest model for a token with it."""
    size = numbers.stage_count
    rows: list[tuple[int, ...]] = [()] * size
    token_ns = [0.0] * size
    # From the last model up, because the time to draft a token decides how many are worth it.
    for reviewer in reversed(range(numbers.model_count)):
        stages = range(reviewer + 1, size)
        best, rate = (0,) * len(stages), 0.0
        for counts in product(_COUNTS, repeat=len(stages)):
            expected = _rate(counts, numbers, reviewer=reviewer, token_ns=token_ns)
            # More tokens have to gain more than rounding errors.
            if expected > rate * (1 + 1e-9):
                best, rate = counts, expected
        token_ns[reviewer] = 1 / rate
        if stages:
            rows[reviewer + 1] = (*(0,) * (reviewer + 1), *best)
    rows[0] = (1, *(0,) * (size - 1))
    return rows, token_ns[0]


def _rate(
    counts: Sequence[int], numbers: StackNumbers, *, reviewer: int, token_ns: Sequence[float]
) -> float:
    """Return the tokens that a model finds in a nanosecond, if the stages below draft so many."""
    drafters = [
        stage for stage, count in enumerate(counts, start=reviewer + 1) for _ in range(count)
    ]
    tokens = _expected_tokens([numbers.acceptance(reviewer, each) for each in drafters])
    spent_ns = numbers.cost_ns(reviewer, 1 + len(drafters))
    return tokens / (spent_ns + sum(token_ns[each] for each in drafters))


def _expected_tokens(acceptances: Sequence[float]) -> float:
    """Return how many tokens a review gives: the accepted ones, and one more."""
    return sum(accumulate(acceptances, mul, initial=1.0))
