"""The rows of a load test as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_bench.charts import COLOURS, new_figure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from paceline_bench.load.measurement import LoadRow

# Those whose latency is drawn: what users get, and what it is compared with.
_COMPARED = ("non-SI", "AUTO")
_WIDTH = 0.4


def draw(
    rows: Sequence[LoadRow], scaling: Sequence[LoadRow], *, title: str, scaling_title: str
) -> Figure:
    """Draw throughput, latencies and what orchestrators can do; what was not measured is left out.

    What the machine was short of CPU for is hollow.

    Args:
        rows: Of all strategies, over the number of streams.
        scaling: On targets so fast that orchestrators are the limit.
        title: Of the picture.
        scaling_title: Of the part with orchestrators.
    """
    panels = [_draw_throughput, _draw_first, _draw_between] if rows else []
    is_whole = bool(rows and scaling)
    shape, width, height = (
        ((2, 2), 11.0, 8.0) if is_whole else ((1, max(1, len(panels))), 14.0, 4.5)
    )
    figure = new_figure(width=width, height=height)
    figure.suptitle(title)
    axes = figure.subplots(*shape, squeeze=False).flatten()
    for panel, each in zip(panels, axes, strict=False):
        panel(each, rows)
    if scaling:
        axes[-1].set_title(scaling_title, fontsize="medium")
        _draw_scaling(axes[-1], scaling)
    return figure


def _draw_throughput(axes: Axes, rows: Sequence[LoadRow]) -> None:
    fewest = min(row.orchestrator_count for row in rows)
    for count in sorted({row.orchestrator_count for row in rows}):
        own = [row for row in rows if row.orchestrator_count == count]
        for strategy in dict.fromkeys(row.strategy for row in own):
            _draw_line(
                axes,
                [row for row in own if row.strategy == strategy],
                lambda row: row.tokens_per_second,
                label=strategy + (f", {count} orchestrators" if count > fewest else ""),
                style="-" if count == fewest else ":",
            )
    axes.set_ylabel("tokens/s, all streams together")
    axes.set_ylim(bottom=0)
    _finish(axes, rows)


def _draw_first(axes: Axes, rows: Sequence[LoadRow]) -> None:
    _draw_percentiles(axes, rows, lambda row: (row.ttft_ms.p50, row.ttft_ms.p99))
    axes.set_ylabel("time to first token, ms")


def _draw_between(axes: Axes, rows: Sequence[LoadRow]) -> None:
    _draw_percentiles(axes, rows, lambda row: (row.tpot_ms.p50, row.tpot_ms.p99))
    axes.set_ylabel("time per output token of a request, ms")


def _draw_percentiles(
    axes: Axes,
    rows: Sequence[LoadRow],
    values: Callable[[LoadRow], tuple[float, float | None]],
) -> None:
    fewest = min(row.orchestrator_count for row in rows)
    for strategy in _COMPARED:
        own = [row for row in rows if (row.strategy, row.orchestrator_count) == (strategy, fewest)]
        if own:
            _draw_line(axes, own, lambda row: values(row)[0], label=f"{strategy}, p50", style="-")
        tail = [row for row in own if values(row)[1] is not None]
        if tail:
            _draw_line(
                axes, tail, lambda row: values(row)[1] or 0, label=f"{strategy}, p99", style="--"
            )
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    _finish(axes, rows)


def _draw_line(
    axes: Axes,
    rows: Sequence[LoadRow],
    value: Callable[[LoadRow], float],
    *,
    label: str,
    style: str,
) -> None:
    colour = COLOURS[rows[0].strategy]
    points = [(row.stream_count, value(row)) for row in rows]
    axes.plot(*zip(*points, strict=True), style, color=colour, label=label, marker="o")
    short = [(row.stream_count, value(row)) for row in rows if row.limit]
    if short:
        axes.scatter(*zip(*short, strict=True), color="white", edgecolor=colour, zorder=4)


def _finish(axes: Axes, rows: Sequence[LoadRow]) -> None:
    counts = sorted({row.stream_count for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.set_xlabel("streams at the same time (hollow: short of CPU)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small")


def _draw_scaling(axes: Axes, rows: Sequence[LoadRow]) -> None:
    """Draw a bar for each load, side by side for each number of orchestrators."""
    counts = sorted({row.orchestrator_count for row in rows})
    groups = list(dict.fromkeys((row.strategy, row.stream_count) for row in rows))
    for row in rows:
        place = groups.index((row.strategy, row.stream_count))
        side = counts.index(row.orchestrator_count) - (len(counts) - 1) / 2
        bars = axes.bar(
            place + _WIDTH * side,
            row.tokens_per_second,
            _WIDTH,
            facecolor="white" if "machine" in row.limit else COLOURS[row.strategy],
            edgecolor=COLOURS[row.strategy],
            linewidth=1.5,
        )
        words = f"{row.orchestrator_count}\n{row.orchestrator_ms_per_token:.2f} ms"
        axes.bar_label(bars, [words], padding=2, fontsize="x-small")
    axes.set_xticks(range(len(groups)), [f"{name} x {streams}" for name, streams in groups])
    axes.set_ylabel("tokens/s, all streams together")
    axes.set_xlabel("strategy x streams (above: orchestrators; their CPU for a token)")
    axes.margins(y=0.15)
