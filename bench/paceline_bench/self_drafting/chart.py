"""Self-drafting as pictures: the configurations side by side, and a sweep over trees."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from paceline_bench.charts import (
    COLOURS,
    Bar,
    Series,
    draw_bars,
    draw_lines,
    draw_speeds,
    name_bars,
    new_figure,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from paceline_bench.report import Row

_SELF = "#cc79a7"
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
_LINES = ("-", "--", ":", "-.")
_MEASURES = {
    "tokens_per_forward": "tokens for each forward",
    "upper_rows_per_forward": "rows of the upper layers",
    "times_as_fast": "times as fast as plain decoding",
}
_FIRST = "tokens_per_forward"


def draw_self_drafting(content: Mapping[str, Any]) -> Figure:
    """Draw what a forward gives and has in rows, and the speed beside plain decoding's.

    Args:
        content: As it is kept.
    """
    rows = content["rows"]
    figure = new_figure(width=9.0, height=max(2.6, 0.5 * len(rows) + 1.2))
    forwards, speeds = figure.subplots(1, 2, sharey=True)
    bars = [
        Bar(
            length=row["tokens_per_forward"],
            below=row["rows_per_forward"],
            words=f"{row['tokens_per_forward']:.2f}",
            colour=_colour(row),
        )
        for row in rows
    ]
    draw_bars(forwards, bars, x_label="tokens for each target forward; grey: its rows")
    name_bars(forwards, [row["name"] for row in rows])
    draw_speeds(speeds, rows, colour=_colour)
    return figure


def _colour(row: Row) -> str:
    return COLOURS.get(row["strategy"], _SELF)


def draw_sweep(content: Mapping[str, Any]) -> Figure:
    """Draw for each adapter what a forward gives, has in rows, and the speed, over trees' sizes.

    And over the number of layers that have streams, if adapters differ in it.

    Args:
        content: As it is kept; rows whose texts differ are left out.
    """
    rows = [row for row in content["rows"] if row["nodes"] and row["identical"]]
    streams = [row for row in rows if row.get("layers")]
    has_layers = len({row["layers"] for row in streams}) > 1
    adapters = list(dict.fromkeys(row["adapter"] for row in rows))
    lines = max(1, len(adapters) + has_layers)
    figure = new_figure(width=12.0, height=3.4 * lines)
    axes = figure.subplots(lines, len(_MEASURES), squeeze=False)
    for line, adapter in zip(axes, adapters, strict=False):
        own = [row for row in rows if row["adapter"] == adapter]
        for each, measure in zip(line, _MEASURES, strict=True):
            series = _over_sizes(own, measure)
            _draw(each, series, measure, x_label="guesses in the tree")
        line[0].set_title(adapter, loc="left", fontsize="medium")
    if has_layers:
        for each, measure in zip(axes[-1], _MEASURES, strict=True):
            series = _over_layers(streams, measure)
            _draw(each, series, measure, x_label="layers with streams")
    for line in axes:
        line[-1].axhline(1, color="black", linewidth=0.6)
    return figure


def _draw(axes: Axes, series: Sequence[Series], measure: str, *, x_label: str) -> None:
    words, has_legend = _MEASURES[measure], measure == _FIRST
    draw_lines(axes, series, x_label=x_label, y_label=words, has_legend=has_legend)


def _over_sizes(rows: Sequence[Row], measure: str) -> list[Series]:
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    thresholds = sorted({row["prune_below"] for row in rows})
    ordered = sorted(rows, key=lambda row: (_tree(row), row["nodes"]))
    series = []
    for (kind, threshold), own in groupby(ordered, key=_tree):
        pruned = f", pruned below {threshold:g}" if threshold else ""
        series.append(
            Series(
                points=[(row["nodes"], row[measure]) for row in own],
                colour=_COLOURS[kinds.index(kind) % len(_COLOURS)],
                line=_LINES[thresholds.index(threshold) % len(_LINES)],
                marker=".",
                label=kind + pruned,
            )
        )
    return series


def _over_layers(rows: Sequence[Row], measure: str) -> list[Series]:
    """Return each kind's largest tree, pruned the least, over the layers that have streams."""
    series = []
    for place, kind in enumerate(dict.fromkeys(row["kind"] for row in rows)):
        own = [row for row in rows if row["kind"] == kind]
        most = max(own, key=lambda row: (row["nodes"], -row["prune_below"]))
        size = (_tree(most), most["nodes"])
        points = [
            (row["layers"], row[measure]) for row in own if (_tree(row), row["nodes"]) == size
        ]
        series.append(
            Series(
                points=sorted(points),
                colour=_COLOURS[place % len(_COLOURS)],
                marker=".",
                label=f"{kind}, {most['nodes']} guesses",
            )
        )
    return series


def _tree(row: Row) -> tuple[str, float]:
    return row["kind"], row["prune_below"]
