"""`paceline bench cascade` as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_bench.charts import COLOURS, Bar, draw_bars, draw_speeds, name_bars, new_figure

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from matplotlib.figure import Figure

    from paceline_bench.report import Row


def draw_cascade(content: Mapping[str, Any]) -> Figure:
    """Draw what forwards alone make of each configuration, and how fast it was.

    Args:
        content: As it is kept.
    """
    rows = content["rows"]
    figure = new_figure(width=10.0, height=max(2.6, 0.5 * len(rows) + 1.2))
    improvements, speeds = figure.subplots(1, 2, sharey=True)
    words = "SWI with measured costs; grey: with parameter counts"
    draw_bars(improvements, [_improvement(row) for row in rows], x_label=words)
    name_bars(improvements, [f"{row['texts']}: {row['name']}" for row in rows])
    draw_speeds(speeds, rows, colour=_colour)
    return figure


def _improvement(row: Row) -> Bar:
    if row["swi"] is None:
        return Bar(length=None)
    measured = row["swi"]["measured"]
    return Bar(
        length=measured,
        below=row["swi"]["parameters"],
        words=f"{measured:.2f}",
        colour=_colour(row),
    )


def _colour(row: Row) -> str:
    return COLOURS[row["strategy"]]
