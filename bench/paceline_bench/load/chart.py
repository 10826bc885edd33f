"""The rows of a load test as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_bench.charts import COLOURS, Series, draw_lines, new_figure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from paceline_bench.report import Row

# Users get AUTO; its latency is drawn beside plain decoding's.
_COMPARED = ("non-SI", "AUTO")
_BAR = 0.4
_STREAMS = "streams at the same time (hollow: short of CPU)"
_TOKENS = "tokens/s, all streams together"


def draw(rows: Sequence[Row], scaling: Sequence[Row], *, title: str, scaling_title: str) -> Figure:
    """Draw throughput, latencies and what orchestrators can do; what was not measured is left out.

    A load that the machine was short of CPU for is hollow.

    Args:
        rows: Of all strategies, over the number of streams.
        scaling: On targets so fast that orchestrators are the limit.
        title: Of the picture.
        scaling_title: Of the part with orchestrators.
    """
    shape, width, height = (
        ((2, 2), 11.0, 8.0) if rows and scaling else ((1, 3 if rows else 1), 14.0, 4.5)
    )
    figure = new_figure(width=width, height=height, title=title)
    axes = figure.subplots(*shape, squeeze=False).flatten()
    if rows:
        _draw_throughput(axes[0], rows)
        _draw_latency(axes[1], rows, name="ttft_ms", words="time to first token, ms")
        words = "time per output token of a request, ms"
        _draw_latency(axes[2], rows, name="tpot_ms", words=words)
    if scaling:
        axes[-1].set_title(scaling_title, fontsize="medium")
        _draw_scaling(axes[-1], scaling)
    return figure


def _draw_throughput(axes: Axes, rows: Sequence[Row]) -> None:
    counts = sorted({row["orchestrator_count"] for row in rows})
    series = [
        _series(
            [
                row
                for row in rows
                if (row["orchestrator_count"], row["strategy"]) == (count, strategy)
            ],
            lambda row: row["tokens_per_second"],
            label=strategy + (f", {count} orchestrators" if count > counts[0] else ""),
            line="-" if count == counts[0] else ":",
        )
        for count in counts
        for strategy in dict.fromkeys(
            row["strategy"] for row in rows if row["orchestrator_count"] == count
        )
    ]
    draw_lines(axes, series, x_label=_STREAMS, y_label=_TOKENS)
    axes.set_ylim(bottom=0)


def _draw_latency(axes: Axes, rows: Sequence[Row], *, name: str, words: str) -> None:
    """Draw the middle and, where one was measured, the tail."""
    fewest = min(row["orchestrator_count"] for row in rows)
    series = []
    for strategy in _COMPARED:
        own = [
            row
            for row in rows
            if (row["strategy"], row["orchestrator_count"]) == (strategy, fewest)
        ]
        tail = [row for row in own if row[name]["p99"] is not None]
        if own:
            label = f"{strategy}, p50"
            series.append(_series(own, lambda row: row[name]["p50"], label=label, line="-"))
        if tail:
            label = f"{strategy}, p99"
            series.append(_series(tail, lambda row: row[name]["p99"], label=label, line="--"))
    draw_lines(axes, series, x_label=_STREAMS, y_label=words, doubling="xy")


def _series(rows: Sequence[Row], value: Callable[[Row], float], *, label: str, line: str) -> Series:
    return Series(
        points=[(row["stream_count"], value(row)) for row in rows],
        hollow=[(row["stream_count"], value(row)) for row in rows if row["limit"]],
        label=label,
        line=line,
        colour=COLOURS[rows[0]["strategy"]],
    )


def _draw_scaling(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw a bar for each load, side by side for each number of orchestrators."""
    counts = sorted({row["orchestrator_count"] for row in rows})
    groups = list(dict.fromkeys((row["strategy"], row["stream_count"]) for row in rows))
    for row in rows:
        place = groups.index((row["strategy"], row["stream_count"]))
        side = counts.index(row["orchestrator_count"]) - (len(counts) - 1) / 2
        colour = COLOURS[row["strategy"]]
        bars = axes.bar(
            place + _BAR * side,
            row["tokens_per_second"],
            _BAR,
            facecolor="white" if "machine" in row["limit"] else colour,
            edgecolor=colour,
            linewidth=1.5,
        )
        words = f"{row['orchestrator_count']}\n{row['orchestrator_ms_per_token']:.2f} ms"
        axes.bar_label(bars, [words], padding=2, fontsize="x-small")
    axes.set_xticks(range(len(groups)), [f"{name} x {streams}" for name, streams in groups])
    axes.set_ylabel(_TOKENS)
    axes.set_xlabel("strategy x streams (above: orchestrators; their CPU for a token)")
    axes.margins(y=0.15)
