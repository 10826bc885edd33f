"""A straight line through measurements."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def fitted_slope(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the slope of the line of least squares, and its standard error.

    Args:
        points: Three or more, with at least two different first coordinates.
    """
    slope, intercept = statistics.linear_regression(*zip(*points, strict=True))
    mean = statistics.fmean(x for x, _ in points)
    width = sum((x - mean) ** 2 for x, _ in points)
    residue = sum((y - intercept - slope * x) ** 2 for x, y in points)
    return slope, math.sqrt(residue / (len(points) - 2) / width)
