"""The rows of a load test, as tables in Markdown and in words."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING

from paceline.words import counted
from paceline_bench.load.streams import stream_memories
from paceline_bench.report import markdown_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paceline_bench.load.streams import LoadRow, Percentiles, StreamMemory

__all__ = ["findings", "scaling_findings", "tables"]

_LATENCY = (
    "streams",
    "strategy",
    "tokens/s",
    "to non-SI",
    "TTFT p50 / p99",
    "ITL p50 / p99",
    "TPOT p50 / p99",
    "fairness",
    "output",
)
_COST = (
    "streams",
    "strategy",
    "decoded with",
    "forwards per token",
    "given up",
    "orchestrator ms per token",
    "orchestrator load",
    "MiB before / most",
    "machine",
    "short of CPU",
)
_LEGEND = """\
TTFT: time to first token. ITL: inter-token latency, between two messages of a stream; one of SI or
DSI can have several tokens. TPOT: time per output token of a request. Fairness: Jain's index of the
requests' tokens/s. Given up: share of the targets' forwards that had become worthless. MiB: what
the orchestrators have to themselves. No p99 is told of fewer than 100 measurements.
"""
# Two runs of the same load differ by about so much.
_NOISE = 0.03


def tables(rows: Sequence[LoadRow]) -> str:
    """Lay the rows out as two tables: what streams get, and what that costs."""
    parts = []
    for count in sorted({row.orchestrator_count for row in rows}):
        own = [row for row in rows if row.orchestrator_count == count]
        parts += [
            f"{_orchestrators(count)}; times in ms\n",
            markdown_table(_LATENCY, [_latency_cells(row) for row in own]),
            markdown_table(_COST, [_cost_cells(row) for row in own]),
        ]
    return "\n".join([*parts, _LEGEND])


def findings(rows: Sequence[LoadRow]) -> list[str]:
    """Say what the rows show, and what they cannot show, in one line each."""
    different = _different(rows)
    if different:
        return different
    lines = ["Every output was identical to plain decoding."]
    auto = [(row.speed_up, row) for row in rows if row.strategy == "AUTO" and row.speed_up]
    slower = [row for speed_up, row in auto if speed_up < 1 - _NOISE]
    if slower:
        lines.append(f"AUTO served fewer tokens/s than plain decoding: {_names(slower)}")
    elif auto:
        least, row = min(auto, key=itemgetter(0))
        lines.append(
            "AUTO never served fewer tokens/s than plain decoding, within the noise: "
            f"at least {least:.2f}x, {_names([row])}"
        )
    lines += map(_memory_line, stream_memories(rows))
    return lines + _limits(rows)


def scaling_findings(rows: Sequence[LoadRow]) -> list[str]:
    """Say what one orchestrator and several served, and whether they were the limit."""
    different = _different(rows)
    if different:
        return different
    lines = []
    for count in sorted({row.orchestrator_count for row in rows}):
        own = [row for row in rows if row.orchestrator_count == count]
        best = max(own, key=lambda row: row.tokens_per_second)
        lines.append(
            f"{_orchestrators(count)} served at most {best.tokens_per_second:.0f} tokens/s, by "
            f"{best.strategy} x {best.stream_count}, with "
            f"{best.orchestrator_ms_per_token:.2f} ms of CPU for each. By that alone, which is no"
            " measurement, a core for each orchestrator"
            f" would do for {count * 1e3 / best.orchestrator_ms_per_token:.0f}."
        )
        if "machine" in best.limit:
            lines.append(
                "  The cores were full, of clients and targets too: this is no measure of how"
                " orchestrators scale."
            )
    return lines


def _different(rows: Iterable[LoadRow]) -> list[str]:
    different = [row for row in rows if not row.identical]
    return [f"AN OUTPUT DIFFERED from plain decoding: {_names(different)}"] if different else []


def _memory_line(memory: StreamMemory) -> str:
    amount = "below what can be measured" if memory.mib is None else f"{memory.mib:.2f} MiB"
    return (
        f"Memory of a stream, {memory.strategy}, {_orchestrators(memory.orchestrator_count)}: "
        f"{amount}"
    )


def _limits(rows: Sequence[LoadRow]) -> list[str]:
    lines = []
    short = [row for row in rows if row.limit]
    if short:
        lines.append(
            f"{len(short)} of {len(rows)} loads were short of CPU, and so no measure of the "
            f"strategy: {_names(short)}"
        )
    restless = [row for row in rows if not row.began_quietly]
    if restless:
        lines.append(f"Began while the load before was still worked on: {_names(restless)}")
    return lines


def _latency_cells(row: LoadRow) -> tuple[str, ...]:
    return (
        str(row.stream_count),
        row.strategy,
        f"{row.tokens_per_second:.1f}",
        "-" if row.speed_up is None else f"{row.speed_up:.2f}x",
        _both(row.ttft_ms),
        _both(row.itl_ms),
        _both(row.tpot_ms),
        f"{row.fairness:.3f}",
        "identical" if row.identical else "DIFFERENT",
    )


def _cost_cells(row: LoadRow) -> tuple[str, ...]:
    chosen = ", ".join(f"{count} {name}" for name, count in sorted(row.chosen.items()))
    return (
        str(row.stream_count),
        row.strategy,
        chosen,
        f"{row.forwards_per_token:.2f}",
        f"{row.given_up:.0%}",
        f"{row.orchestrator_ms_per_token:.2f}",
        f"{row.orchestrator_load:.0%}",
        f"{row.memory_before_mib:.1f} / {row.memory_peak_mib:.1f}",
        f"{row.machine_load:.0%}",
        row.limit or "-",
    )


def _both(values: Percentiles) -> str:
    tail = "-" if values.p99 is None else f"{values.p99:.0f}"
    return f"{values.p50:.0f} / {tail}"


def _orchestrators(count: int) -> str:
    return counted(count, "orchestrator")


def _names(rows: Iterable[LoadRow]) -> str:
    return ", ".join(
        f"{row.strategy} x {row.stream_count}"
        + (f" on {_orchestrators(row.orchestrator_count)}" if row.orchestrator_count > 1 else "")
        for row in rows
    )
