"""A model server's reports: metrics, and on request the last calls one by one.

Sizes and times only: never token ids; a session appears as a digest of its handle.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, fields
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.registry import Collector

from paceline.errors import SupersededError
from paceline_serving.telemetry import LATENCY_BUCKETS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

    from paceline_contract.calls import CallTiming, PrefixCall
    from paceline_engine.sessions.host import ModelHost

_KEPT_CALLS = 1024
_SESSION_DIGITS = 12
_COUNTED_POSITIONS = 16
"""The most positions of a block with a time series: later ones are accepted too rarely."""


@dataclass(slots=True)
class CallRecord:
    """One call that was served, or is being served.

    Attributes:
        method: "Verify", "Decode" or "Draft".
        session: Names the session without being its handle.
        start_ns: When it arrived, on the machine's monotonic clock, which all processes share.
        rows: Token positions asked for: appended and draft tokens; of a Draft or Decode the tokens
            found.
        end_ns: When it ended; 0 while it runs.
        queue_ns: How long it waited; known for answered calls only.
        forward_ns: How long its forwards took; known for answered calls only.
        outcome: "running", "ok", "cancelled", "superseded" or "failed".
        accepted: Draft tokens accepted.
        is_tree: Whether a tree was judged.
        runners_up: Accepted tokens that were not the first of their siblings.
    """

    method: str
    session: str
    sequence: int
    depth: int
    start_ns: int
    rows: int
    end_ns: int = 0
    queue_ns: int = 0
    forward_ns: int = 0
    outcome: str = "running"
    accepted: int = 0
    is_tree: bool = False
    runners_up: int = 0


_RECORDED = tuple(field.name for field in fields(CallRecord))


class CallRecorder:
    """Records calls as they are served.

    `paceline_wasted_tokens_total` counts the token positions a target was asked for in vain, by
    reason: draft tokens that it "rejected"; and all positions of a Verify that was "superseded", or
    "cancelled" by its caller or its deadline, computed already or not. A call whose work a newer
    one took over wastes nothing. A drafter counts nothing: the orchestrator alone knows which draft
    tokens helped.

    Args:
        role: "drafter" or "target".
        keep: Whether to remember the last calls, for `recent`.
    """

    def __init__(self, registry: CollectorRegistry, *, role: str, keep: bool = False) -> None:
        self._role = role
        self._recent: deque[CallRecord] = deque(maxlen=_KEPT_CALLS if keep else 0)
        self._forward_seconds = Histogram(
            "paceline_forward_seconds",
            "Model forwards of answered calls",
            ["role", "phase"],
            registry=registry,
            buckets=LATENCY_BUCKETS,
        )
        self._queue_seconds = Histogram(
            "paceline_queue_seconds",
            "Time that answered calls waited for the model",
            ["role"],
            registry=registry,
            buckets=LATENCY_BUCKETS,
        )
        self._wasted = Counter(
            "paceline_wasted_tokens",
            "Token positions asked for in vain",
            ["role", "reason"],
            registry=registry,
        )
        self._accepted = Counter(
            "paceline_spec_decode_num_accepted_tokens_per_pos",
            f"Draft tokens accepted, by their position in the block, below {_COUNTED_POSITIONS}",
            ["role", "position"],
            registry=registry,
        )

    @contextmanager
    def record(
        self, method: str, call: PrefixCall, *, depth: int, rows: int
    ) -> Iterator[CallRecord]:
        """Record a call until the `with` block ends in any way."""
        entry = CallRecord(
            method=method,
            session=sha256(call.session_id.encode()).hexdigest()[:_SESSION_DIGITS],
            sequence=call.sequence,
            depth=depth,
            start_ns=time.monotonic_ns(),
            rows=rows,
        )
        self._recent.append(entry)
        outcome, wasted_rows = "failed", 0
        try:
            yield entry
            outcome = "ok"
        except (asyncio.CancelledError, GeneratorExit):
            outcome, wasted_rows = "cancelled", entry.rows
            raise
        except SupersededError as error:
            outcome = "superseded"
            wasted_rows = 0 if "taken_over_by" in error.metadata else entry.rows
            raise
        finally:
            entry.end_ns, entry.outcome = time.monotonic_ns(), outcome
            if method == "Verify" and wasted_rows:
                self._wasted.labels(self._role, outcome).inc(wasted_rows)

    def count_answer(self, entry: CallRecord, timing: CallTiming, *, phase: str) -> None:
        """Count an answer's times. Phases: "prefill", "draft", "decode", "verify"."""
        entry.queue_ns += timing.queue_ns
        entry.forward_ns += timing.forward_ns
        self._queue_seconds.labels(self._role).observe(timing.queue_ns / 1e9)
        seconds = self._forward_seconds.labels(self._role, phase)
        for _ in range(timing.forward_count):
            seconds.observe(timing.forward_ns / timing.forward_count / 1e9)

    def count_verdict(self, entry: CallRecord, *, drafted_count: int, accepted_count: int) -> None:
        """Count the accepted and rejected draft tokens of a block."""
        entry.accepted = accepted_count
        self._wasted.labels(self._role, "rejected").inc(drafted_count - accepted_count)
        for position in range(min(accepted_count, _COUNTED_POSITIONS)):
            self._accepted.labels(self._role, str(position)).inc()

    def recent(self) -> list[dict[str, Any]]:
        """Return the last calls, oldest first; empty unless they are kept."""
        return [{name: getattr(entry, name) for name in _RECORDED} for entry in list(self._recent)]


class HostCollector(Collector):
    """Shows a host's own statistics, looked up at each scrape."""

    def __init__(self, host: ModelHost, *, role: str) -> None:
        self._host = host
        self._role = role

    def collect(self) -> Iterable[Metric]:
        """Read the statistics once, and name each of them."""
        now, limits = self._host.statistics(), self._host.limits
        usage = now.tokens_reserved / max(1, limits.token_budget)
        for name, text, value in (
            ("sessions_active", "Sessions open", now.sessions_open),
            ("num_requests_waiting", "Calls in the queue", now.queue_length),
            ("num_requests_running", "Forwards at the model", now.forwards_running),
            ("calls_live", "Calls waiting or running", now.calls_live),
            (
                "forward_overdue_seconds",
                "How long the running forward has taken, if it counts as hung; else 0",
                self._host.overdue_seconds(),
            ),
            ("kept_tokens", "Tokens that ended sessions' texts have memory for", now.tokens_kept),
            ("kv_cache_usage_perc", "Reserved part of the token budget, 0 to 1", usage),
        ):
            yield self._metric(GaugeMetricFamily, name, text=text, value=value)
        drafted = now.draft_tokens + now.judged_tokens
        for name, text, value in (
            ("sessions_opened", "Sessions opened", now.sessions_opened),
            ("sessions_released", "Sessions closed or expired", now.sessions_released),
            ("forwards", "Model forwards that ran to their end", now.forwards),
            ("forward_calls", "Calls that had a part in them", now.items),
            ("forward_rows", "Token positions computed in them", now.rows),
            ("prefill_parts", "Parts of them that were no whole prompt", now.prefill_parts),
            ("forwards_interrupted", "Model forwards given up", now.forwards_interrupted),
            (
                "wasted_forward_seconds",
                "Time in forwards that nobody waited for when they ended",
                now.wasted_ns / 1e9,
            ),
            ("layers_run", "Layers that forwards went through", now.layers_run),
            ("reused_tokens", "Prompt tokens that had been computed before", now.tokens_reused),
            ("calls_refused", "Calls refused before the queue", now.calls_refused),
            ("calls_adopted", "Calls that took over an older one's place", now.calls_adopted),
            (
                "calls_anticipated",
                "Calls whose forward had begun before they came",
                now.calls_anticipated,
            ),
            ("calls_superseded", "Calls that a newer one replaced", now.calls_superseded),
            ("calls_cancelled", "Calls cancelled by their caller", now.calls_cancelled),
            ("spec_decode_num_drafts", "Windows drafted", now.draft_calls),
            ("spec_decode_num_draft_tokens", "Draft tokens found, or judged", drafted),
            ("spec_decode_num_accepted_tokens", "Draft tokens accepted", now.accepted_tokens),
            (
                "forced_tokens",
                "Tokens that a grammar forced, proposed without a forward",
                now.forced_tokens,
            ),
            ("self_draft_num_proposed_tokens", "Own guesses proposed", now.guesses_proposed),
            ("self_draft_num_judged_tokens", "Own guesses judged", now.guesses_judged),
            ("self_draft_num_pruned_tokens", "Own guesses pruned", now.guesses_pruned),
            ("self_draft_num_accepted_tokens", "Own guesses accepted", now.guesses_accepted),
        ):
            yield self._metric(CounterMetricFamily, name, text=text, value=value)
        stages = CounterMetricFamily(
            "paceline_stage_forwards",
            "Forwards of each model of a drafter's stack",
            labels=["role", "stage", "model"],
        )
        for stage, (model, count) in enumerate(now.model_forwards):
            stages.add_metric([self._role, str(stage), model], count)
        yield stages
        freeing = SummaryMetricFamily(
            "paceline_cancel_to_free_seconds",
            "How long a forward went on after nobody waited for it any more",
            labels=["role"],
        )
        freeing.add_metric(
            [self._role], count_value=now.forwards_wasted, sum_value=now.freeing_ns / 1e9
        )
        yield freeing
        yield self._metric(
            CounterMetricFamily,
            "sessions_evicted",
            text="Sessions that nobody closed",
            value=now.sessions_expired,
            reason="lease",
        )

    def _metric(
        self, kind: Callable[..., Any], name: str, *, text: str, value: float, **labels: str
    ) -> Metric:
        family = kind(f"paceline_{name}", text, labels=["role", *labels])
        family.add_metric([self._role, *labels.values()], value)
        metric: Metric = family
        return metric
