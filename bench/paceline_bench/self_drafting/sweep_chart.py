"""A sweep over trees as a picture."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from matplotlib.ticker import ScalarFormatter

from paceline_bench.charts import new_figure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from paceline_bench.report import Row

_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
_LINES = ("-", "--", ":", "-.")
_MEASURES = {
    "tokens_per_forward": "tokens for each forward",
    "upper_rows_per_forward": "rows of the upper layers",
    "times_as_fast": "times as fast as plain decoding",
}


def draw_sweep(content: Mapping[str, Any]) -> Figure:
    """Draw for each adapter what a forward gives, has in rows, and the speed, over trees' sizes.

    And over the number of layers that have streams, if adapters differ in it.

    Args:
        content: As it is kept; ways whose texts differ are left out.
    """
    rows = [row for row in content["rows"] if row["nodes"] and row["identical"]]
    adapters = list(dict.fromkeys(row["adapter"] for row in rows))
    streams = [row for row in rows if row.get("layers")]
    has_layers = len({row["layers"] for row in streams}) > 1
    lines = max(1, len(adapters) + has_layers)
    figure = new_figure(width=12.0, height=3.4 * lines)
    axes = figure.subplots(lines, len(_MEASURES), squeeze=False, sharex="row")
    for line, adapter in zip(axes, adapters, strict=False):
        own = [row for row in rows if row["adapter"] == adapter]
        for each, (measure, words) in zip(line, _MEASURES.items(), strict=True):
            _draw(each, own, measure=measure)
            each.set_ylabel(words, fontsize="small")
        line[0].set_title(adapter, loc="left", fontsize="medium")
        line[0].legend(fontsize="x-small")
        for each in line:
            each.set_xlabel("guesses in the tree")
    if has_layers:
        _draw_layers(axes[-1], streams)
    for line in axes:
        line[-1].axhline(1, color="black", linewidth=0.6)
    return figure


def _draw_layers(line: Sequence[Axes], rows: Sequence[Row]) -> None:
    """Draw each kind's largest tree, pruned the least, over the layers that have streams."""
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    for axes, (measure, words) in zip(line, _MEASURES.items(), strict=True):
        for place, kind in enumerate(kinds):
            own = [row for row in rows if row["kind"] == kind]
            most = max(own, key=lambda row: (row["nodes"], -row["prune_below"]))
            points = sorted(
                (row["layers"], row[measure])
                for row in own
                if _series(row) == _series(most) and row["nodes"] == most["nodes"]
            )
            label = f"{kind}, {most['nodes']} guesses"
            axes.plot(
                *zip(*points, strict=True),
                color=_COLOURS[place % len(_COLOURS)],
                marker=".",
                label=label,
            )
        axes.set_xlabel("layers with streams")
        axes.set_ylabel(words, fontsize="small")
    line[0].legend(fontsize="x-small")


def _draw(axes: Axes, rows: Sequence[Row], *, measure: str) -> None:
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    thresholds = sorted({row["prune_below"] for row in rows})
    ordered = sorted(rows, key=lambda row: (_series(row), row["nodes"]))
    for (kind, threshold), own in groupby(ordered, key=_series):
        points = list(own)
        pruned = f", pruned below {threshold:g}" if threshold else ""
        axes.plot(
            [row["nodes"] for row in points],
            [row[measure] for row in points],
            color=_COLOURS[kinds.index(kind) % len(_COLOURS)],
            linestyle=_LINES[thresholds.index(threshold) % len(_LINES)],
            marker=".",
            label=kind + pruned,
        )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(ScalarFormatter())


def _series(row: Row) -> tuple[str, float]:
    return row["kind"], row["prune_below"]
