"""The HorizontalPodAutoscaler, simulated: an external metric with a target for each replica.

As Kubernetes documents its algorithm: value over target, tolerance, stabilisation windows, then
policies, then the limits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

_SYNC_SECONDS = 15


@dataclass
class Autoscaler:
    """One target of scaling; the defaults are those of our chart.

    Attributes:
        least: Fewest replicas.
        most: Most replicas.
        tolerance: By how much of the present number a wish must differ.
        up_pods: Replicas that can be added in 15 s.
        down_pods: Replicas that can be taken away in a minute.
        down_window_seconds: How long fewer must have been enough.
        replicas: How many there are.
    """

    least: int
    most: int
    tolerance: Fraction = Fraction(0)
    up_pods: int = 64
    down_pods: int = 64
    down_window_seconds: int = 300
    replicas: int = 1
    _now: int = 0
    _wishes: list[tuple[int, int]] = field(default_factory=list)
    _removed: list[tuple[int, int]] = field(default_factory=list)

    def sync(self, value: int | None) -> int:
        """Look at the metric once, 15 s after the last time; None is a metric that is not there."""
        self._now += _SYNC_SECONDS
        if value is not None:
            self._scale(self._wish(value))
        return self.replicas

    def _wish(self, value: int) -> int:
        ratio = Fraction(value, self.replicas)  # the target for each replica is 1
        within = abs(ratio - 1) <= self.tolerance
        wish = self.replicas if within else math.ceil(value)
        self._wishes.append((self._now, wish))
        self._wishes = [
            (at, it) for at, it in self._wishes if at > self._now - self.down_window_seconds
        ]
        lately = max((it for _, it in self._wishes), default=wish)
        return wish if wish >= self.replicas else min(lately, self.replicas)

    def _scale(self, wish: int) -> None:
        self._removed = [(at, it) for at, it in self._removed if at > self._now - 60]
        gone = sum(it for _, it in self._removed)
        most = min(self.most, self.replicas + self.up_pods)
        fewest = max(self.least, self.replicas - max(0, self.down_pods - gone))
        before, self.replicas = self.replicas, max(fewest, min(most, wish))
        if self.replicas < before:
            self._removed.append((self._now, before - self.replicas))
