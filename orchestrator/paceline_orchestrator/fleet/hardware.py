"""Shared hardware: servers that compute on it at the same time take time from each other."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline_contract.calls import Hardware

_ROUNDING = 1e-6  # shares come as 32-bit floats: three thirds are a little more than a whole


def count_side_by_side(targets: Iterable[Hardware | None], *, drafter: Hardware | None) -> int:
    """Count the targets that can compute beside the drafter and each other without loss.

    Args:
        targets: What each computes on, those first that are preferred; None shares nothing.
        drafter: What their drafter computes on.
    """
    taken: defaultdict[str, float] = defaultdict(float)
    count = 0
    if drafter is not None:
        taken[drafter.identity] += drafter.share
    for target in targets:
        if target is None:
            count += 1
        elif taken[target.identity] + target.share <= 1 + _ROUNDING:
            taken[target.identity] += target.share
            count += 1
    return count
