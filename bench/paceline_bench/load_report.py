"""The rows of a load test, as tables in Markdown, in words, and as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_bench.charts import COLOURS, new_figure
from paceline_bench.report import markdown_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from paceline_bench.load import LoadRow, Percentiles

__all__ = ["draw", "findings", "tables"]

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
    "orchestrator core",
    "MiB per stream",
    "machine",
    "short of CPU",
)
_LEGEND = """\
TTFT: time to first token. ITL: inter-token latency, between two messages of a stream; one of SI or
DSI can have several tokens. TPOT: time per output token of a request. Fairness: Jain's index of the
requests' tokens/s. Given up: share of the targets' forwards that had become worthless.
"""
# Two runs of the same load differ by about so much.
_NOISE = 0.03


def tables(rows: Sequence[LoadRow]) -> str:
    """Lay the rows out as two tables: what streams get, and what that costs."""
    parts = []
    for count in sorted({row.orchestrator_count for row in rows}):
        own = [row for row in rows if row.orchestrator_count == count]
        parts += [
            f"{count} orchestrator{'s' if count > 1 else ''}; times in ms\n",
            markdown_table(_LATENCY, [_latency_cells(row) for row in own]),
            markdown_table(_COST, [_cost_cells(row) for row in own]),
        ]
    return "\n".join([*parts, _LEGEND])


def findings(rows: Sequence[LoadRow]) -> list[str]:
    """Say what the rows show, and what they cannot show, in one line each."""
    different = [row for row in rows if not row.identical]
    if different:
        return [f"AN OUTPUT DIFFERED from plain decoding: {_names(different)}"]
    lines = ["Every output was identical to plain decoding."]
    auto = [row for row in rows if row.strategy == "AUTO"]
    slower = [row for row in auto if row.speed_up < 1 - _NOISE]
    if slower:
        lines.append(f"AUTO served fewer tokens/s than plain decoding: {_names(slower)}")
    elif auto:
        least = min(auto, key=lambda row: row.speed_up)
        lines.append(
            "AUTO never served fewer tokens/s than plain decoding, within the noise: "
            f"at least {least.speed_up:.2f}x, {_names([least])}"
        )
    fullest = max(auto or rows, key=lambda row: (row.stream_count, row.orchestrator_count))
    lines.append(
        f"An orchestrator's core would do for {1e3 / fullest.orchestrator_ms_per_token:.0f} "
        f"tokens/s, by {_names([fullest])}"
    )
    short = [row for row in rows if row.limit]
    if short:
        lines.append(
            f"{len(short)} of {len(rows)} loads were short of CPU, and so no measure of the "
            f"strategy: {_names(short)}"
        )
    return lines


def draw(rows: Sequence[LoadRow], *, title: str) -> Figure:
    """Draw tokens per second and the time for each token over the number of streams.

    Of several numbers of orchestrators the smallest is drawn. What the machine was short of CPU for
    is hollow.
    """
    fewest = min(row.orchestrator_count for row in rows)
    own = [row for row in rows if row.orchestrator_count == fewest]
    figure = new_figure(width=10.0)
    figure.suptitle(title)
    together, each = figure.subplots(1, 2)
    _lines(together, own, lambda row: row.tokens_per_second)
    together.set_ylabel("tokens/s, all streams together")
    together.set_ylim(bottom=0)
    together.legend(frameon=False)
    _lines(each, own, lambda row: row.tpot_ms.p50)
    each.set_ylabel("ms per token of one stream, median")
    each.set_yscale("log", base=2)
    each.yaxis.set_major_formatter("{x:g}")
    return figure


def _lines(axes: Axes, rows: Sequence[LoadRow], value: Callable[[LoadRow], float]) -> None:
    for strategy in dict.fromkeys(row.strategy for row in rows):
        own = [row for row in rows if row.strategy == strategy]
        is_auto = strategy == "AUTO"
        axes.plot(
            [row.stream_count for row in own],
            [value(row) for row in own],
            color=COLOURS[strategy],
            label=strategy,
            marker="o",
            linewidth=2.5 if is_auto else 1.5,
            linestyle="--" if is_auto else "-",
            zorder=3 if is_auto else 2,
        )
        short = [row for row in own if row.limit]
        axes.scatter(
            [row.stream_count for row in short],
            [value(row) for row in short],
            color="white",
            edgecolor=COLOURS[strategy],
            zorder=4,
        )
    counts = sorted({row.stream_count for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.set_xlabel("streams at the same time (hollow: short of CPU)")
    axes.grid(alpha=0.3)


def _latency_cells(row: LoadRow) -> tuple[str, ...]:
    return (
        str(row.stream_count),
        row.strategy,
        f"{row.tokens_per_second:.1f}",
        f"{row.speed_up:.2f}x" if row.identical else "-",
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
        f"{row.stream_mib:.2f}",
        f"{row.machine_load:.0%}",
        row.limit or "-",
    )


def _both(values: Percentiles) -> str:
    return f"{values.p50:.0f} / {values.p99:.0f}"


def _names(rows: Iterable[LoadRow]) -> str:
    return ", ".join(
        f"{row.strategy} x {row.stream_count}"
        + (f" on {row.orchestrator_count} orchestrators" if row.orchestrator_count > 1 else "")
        for row in rows
    )
