"""Draws a forecast: the time of a generation over the number of targets."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from matplotlib.ticker import MaxNLocator

from paceline_bench.charts import COLOURS, new_figure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from paceline_bench.plan.forecast import Forecast


def draw_forecast(rows: Sequence[Forecast], *, title: str) -> Figure:
    """Draw a line for each method, over the number of targets where it can use several."""
    figure = new_figure(width=7.5, height=4.5)
    axes = figure.subplots()
    for _, group in groupby(rows, key=lambda row: (row.label, row.shape)):
        own = list(group)
        if own[0].method.overlaps:
            _draw_over_targets(axes, own)
        else:
            _draw_level(axes, *own)
    axes.set_title(title, fontsize="medium")
    axes.set(xlabel="targets (SP degree)", ylabel="ms for a generation")
    axes.grid(axis="y", color="0.9")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()
    return figure


def _draw_level(axes: Axes, row: Forecast) -> None:
    words = row.label + _tree_words(row)
    label = f"{words}, lookahead {row.lookahead}" if row.lookahead else words
    colour = COLOURS.get(row.method.label)
    axes.axhline(row.mean_ns / 1e6, color=colour, label=label, linestyle=_line(row))


def _draw_over_targets(axes: Axes, rows: Sequence[Forecast]) -> None:
    name = rows[0].method.label
    axes.errorbar(
        [row.target_count for row in rows],
        [row.mean_ns / 1e6 for row in rows],
        yerr=[row.error_ns / 1e6 for row in rows],
        color=COLOURS.get(name),
        marker="o",
        capsize=3,
        linestyle=_line(rows[0]),
        label=f"{name}{_tree_words(rows[0])}; the numbers are its lookahead",
    )
    for row in rows:
        place = (row.target_count, row.mean_ns / 1e6)
        axes.annotate(str(row.lookahead), place, (0, -18), textcoords="offset points", ha="center")


def _line(row: Forecast) -> str:
    if row.drafts_ahead:
        return "-." if row.shape.width > 1 else ":"
    return "--" if row.shape.width > 1 else "-"


def _tree_words(row: Forecast) -> str:
    return f", width {row.shape.width}" if row.shape.width > 1 else ""
