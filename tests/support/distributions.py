"""Whether samples come from a distribution: Pearson's test, its false alarms and its power."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

Outcome = TypeVar("Outcome")

# The chi-square approximation is good where every cell is expected at least this often.
_SMALLEST_EXPECTED = 5.0


@dataclass(frozen=True)
class Fit:
    """How well counts fit a distribution.

    Attributes:
        p_value: The chance of a fit at least as bad if the distribution is the right one.
        sample_count: Samples.
        cell_count: Outcomes told apart; the rare ones are pooled into one.
    """

    p_value: float
    sample_count: int
    cell_count: int

    def detected_distance(self, *, false_alarm: float, power: float = 0.99) -> float:
        """Return the total variation distance from which on a wrong source is found out.

        A source at distance d in these cells has a chi-square divergence of at least 4 d^2
        (Cauchy-Schwarz), so the statistic is noncentral with at least 4 d^2 n; both tails are taken
        as normal with the exact first two moments.
        """
        freedom = self.cell_count - 1
        critical = _inverse(false_alarm, freedom)
        quantile = math.sqrt(2) * torch.erfinv(torch.tensor(2 * power - 1)).item()
        shift = 1.0
        while freedom + shift - quantile * math.sqrt(2 * (freedom + 2 * shift)) < critical:
            shift *= 1.01
        return math.sqrt(shift / (4 * self.sample_count))


def fit(counts: Mapping[Outcome, int], probabilities: Mapping[Outcome, float]) -> Fit:
    """Test counts against a distribution; an impossible outcome gives a p-value of 0."""
    sample_count = sum(counts.values())
    assert math.isclose(sum(probabilities.values()), 1.0, abs_tol=1e-6)
    if any(probabilities.get(outcome, 0.0) == 0.0 for outcome in counts):
        return Fit(0.0, sample_count, len(probabilities))
    statistic, cell_count, pooled_count, pooled_expected = 0.0, 0, 0, 0.0
    for outcome, probability in probabilities.items():
        expected, count = sample_count * probability, counts.get(outcome, 0)
        if expected < _SMALLEST_EXPECTED:
            pooled_expected, pooled_count = pooled_expected + expected, pooled_count + count
        else:
            statistic, cell_count = statistic + (count - expected) ** 2 / expected, cell_count + 1
    if pooled_expected >= _SMALLEST_EXPECTED:
        statistic += (pooled_count - pooled_expected) ** 2 / pooled_expected
        cell_count += 1
    return Fit(_tail(statistic, cell_count - 1), sample_count, cell_count)


def _tail(statistic: float, freedom: int) -> float:
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return torch.special.gammaincc(half[0], half[1]).item()


def _inverse(tail: float, freedom: int) -> float:
    low, high = 0.0, 10.0 * freedom + 200.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _tail(middle, freedom) > tail else (low, middle)
    return high
