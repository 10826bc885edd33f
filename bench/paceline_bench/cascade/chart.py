"""`paceline bench cascade` as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_bench.charts import COLOURS, draw_speeds, new_figure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from paceline_bench.report import Row

_BY_PARAMETERS = "#bbbbbb"


def draw_cascade(content: Mapping[str, Any]) -> Figure:
    """Draw what forwards alone make of each way, and how fast it was.

    Args:
        content: As it is kept.
    """
    rows = content["rows"]
    figure = new_figure(width=10.0, height=max(2.6, 0.5 * len(rows) + 1.2))
    improvements, speeds = figure.subplots(1, 2, sharey=True)
    _draw_improvements(improvements, rows)
    draw_speeds(speeds, rows, colour=_colour)
    return figure


def _draw_improvements(axes: Axes, rows: Sequence[Row]) -> None:
    for place, row in enumerate(rows):
        if row["swi"] is None:
            continue
        measured, by_parameters = row["swi"]["measured"], row["swi"]["parameters"]
        axes.barh(place - 0.2, measured, color=_colour(row), height=0.38)
        axes.barh(place + 0.2, by_parameters, color=_BY_PARAMETERS, height=0.38)
        axes.text(measured, place - 0.2, f" {measured:.2f}", va="center", fontsize="small")
    names = [f"{row['texts']}: {row['name']}" for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize="small")
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.margins(x=0.12)
    axes.set_xlabel("SWI with measured costs; grey: with parameter counts")


def _colour(row: Row) -> str:
    return COLOURS[row["strategy"]]
