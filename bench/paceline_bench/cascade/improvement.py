"""What forwards alone make of a variant of decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def walltime_improvement(
    token_count: int,
    *,
    target_forwards: int,
    drafter_forwards: Mapping[str, int],
    costs: Mapping[str, float],
) -> float:
    """Return the standardised walltime improvement: how many times as fast as plain decoding.

    Forwards alone count, and each as one, however many rows it has; Max-Gram costs nothing.

    Difference: the paper's formula sums over tokens where it means drafters.

    Args:
        token_count: New tokens.
        target_forwards: Of the target.
        drafter_forwards: Of each model that drafts.
        costs: Of a forward of each of them, as a part of the target's.
    """
    spent = sum(costs[model] * count for model, count in drafter_forwards.items())
    return token_count / (target_forwards + spent)
