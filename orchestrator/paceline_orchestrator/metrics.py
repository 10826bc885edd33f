"""What an orchestrator counts of its requests."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge, Histogram

from paceline_serving.telemetry import LATENCY_BUCKETS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import CollectorRegistry

    from paceline_orchestrator.generation import Generation

__all__ = ["RequestMetrics"]

_RATE_BUCKETS = tuple(step / 10 for step in range(1, 11))


class RequestMetrics:
    """Prometheus metrics; labels come from fixed sets."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._incoming = Counter(
            "paceline_incoming_requests", "Requests, refused ones included", registry=registry
        )
        self._running = Gauge(
            "paceline_num_requests_running", "Requests being served", registry=registry
        )
        self._duration = Histogram(
            "paceline_request_duration_seconds",
            "From a request's arrival to its end",
            registry=registry,
            buckets=LATENCY_BUCKETS,
        )
        self._first_token = Histogram(
            "paceline_time_to_first_token_seconds",
            "From a request's arrival to its first token",
            registry=registry,
            buckets=LATENCY_BUCKETS,
        )
        self._acceptance_rate = Histogram(
            "paceline_request_spec_decode_acceptance_rate",
            "Share of a request's judged draft tokens that were accepted",
            registry=registry,
            buckets=_RATE_BUCKETS,
        )
        self._drafted = Counter(
            "paceline_spec_decode_num_draft_tokens", "Draft tokens received", registry=registry
        )
        self._accepted = Counter(
            "paceline_spec_decode_num_accepted_tokens",
            "Draft tokens that became output",
            registry=registry,
        )
        self._wasted = Counter(
            "paceline_wasted_tokens",
            "Draft tokens that became no output",
            ["reason"],
            registry=registry,
        )
        self._fallbacks = Counter(
            "paceline_fallbacks",
            "What did not go as planned, and cost no token",
            ["kind"],
            registry=registry,
        )
        self._cancelled = Counter(
            "paceline_worthless_rpcs_cancelled",
            "Calls cancelled because a rejection made them worthless",
            registry=registry,
        )

    def refused(self) -> None:
        """Count a request that was not admitted."""
        self._incoming.inc()

    @contextmanager
    def request(self, generation: Generation) -> Iterator[None]:
        """Count a request that is being served, and in the end what it took."""
        self._incoming.inc()
        self._running.inc()
        started = time.perf_counter()
        try:
            yield
        finally:
            self._running.dec()
            self._duration.observe(time.perf_counter() - started)
            self._count(generation)

    def _count(self, generation: Generation) -> None:
        took = generation.statistics()
        if took.time_to_first_token_ns:
            self._first_token.observe(took.time_to_first_token_ns / 1e9)
        if took.accepted_token_count + took.rejected_token_count:
            self._acceptance_rate.observe(took.acceptance_rate)
        self._drafted.inc(took.drafted_token_count)
        self._accepted.inc(took.accepted_token_count)
        self._wasted.labels("rejected").inc(took.rejected_token_count)
        self._wasted.labels("discarded").inc(took.discarded_token_count)
        self._cancelled.inc(took.cancelled_rpc_count)
        for fallback in took.fallbacks:
            self._fallbacks.labels(fallback.kind).inc(fallback.count)
