"""The one writer of pictures: a benchmark declares the series or bars of its axes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.image import AxesImage

    from paceline_bench.report import Row

    Point = tuple[float, float]

# By strategy; the colour-blind can tell these colours apart, and so can readers of a print.
COLOURS = {
    "non-SI": "#7f7f7f",
    "SI": "#e69f00",
    "DSI": "#0072b2",
    "AUTO": "#009e73",
    "ideal": "#000000",
}
GREY = "#bbbbbb"
NO_NUMBER = "0.85"
"""The colour of a heat map's places without a number."""


def new_figure(*, width: float, height: float, title: str = "") -> Figure:
    """Begin a picture without a screen; sizes in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write a picture; the suffix of the path, such as .png or .svg, chooses the format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=144)


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A line through points, in matplotlib's words; some points can be hollow, or have errors."""

    points: Sequence[Point]
    label: str
    colour: str | None = None
    line: str = "-"
    marker: str = "o"
    hollow: Sequence[Point] = ()
    errors: Sequence[float] | None = None


def draw_lines(
    axes: Axes,
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    doubling: str = "x",
    has_legend: bool = True,
) -> None:
    """Draw lines over numbers.

    Args:
        axes: Where to draw.
        series: The lines.
        x_label: What is counted; each number that a line has gets a tick.
        y_label: What is measured.
        doubling: The axes, of "x" and "y", on which a doubling has the same length everywhere.
        has_legend: Whether the labels of the series are shown.
    """
    for each in series:
        x, y = zip(*each.points, strict=True)
        lines, *_ = axes.errorbar(
            x, y, each.errors, color=each.colour, linestyle=each.line, capsize=3, label=each.label
        )
        lines.set_marker(each.marker)
        if each.hollow:
            x, y = zip(*each.hollow, strict=True)
            axes.scatter(x, y, color="white", edgecolor=each.colour, zorder=4)
    if "x" in doubling:
        axes.set_xscale("log", base=2)
    places = sorted({x for each in series for x, _ in each.points})
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.minorticks_off()
    if "y" in doubling:
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:g}")
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.grid(alpha=0.3)
    if has_legend:
        axes.legend(frameon=False, fontsize="small")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A bar that lies, with words at its end.

    Attributes:
        length: None: there is no bar, and its words stand at the left edge.
        ends: From the least to the most that was measured, as a line.
        below: The length of a second, grey bar.
    """

    length: float | None
    colour: str = GREY
    words: str = ""
    ends: Point | None = None
    below: float | None = None


def draw_bars(axes: Axes, bars: Sequence[Bar], *, x_label: str) -> None:
    """Draw bars from the top."""
    for place, bar in enumerate(bars):
        middle, height = (place, 0.75) if bar.below is None else (place - 0.2, 0.38)
        if bar.length is not None:
            axes.barh(middle, bar.length, color=bar.colour, height=height)
        if bar.below is not None:
            axes.barh(place + 0.2, bar.below, color=GREY, height=height)
        if bar.ends is not None:
            axes.hlines(place, *bar.ends, color="black", linewidth=1.0)
        end = bar.ends[1] if bar.ends else bar.length or 0.0
        axes.text(end, middle, f" {bar.words}", va="center", fontsize="small")
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.margins(x=0.12)
    axes.set_xlabel(x_label)


def name_bars(axes: Axes, names: Sequence[str]) -> None:
    """Write a name beside each bar."""
    axes.set_yticks(range(len(names)), names, fontsize="small")


def speed_bar(row: Row, speed: str, repeats: Sequence[float], *, colour: str, form: str) -> Bar:
    """Return the bar of a row's speed, with the speeds of its repeats; none if its text differs."""
    if not row["identical"]:
        return Bar(length=None, words="text differs: no speed")
    ends = (min(repeats), max(repeats))
    return Bar(length=row[speed], colour=colour, words=form.format(row[speed]), ends=ends)


def draw_speeds(axes: Axes, rows: Sequence[Row], *, colour: Callable[[Row], str]) -> None:
    """Draw how many times as fast as plain decoding each configuration is, from its JSON row."""
    bars = [
        speed_bar(
            row, "times_as_fast", row["repeats_times_as_fast"], colour=colour(row), form="{:.2f}x"
        )
        for row in rows
    ]
    draw_bars(axes, bars, x_label="times as fast as plain decoding; line: all texts")
    axes.axvline(1, color="black", linewidth=0.6)


def draw_ratios(
    axes: Axes,
    ratios: Mapping[Point, float | None],
    *,
    norm: Normalize,
    colours: str,
    form: str,
    size: str,
) -> AxesImage:
    """Draw a heat map with the ratio in each square, and return what a colour bar is made from.

    Args:
        axes: Where to draw.
        ratios: By drafter latency and acceptance rate; None: the output differs.
        norm: Which ratio has which colour.
        colours: The name of matplotlib's colours; only the pale ones are used.
        form: How a ratio is written.
        size: Of the letters.
    """
    drafters, rates = (sorted({place[axis] for place in ratios}) for axis in (0, 1))
    values = np.full((len(rates), len(drafters)), np.nan)
    for (drafter, rate), ratio in ratios.items():
        x, y = drafters.index(drafter), rates.index(rate)
        values[y, x] = np.nan if ratio is None else ratio
        words = "differs" if ratio is None else form.format(ratio)
        axes.text(x, y, words, ha="center", va="center", size=size)
    pale = ListedColormap(colormaps[colours](np.linspace(0.15, 0.85, 256)))
    axes.set_facecolor(NO_NUMBER)
    axes.set_xticks(range(len(drafters)), [f"{drafter:g}" for drafter in drafters])
    axes.set_yticks(range(len(rates)), [f"{rate:.0%}" for rate in rates])
    return axes.imshow(values, norm=norm, cmap=pale, origin="lower", aspect="auto")
