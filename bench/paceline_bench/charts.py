"""Pictures without a screen, all in one style."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["COLOURS", "new_figure", "save_figure"]

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
