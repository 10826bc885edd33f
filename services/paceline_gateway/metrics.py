"""A gateway's metrics."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge, Histogram

from paceline_serving.telemetry import LATENCY_BUCKETS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client import CollectorRegistry

LEFT = 499  # the client left; the status is never sent


class GatewayMetrics:
    """Requests by route and status; labels come from fixed sets."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "paceline_http_requests",
            "Requests answered; 499 where the client went away first",
            ["route", "status"],
            registry=registry,
        )
        self._seconds = Histogram(
            "paceline_http_seconds",
            "Time from a request's head to the end of its answer",
            ["route"],
            registry=registry,
            buckets=LATENCY_BUCKETS,
        )
        self._in_flight = Gauge(
            "paceline_http_in_flight", "Requests being answered", ["route"], registry=registry
        )
        self._resumed = Counter(
            "paceline_http_resumed_generations",
            "How often a generation went on at another orchestrator",
            registry=registry,
        )

    @contextmanager
    def request(self, route: str, status: Callable[[], int]) -> Iterator[None]:
        """Count a request with its final status; 0: no status was sent."""
        started = time.perf_counter()
        in_flight = self._in_flight.labels(route)
        in_flight.inc()
        try:
            yield
        finally:
            self._seconds.labels(route).observe(time.perf_counter() - started)
            self._requests.labels(route, str(status() or LEFT)).inc()
            in_flight.dec()

    def resumed(self) -> None:
        """Count a resumption."""
        self._resumed.inc()
