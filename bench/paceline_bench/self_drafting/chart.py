"""Self-drafting as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_bench.charts import COLOURS, draw_speeds, new_figure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from paceline_bench.report import Row

_SELF = "#cc79a7"
_ROWS = "#bbbbbb"


def draw_self_drafting(content: Mapping[str, Any]) -> Figure:
    """Draw what a forward gives and has in rows, and the speed beside plain decoding's.

    Args:
        content: As it is kept.
    """
    rows = content["rows"]
    figure = new_figure(width=9.0, height=max(2.6, 0.5 * len(rows) + 1.2))
    forwards, speeds = figure.subplots(1, 2, sharey=True)
    _draw_forwards(forwards, rows)
    draw_speeds(speeds, rows, colour=_colour)
    return figure


def _draw_forwards(axes: Axes, rows: Sequence[Row]) -> None:
    for place, row in enumerate(rows):
        axes.barh(place + 0.2, row["rows_per_forward"], color=_ROWS, height=0.38)
        axes.barh(place - 0.2, row["tokens_per_forward"], color=_colour(row), height=0.38)
        words = f" {row['tokens_per_forward']:.2f}"
        axes.text(row["tokens_per_forward"], place - 0.2, words, va="center", fontsize="small")
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize="small")
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.margins(x=0.12)
    axes.set_xlabel("tokens for each target forward; grey: its rows")


def _colour(row: Row) -> str:
    return COLOURS.get(row["strategy"], _SELF)
