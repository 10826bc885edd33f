"""What becomes of looking for servers, counted."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


class DiscoveryMetrics:
    """What becomes of looking for servers, by what is looked for.

    Args:
        registry: Where metrics are kept.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.age = Gauge(
            "paceline_discovery_last_event_age_seconds",
            "Since the cluster's API or DNS last told anything: the view may be as old as this",
            ["of"],
            registry=registry,
        )
        self.relists = Counter(
            "paceline_discovery_relists",
            "Times that all endpoints were listed anew, the first included",
            ["of"],
            registry=registry,
        )
        self.failures = Counter(
            "paceline_discovery_failures",
            "Attempts that brought nothing, by HTTP status or kind",
            ["of", "reason"],
            registry=registry,
        )


class WatchMetrics:
    """What becomes of looking for one kind of servers.

    Args:
        metrics: Where it is counted.
        of: What is looked for: "models" or "orchestrators".
    """

    def __init__(self, metrics: DiscoveryMetrics, *, of: str) -> None:
        self._metrics = metrics
        self._of = of
        self._heard_at = time.monotonic()
        metrics.age.labels(of).set_function(lambda: time.monotonic() - self._heard_at)

    def heard(self) -> None:
        """Note a sign of life."""
        self._heard_at = time.monotonic()

    def listed(self) -> None:
        """Count a list."""
        self._metrics.relists.labels(self._of).inc()

    def failed(self, reason: str) -> None:
        """Count a failure."""
        self._metrics.failures.labels(self._of, reason).inc()
