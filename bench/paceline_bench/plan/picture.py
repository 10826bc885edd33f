"""Draws a forecast: the time of a generation over the number of targets."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from paceline_bench.charts import COLOURS, Series, draw_lines, new_figure
from paceline_protocol.methods import METHODS, Strategy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

    from paceline_bench.report import Row

_DSI = METHODS[Strategy.DISTRIBUTED].label


def draw_forecast(rows: Sequence[Row], *, title: str) -> Figure:
    """Draw a line for each method: over the number of targets, or level.

    Args:
        rows: See `json_rows`.
        title: Above.
    """
    figure = new_figure(width=7.5, height=4.5)
    axes = figure.subplots()
    most = max(2, *(row["target_count"] for row in rows))
    groups = groupby(rows, itemgetter("strategy", "width", "branches"))
    draw_lines(
        axes,
        [_series(list(own), most=most) for _, own in groups],
        x_label="targets (SP degree)",
        y_label="ms for a generation",
        doubling="",
    )
    for row in rows:
        if row["method"] == _DSI:
            place = (row["target_count"], row["mean_ms"])
            words = str(row["lookahead"])
            axes.annotate(words, place, (0, -18), textcoords="offset points", ha="center")
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize="medium")
    return figure


def _series(rows: Sequence[Row], *, most: int) -> Series:
    """Return a line over the number of targets, or a level one for one target."""
    first = rows[0]
    name = first["strategy"] + (f", width {first['width']}" if first["width"] > 1 else "")
    colour = COLOURS.get(first["method"])
    is_ahead = first["strategy"] != first["method"]
    line = (":" if is_ahead else "-") if first["width"] == 1 else "-." if is_ahead else "--"
    if first["method"] == _DSI:
        return Series(
            points=[(row["target_count"], row["mean_ms"]) for row in rows],
            errors=[row["error_ms"] for row in rows],
            label=f"{name}; the numbers are its lookahead",
            colour=colour,
            line=line,
        )
    return Series(
        points=[(1, first["mean_ms"]), (most, first["mean_ms"])],
        label=f"{name}, lookahead {first['lookahead']}" if first["lookahead"] else name,
        colour=colour,
        line=line,
        marker="",
    )
