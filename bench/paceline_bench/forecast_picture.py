"""Draws a forecast: the time of a generation over the number of targets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.ticker import MaxNLocator

from paceline_bench.charts import COLOURS, new_figure
from paceline_bench.forecast_report import abbreviation
from paceline_protocol.strategy import Strategy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

    from paceline_bench.forecast import Forecast

__all__ = ["draw_forecast"]


def draw_forecast(rows: Sequence[Forecast], *, title: str) -> Figure:
    """Draw non-SI and SI as lines, and DSI with its lookahead at each number of targets."""
    figure = new_figure(width=7.5, height=4.5)
    axes = figure.subplots()
    for row in rows[:2]:
        name = abbreviation(row)
        label = f"{name}, lookahead {row.lookahead}" if row.lookahead else name
        axes.axhline(row.mean_ns / 1e6, color=COLOURS[name], label=label)
    distributed = [row for row in rows if row.strategy is Strategy.DISTRIBUTED]
    axes.errorbar(
        [row.target_count for row in distributed],
        [row.mean_ns / 1e6 for row in distributed],
        yerr=[row.error_ns / 1e6 for row in distributed],
        color=COLOURS["DSI"],
        marker="o",
        capsize=3,
        label="DSI; the numbers are its lookahead",
    )
    for row in distributed:
        place = (row.target_count, row.mean_ns / 1e6)
        axes.annotate(str(row.lookahead), place, (0, -18), textcoords="offset points", ha="center")
    axes.set_title(title, fontsize="medium")
    axes.set(xlabel="targets (SP degree)", ylabel="ms for a generation")
    axes.grid(axis="y", color="0.9")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()
    return figure
