"""Noise bits as a standard Gumbel variable, one at a time; see deciding/noise.py."""

from __future__ import annotations

import math


def gumbel(bits: int) -> float:
    return -math.log(-math.log(bits * 2.0**-53))
