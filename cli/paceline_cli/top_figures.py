"""The figures of `paceline top`, computed from servers' metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline_local.metrics_samples import Readings

if TYPE_CHECKING:
    from collections.abc import Sequence

_GENERATE = "paceline.v1.OrchestratorService/Generate"
_ENDED_WELL = ("OK", "CANCELLED")


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """The service's figures. Rates are since the last snapshot; None: not known.

    Means and shares cover the same time, or all time since the servers started if nothing happened.

    Attributes:
        running: Requests that are being served.
        requests_per_second: Arrived requests.
        failures_per_second: Requests that ended with an error; cancelled ones do not count.
        tokens_per_second: Tokens that were sent to clients.
        first_token_seconds: From a request's arrival to its first token, the mean.
        token_gap_seconds: From one token to the next, the mean.
        hop_seconds: Network, gRPC and event loops of a call to a model server, the mean.
        speed_up: The expected time of plain decoding over the time of requests, the mean of the
            requests that ended.
        targets_per_stream: SP: the most targets that verified for a stream at the same time, the
            mean of the streams that ended.
        verifications: Verifications that run or wait at targets.
        acceptance_rate: Accepted share of the judged draft tokens, the mean of the requests that
            ended. Without an orchestrator's metrics: the accepted share of the blocks at targets,
            in which tokens after a rejection count, too.
        rejected_per_second: Draft tokens that a target rejected.
        discarded_per_second: Draft tokens that no target judged, since an earlier one was wrong.
        wasted_share: Rejected and discarded tokens, as a share of all draft tokens.
        corrections_per_second: Corrections that token trees found ahead.
        branch_rows_per_second: Rows of forwards for branches of trees.
        branch_won_share: The share of these rows whose tokens became output; None without any.
        cancelled_per_second: Calls that a rejection made useless.
        repairs_per_second: Fallbacks: deviations from the plan that cost no token.
        asked_targets: Targets that running streams can use, at the orchestrators that answered.
        wanted_targets: Targets that an autoscaler is asked for.
    """

    running: int | None = None
    requests_per_second: float | None = None
    failures_per_second: float | None = None
    tokens_per_second: float | None = None
    first_token_seconds: float | None = None
    token_gap_seconds: float | None = None
    hop_seconds: float | None = None
    speed_up: float | None = None
    targets_per_stream: float | None = None
    verifications: int | None = None
    acceptance_rate: float | None = None
    rejected_per_second: float | None = None
    discarded_per_second: float | None = None
    wasted_share: float | None = None
    corrections_per_second: float | None = None
    branch_rows_per_second: float | None = None
    branch_won_share: float | None = None
    cancelled_per_second: float | None = None
    repairs_per_second: float | None = None
    asked_targets: int | None = None
    wanted_targets: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of a server or a pool. None: not known, or not of this role.

    Attributes:
        sessions: Open sessions.
        running: Forwards at the model; an orchestrator's requests.
        waiting: Calls in the queue.
        forwards_per_second: Forwards that ran to their end.
        positions_per_second: Token positions computed in them.
        queue_seconds: Mean wait of a call in the queue.
        forward_seconds: Mean forward time of an answered call.
        accepted_share: Accepted part of the blocks and trees that a target answered. Tokens after
            a rejection count, so it is below the acceptance rate.
        wasted_per_second: Token positions that a target was asked for in vain.
        cancelled_per_second: Calls that were given up, or replaced by newer ones.
        memory_share: Reserved part of the token budget; for a pool, its fullest server's.
    """

    sessions: int | None = None
    running: int | None = None
    waiting: int | None = None
    forwards_per_second: float | None = None
    positions_per_second: float | None = None
    queue_seconds: float | None = None
    forward_seconds: float | None = None
    accepted_share: float | None = None
    wasted_per_second: float | None = None
    cancelled_per_second: float | None = None
    memory_share: float | None = None


def figures(role: str, parts: Sequence[Readings]) -> Figures:
    """Return the figures of several servers of one role."""
    if not parts:
        return Figures()
    readings = Readings.sum(parts)
    now = readings.now
    running = int(now.total("paceline_num_requests_running"))
    if role == "orchestrator":
        cancelled = readings.rate("paceline_worthless_rpcs_cancelled_total")
        return Figures(running=running, cancelled_per_second=cancelled)
    is_target = role == "target"
    return Figures(
        sessions=int(now.total("paceline_sessions_active")),
        running=running,
        waiting=int(now.total("paceline_num_requests_waiting")),
        forwards_per_second=readings.rate("paceline_forwards_total"),
        positions_per_second=readings.rate("paceline_forward_rows_total"),
        queue_seconds=readings.mean("paceline_queue_seconds"),
        forward_seconds=readings.mean("paceline_forward_seconds"),
        accepted_share=_accepted_share(readings) if is_target else None,
        wasted_per_second=readings.rate("paceline_wasted_tokens_total") if is_target else None,
        cancelled_per_second=readings.rate(
            "paceline_calls_cancelled_total", "paceline_calls_superseded_total"
        ),
        memory_share=max(it.now.total("paceline_kv_cache_usage_perc") for it in parts),
    )


def _accepted_share(targets: Readings) -> float | None:
    return targets.share(
        "paceline_spec_decode_num_accepted_tokens_total",
        of="paceline_spec_decode_num_draft_tokens_total",
    )


def totals(
    orchestrators: Sequence[Readings], targets: Sequence[Readings], *, told_running: int | None
) -> Totals:
    """Return the service's figures.

    Args:
        orchestrators: Readings of the orchestrators whose metrics are known.
        targets: Readings of the targets whose metrics are known.
        told_running: Running requests in the orchestrator's own report, without metrics.
    """
    if not orchestrators:
        accepted = _accepted_share(Readings.sum(targets))
        return Totals(running=told_running, acceptance_rate=accepted)
    readings = Readings.sum(orchestrators)
    now = readings.now
    rejected = readings.rate("paceline_spec_decode_num_wasted_tokens_total", reason="rejected")
    discarded = readings.rate("paceline_spec_decode_num_wasted_tokens_total", reason="discarded")
    return Totals(
        running=int(now.total("paceline_num_requests_running")),
        requests_per_second=readings.rate("paceline_incoming_requests_total"),
        failures_per_second=_failures(readings),
        tokens_per_second=readings.rate(
            "paceline_inter_token_latency_seconds_count",
            "paceline_time_to_first_token_seconds_count",
        ),
        first_token_seconds=readings.mean("paceline_time_to_first_token_seconds"),
        token_gap_seconds=readings.mean("paceline_inter_token_latency_seconds"),
        hop_seconds=readings.mean("paceline_rpc_hop_seconds"),
        speed_up=readings.mean("paceline_speedup_vs_autoregressive"),
        targets_per_stream=readings.mean("paceline_speculation_parallelism"),
        verifications=int(now.total("paceline_verifications_in_flight")),
        acceptance_rate=readings.mean("paceline_request_spec_decode_acceptance_rate"),
        rejected_per_second=rejected,
        discarded_per_second=discarded,
        wasted_share=readings.share(
            "paceline_spec_decode_num_wasted_tokens_total",
            of="paceline_spec_decode_num_draft_tokens_total",
        ),
        corrections_per_second=readings.rate("paceline_corrections_ahead_total"),
        branch_rows_per_second=readings.rate("paceline_branch_rows_total"),
        branch_won_share=readings.share(
            "paceline_branch_rows_accepted_total", of="paceline_branch_rows_total"
        ),
        cancelled_per_second=readings.rate("paceline_worthless_rpcs_cancelled_total"),
        repairs_per_second=_repairs(readings),
        asked_targets=max(
            int(now.total("paceline_stream_verifiers")),
            int(now.total("paceline_verifications_in_flight")),
        ),
        wanted_targets=max(int(it.now.total("paceline_desired_verifiers")) for it in orchestrators),
    )


def _repairs(readings: Readings) -> float | None:
    all_kinds = readings.rate("paceline_fallbacks_total")
    if all_kinds is None:
        return None
    return all_kinds - (readings.rate("paceline_fallbacks_total", kind="load_changed") or 0.0)


def _failures(readings: Readings) -> float | None:
    ended = readings.rate("paceline_rpcs_total", method=_GENERATE)
    if ended is None:
        return None
    well = (readings.rate("paceline_rpcs_total", method=_GENERATE, code=it) for it in _ENDED_WELL)
    return ended - sum(it or 0.0 for it in well)
