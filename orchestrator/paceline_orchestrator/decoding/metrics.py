"""What an orchestrator counts of its requests."""

from __future__ import annotations

import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol

from prometheus_client import Counter, Gauge, Histogram

from paceline_serving.telemetry import LATENCY_BUCKETS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import CollectorRegistry

    from paceline_orchestrator.decoding.statistics import Statistics
    from paceline_protocol.methods import Strategy

_RATE_BUCKETS = tuple(step / 10 for step in range(1, 11))
# Seconds. On one machine a hop takes 0.3 ms.
_HOP_BUCKETS = (0.0001, 0.00025, *LATENCY_BUCKETS)
_SPEED_UP_BUCKETS = (0.5, 0.75, 0.9, 1, 1.1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4, 6, 8, 12, 16, 32)
_TARGET_BUCKETS = (*range(1, 9), 12, 16, 24, 32, 64)
# A series stays for as long as the process, and a server can say another name every minute.
_MOST_MODELS = 64
_OTHER_MODELS = "other"


class _Served(Protocol):
    """A request that is being served, or was."""

    @property
    def strategy(self) -> Strategy: ...
    @property
    def targets_used(self) -> int: ...
    @property
    def speed_up(self) -> float | None: ...
    def statistics(self) -> Statistics: ...


class RequestMetrics:
    """Prometheus metrics; labels come from fixed sets, and 64 models' names from the servers."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._models: set[str] = set()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        seconds = partial(histogram, buckets=LATENCY_BUCKETS)
        self._incoming = counter("paceline_incoming_requests", "Requests, refused ones included")
        self._running = gauge("paceline_num_requests_running", "Requests being served")
        self._waiting = gauge(
            "paceline_num_requests_waiting", "Requests that wait for their turn or a LoRA adapter"
        )
        self._queue = seconds(
            "paceline_queue_seconds", "What a request waited for its turn before it was worked on"
        )
        self._duration = seconds(
            "paceline_request_duration_seconds", "From a request's arrival to its end"
        )
        self._first_token = seconds(
            "paceline_time_to_first_token_seconds", "From a request's arrival to its first token"
        )
        self._token_gap = seconds(
            "paceline_inter_token_latency_seconds",
            "From one final token to the next; those that became final together share the time",
        )
        self._hop = histogram(
            "paceline_rpc_hop_seconds",
            "From a call to its first answer, less its server's queue and forwards",
            ["rpc"],
            buckets=_HOP_BUCKETS,
        )
        self._parallelism = histogram(
            "paceline_speculation_parallelism",
            "The most targets that verified for a request at the same time",
            buckets=_TARGET_BUCKETS,
        )
        self._speed_up = histogram(
            "paceline_speedup_vs_autoregressive",
            "Expected time of a token decoded plainly, over what tokens after the first took",
            ["strategy"],
            buckets=_SPEED_UP_BUCKETS,
        )
        self._walltime_improvement = histogram(
            "paceline_request_walltime_improvement",
            "SWI of a request all of whose calls said what they ran",
            ["strategy"],
            buckets=_SPEED_UP_BUCKETS,
        )
        self._acceptance_rate = histogram(
            "paceline_request_spec_decode_acceptance_rate",
            "Share of a request's judged draft tokens that were accepted",
            buckets=_RATE_BUCKETS,
        )
        self._drafted = counter("paceline_spec_decode_num_draft_tokens", "Draft tokens received")
        self._accepted = counter(
            "paceline_spec_decode_num_accepted_tokens", "Draft tokens that became output"
        )
        self._wasted = counter(
            "paceline_spec_decode_num_wasted_tokens",
            "Draft tokens that became no output",
            ["reason"],
        )
        self._forced = counter(
            "paceline_forced_tokens",
            "Draft tokens that a grammar forced, so that no forward found them",
        )
        self._forced_accepted = counter(
            "paceline_forced_tokens_accepted",
            "Tokens of the output that a grammar had forced, as draft tokens",
        )
        self._branch_rows = counter(
            "paceline_branch_rows",
            "Tokens beside drafters' chains that targets were given to judge",
        )
        self._branch_rows_accepted = counter(
            "paceline_branch_rows_accepted", "Of these, tokens that became output"
        )
        self._corrections_ahead = counter(
            "paceline_corrections_ahead", "Corrections that a drafter had found as a runner-up"
        )
        self._fallbacks = counter(
            "paceline_fallbacks", "What did not go as planned, and cost no token", ["kind"]
        )
        self._drafter_forwards = counter(
            "paceline_drafter_forwards",
            "Forwards of drafters' models whose answers arrived",
            ["model"],
        )
        self._cancelled = counter(
            "paceline_worthless_rpcs_cancelled",
            "Calls cancelled because a rejection made them worthless",
        )

    def arrived(self) -> None:
        """Count a request, whatever becomes of it."""
        self._incoming.inc()

    def waiting(self, count: int) -> None:
        """So many requests wait for their turn now."""
        self._waiting.set(count)

    def waited(self, seconds: float) -> None:
        """Measure what a request waited until it was worked on."""
        self._queue.observe(seconds)

    def token_gaps(self, count: int, *, gap_ns: int) -> None:
        """Measure tokens that became final together, `gap_ns` after those before them.

        The first token of a request follows none, and is not among them.
        """
        for _ in range(count):
            self._token_gap.observe(gap_ns / count / 1e9)

    def hop(self, rpc: str, hop_ns: int) -> None:
        """Measure a call's way to its server and back."""
        self._hop.labels(rpc).observe(hop_ns / 1e9)

    @contextmanager
    def request(self, served: _Served, *, arrived_ns: int) -> Iterator[None]:
        """Measure a request that is being served, and that came then (perf_counter_ns)."""
        self._running.inc()
        try:
            yield
        finally:
            self._running.dec()
            self._duration.observe((time.perf_counter_ns() - arrived_ns) / 1e9)
            self._count(served)

    def _count(self, served: _Served) -> None:
        took = served.statistics()
        if took.time_to_first_token_ns:
            self._first_token.observe(took.time_to_first_token_ns / 1e9)
        if took.drafts.accepted + took.drafts.rejected:
            self._acceptance_rate.observe(took.drafts.acceptance_rate)
        if (speed_up := served.speed_up) is not None:
            self._speed_up.labels(served.strategy.value).observe(speed_up)
        if improvement := took.walltime_improvement:
            self._walltime_improvement.labels(served.strategy.value).observe(improvement)
        if served.targets_used:
            self._parallelism.observe(served.targets_used)
        self._drafted.inc(took.drafts.drafted)
        self._accepted.inc(took.drafts.accepted)
        self._wasted.labels("rejected").inc(took.drafts.rejected)
        self._wasted.labels("discarded").inc(took.drafts.discarded)
        self._forced.inc(took.forced_drafted)
        self._forced_accepted.inc(took.forced_accepted)
        self._branch_rows.inc(took.drafts.branch_judged)
        self._branch_rows_accepted.inc(took.drafts.branch_accepted)
        self._corrections_ahead.inc(took.drafts.corrections_ahead)
        self._cancelled.inc(took.cancelled_count)
        for model, ran in took.drafter_models.items():
            self._drafter_forwards.labels(self._label_of(model)).inc(ran.forward_count)
        for kind, count in took.fallbacks.items():
            self._fallbacks.labels(kind.value).inc(count)

    def _label_of(self, model: str) -> str:
        """Return a drafter model's name, or that of all models beyond the first ones."""
        if len(self._models) < _MOST_MODELS:
            self._models.add(model)
        return model if model in self._models else _OTHER_MODELS
