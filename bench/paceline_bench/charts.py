"""Pictures without a screen, all in one style."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from paceline_bench.report import Row

# By strategy; told apart by the colour-blind, and in print.
COLOURS = {
    "non-SI": "#7f7f7f",
    "SI": "#e69f00",
    "DSI": "#0072b2",
    "AUTO": "#009e73",
    "ideal": "#000000",
}


def new_figure(*, width: float = 8.0, height: float = 4.5) -> Figure:
    """Begin a picture; sizes in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write a picture; the suffix of the path, such as .png or .svg, chooses the format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=144)


def draw_speeds(axes: Axes, rows: Sequence[Row], *, colour: Callable[[Row], str]) -> None:
    """Draw how many times as fast as plain decoding each way is (`ways.row_of`), from the top."""
    for place, row in enumerate(rows):
        if not row["identical"]:
            axes.text(0, place, " text differs: no speed", va="center", fontsize="small")
            continue
        repeats = row["repeats_times_as_fast"]
        axes.barh(place, row["times_as_fast"], color=colour(row), height=0.75)
        axes.hlines(place, min(repeats), max(repeats), color="black", linewidth=1.0)
        axes.text(
            max(repeats), place, f" {row['times_as_fast']:.2f}x", va="center", fontsize="small"
        )
    axes.axvline(1, color="black", linewidth=0.6)
    axes.margins(x=0.12)
    axes.set_xlabel("times as fast as plain decoding; line: all texts")
