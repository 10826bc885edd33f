"""What `paceline top` says in numbers: each with its name in JSON, its words, and its metrics."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, TypeAlias

from paceline_local.metrics_samples import Readings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

Figures: TypeAlias = "dict[str, float | None]"
"""By name in JSON; None: not known, or not of this role."""

_GENERATE = "paceline.v1.OrchestratorService/Generate"


def count(number: float) -> str:
    """Write a whole number."""
    return f"{number:.0f}"


def rate(number: float) -> str:
    """Write a number of something a second."""
    return f"{number:.0f}" if number >= 100 or number == 0 else f"{number:.1f}"


def milliseconds(seconds: float) -> str:
    """Write a time."""
    return f"{seconds * 1e3:.1f}"


def percent(share: float) -> str:
    """Write a share."""
    return f"{share:.0%}"


@dataclass(frozen=True, slots=True)
class Figure:
    """A number about servers.

    Attributes:
        name: Its name in JSON, with its unit.
        words: What it means; of a total, {} stands for the number.
        form: How the number is written.
        value: How it follows from what servers say together.
        is_largest: Whether several servers have the largest of theirs, and not the sum.
    """

    name: str
    words: str
    form: Callable[[float], str]
    value: Callable[[Readings], float | None]
    is_largest: bool = False


def _now(name: str, words: str, *metrics: str, is_largest: bool = False) -> Figure:
    """Return a number of things that there are; of several metrics it is the larger one."""
    totals = [f"paceline_{metric}" for metric in metrics]

    def largest(readings: Readings) -> float:
        return max(int(readings.now.total(total)) for total in totals)

    return Figure(name, words, form=count, value=largest, is_largest=is_largest)


def _rate(name: str, words: str, *metrics: str, **labels: str) -> Figure:
    """Return what happens in a second, since the snapshot before."""
    counters = [f"paceline_{metric}" for metric in metrics]
    return Figure(name, words, form=rate, value=lambda it: it.rate(*counters, **labels))


def _mean(
    name: str, words: str, metric: str, *, form: Callable[[float], str] = milliseconds
) -> Figure:
    """Return the mean since the snapshot before, or if nothing happened, since the start."""
    return Figure(name, words, form=form, value=lambda it: it.mean(f"paceline_{metric}"))


def _share(name: str, words: str, *, part: str, of: str) -> Figure:
    """Return a share since the snapshot before, or if nothing happened, since the start."""
    part, of = f"paceline_{part}", f"paceline_{of}"
    return Figure(name, words, form=percent, value=lambda it: it.share(part, of=of))


def _failures(readings: Readings) -> float | None:
    """Return the requests that ended with an error; cancelled ones do not count."""
    ended, *well = (
        readings.rate("paceline_rpcs_total", method=_GENERATE, **labels)
        for labels in ({}, {"code": "OK"}, {"code": "CANCELLED"})
    )
    return None if ended is None else ended - sum(it or 0.0 for it in well)


def _repairs(readings: Readings) -> float | None:
    """Return the fallbacks; to follow the load is none."""
    every = readings.rate("paceline_fallbacks_total")
    following = readings.rate("paceline_fallbacks_total", kind="load_changed")
    return None if every is None else every - (following or 0.0)


_ITL, _TTFT = "inter_token_latency_seconds", "time_to_first_token_seconds"
_DRAFTED, _IN_VAIN = "spec_decode_num_draft_tokens_total", "spec_decode_num_wasted_tokens_total"
# Tokens behind a rejection count, so it is below the acceptance rate, which is of judged tokens.
_ACCEPTED = _share(
    "accepted_share", "accepted", part="spec_decode_num_accepted_tokens_total", of=_DRAFTED
)
_VERIFICATIONS = "verifications_in_flight"
TOTALS: Mapping[str, Sequence[Figure]] = {
    "requests": (
        _now("running", "{} running", "num_requests_running"),
        _now("waiting", "{} waiting", "num_requests_waiting"),
        _rate("requests_per_second", "{}/s come", "incoming_requests_total"),
        Figure("failures_per_second", "{}/s fail", form=rate, value=_failures),
        _mean("first_token_seconds", "first token after {} ms", _TTFT),
        _mean("token_gap_seconds", "{} ms between tokens", _ITL),
        _mean("hop_seconds", "{} ms network", "rpc_hop_seconds"),
    ),
    "tokens": (
        _rate("tokens_per_second", "{}/s", f"{_ITL}_count", f"{_TTFT}_count"),
        _mean(
            "acceptance_rate", "acceptance {}", "request_spec_decode_acceptance_rate", form=percent
        ),
        _mean(
            "speed_up",
            "{} times as fast as decoded plainly",
            "speedup_vs_autoregressive",
            form=rate,
        ),
        _mean(
            "targets_per_stream", "SP {} targets per stream", "speculation_parallelism", form=rate
        ),
        _now("verifications", "{} verifications now", _VERIFICATIONS),
    ),
    "trees": (
        _rate("corrections_per_second", "{}/s corrections ahead", "corrections_ahead_total"),
        _rate("branch_rows_per_second", "{}/s rows of branches", "branch_rows_total"),
        _share(
            "branch_won_share",
            "{} of them became output",
            part="branch_rows_accepted_total",
            of="branch_rows_total",
        ),
    ),
    "waste": (
        _share("wasted_share", "{} of the draft tokens", part=_IN_VAIN, of=_DRAFTED),
        _rate("rejected_per_second", "{}/s rejected", _IN_VAIN, reason="rejected"),
        _rate("discarded_per_second", "{}/s discarded", _IN_VAIN, reason="discarded"),
        _rate("cancelled_per_second", "{}/s calls cancelled", "worthless_rpcs_cancelled_total"),
        Figure("repairs_per_second", "{}/s repairs", form=rate, value=_repairs),
    ),
    "targets": (
        _now("asked_targets", "streams ask for {}", "stream_verifiers", _VERIFICATIONS),
        # The gauge is the largest demand of the last minutes (--scale-down-seconds).
        _now(
            "wanted_targets",
            "an autoscaler would still have {} for the last minutes' peak",
            "desired_verifiers",
            is_largest=True,
        ),
    ),
}
# The columns; a narrow terminal cuts off the last ones.
OF_A_SERVER: Sequence[Figure] = (
    _now("waiting", "waiting", "num_requests_waiting"),
    _now("running", "running", "num_requests_running", "http_in_flight"),
    _now("sessions", "sessions", "sessions_active"),
    _rate("forwards_per_second", "forwards/s", "forwards_total"),
    _mean("queue_seconds", "queue ms", "queue_seconds"),
    _mean("forward_seconds", "forward ms", "forward_seconds"),
    _rate("wasted_per_second", "wasted/s", "wasted_tokens_total"),
    _rate(
        "cancelled_per_second",
        "cancelled/s",
        *("calls_cancelled_total", "calls_superseded_total", "worthless_rpcs_cancelled_total"),
    ),
    Figure(
        "memory_share",
        "memory",
        form=percent,
        value=lambda readings: readings.now.total("paceline_kv_cache_usage_perc"),
        is_largest=True,
    ),
    _rate("positions_per_second", "positions/s", "forward_rows_total"),
    _ACCEPTED,
)
_NOT_OF_DRAFTERS = {"accepted_share", "wasted_per_second"}
_OF_CALLERS = {
    "orchestrator": {"waiting", "running", "queue_seconds", "cancelled_per_second"},
    "gateway": {"running"},
}


def figures(role: str, parts: Sequence[Readings]) -> Figures:
    """Return what servers of one role do together."""
    told = _sum(parts, OF_A_SERVER)
    return {
        name: None
        if (role == "drafter" and name in _NOT_OF_DRAFTERS)
        or (role in _OF_CALLERS and name not in _OF_CALLERS[role])
        else value
        for name, value in told.items()
    }


def _sum(parts: Sequence[Readings], wanted: Iterable[Figure]) -> Figures:
    if not parts:
        return {figure.name: None for figure in wanted}
    together = Readings.sum(parts)
    return {
        figure.name: max(figure.value(part) or 0 for part in parts)
        if figure.is_largest
        else figure.value(together)
        for figure in wanted
    }


def totals(
    orchestrators: Sequence[Readings], targets: Sequence[Readings], *, told_running: int | None
) -> Figures:
    """Return what the service does.

    Args:
        orchestrators: Readings of the orchestrators whose metrics are known.
        targets: Readings of the targets whose metrics are known.
        told_running: Requests that an orchestrator said it serves, where there are no metrics.
    """
    told = _sum(orchestrators, chain.from_iterable(TOTALS.values()))
    if not orchestrators:
        told["running"] = told_running
        told["acceptance_rate"] = _ACCEPTED.value(Readings.sum(targets))
    return told
