"""Draws the heat maps: a panel for each ratio, red and hatched where it is a slow-down."""

from __future__ import annotations

from itertools import chain, pairwise
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from matplotlib import colormaps
from matplotlib.collections import LineCollection
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from paceline_bench.charts import new_figure
from paceline_bench.simulate.claims import RATIOS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh
    from matplotlib.contour import QuadContourSet
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from paceline_bench.simulate.heatmaps import Cell

    Bools: TypeAlias = NDArray[np.bool_]
    Floats: TypeAlias = NDArray[np.float64]

_RANGE = (0.5, 2.0)  # of the colours; beyond it the lines tell
_TICKS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 1.75, 2.0)
_LEVELS = (0.4, 0.6, 0.8, 1.1, 1.25, 1.4, 2.0, 4.0, 10.0)
_SLOW = 1 - 1e-9  # equal times are no slow-down, however they are rounded
_NOTHING = "0.85"
_HATCH = "\\" * 3
_EDGE = 0.04  # nearer to the frame no line has a label: it would be cut


def draw_heatmaps(cells: Sequence[Cell], *, panels: Sequence[str], title: str) -> Figure:
    """Draw ratios of run times over drafter latency and acceptance rate.

    Colours are the drawn generations. Lines, and what is marked as a slow-down, are the
    expectation over all draws.

    Args:
        cells: At least 2 x 2: whole columns of one grid, in any order.
        panels: Keys of RATIOS.
        title: Above them all.
    """
    columns = 2 if len(panels) == 4 else len(panels)
    rows = -(-len(panels) // columns)
    figure = new_figure(width=4.3 * columns + 0.6, height=4.0 * rows + 1.1)
    figure.suptitle(title, fontsize="medium")
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for panel, each in zip(panels, axes.flat, strict=True):
        mesh = _draw_panel(each, cells, panel)
    for each in axes[-1]:
        each.set_xlabel("drafter latency (target = 1)")
    for each in axes[:, 0]:
        each.set_ylabel("acceptance rate")
    _add_colour_bar(figure, axes, mesh)
    _add_legend(figure, has_gap=min(cell.drafter_percent for cell in cells) > 1)
    return figure


def _draw_panel(axes: Axes, cells: Sequence[Cell], panel: str) -> QuadMesh:
    ratio = RATIOS[panel]
    drafters = sorted({cell.drafter_percent for cell in cells})
    rates = sorted({cell.acceptance_percent for cell in cells})
    drawn = np.full((len(rates), len(drafters)), np.nan)
    expected = np.full_like(drawn, np.nan)
    for cell in cells:
        place = rates.index(cell.acceptance_percent), drafters.index(cell.drafter_percent)
        drawn[place], expected[place] = ratio(cell.means), ratio(cell.expected)
    x, y = np.array(drafters) / 100, np.array(rates) / 100
    x_edges, y_edges = _edges(x), _edges(y)
    mesh = axes.pcolormesh(
        x_edges, y_edges, drawn, norm=LogNorm(*_RANGE), cmap=_colours(), rasterized=True
    )
    slow = expected < _SLOW
    if slow.any():
        _mark(axes, slow, x_edges=x_edges, y_edges=y_edges)
        words = f"slow-down: {slow.sum()} cells, to {expected.min():.3g}"
        axes.set_title(words, loc="right", fontsize="small")
    lines = axes.contour(x, y, expected, levels=_LEVELS, colors="black", linewidths=0.6)
    for text in axes.clabel(lines, fmt="%g", fontsize="x-small", manual=[*_label_places(lines)]):
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.8})
    axes.set_facecolor(_NOTHING)
    axes.set_title(panel, loc="left", fontsize="medium")
    axes.set(xlim=(0, x_edges[-1]), ylim=(y_edges[0], y_edges[-1]))
    return mesh


def _mark(axes: Axes, cells: Bools, *, x_edges: Floats, y_edges: Floats) -> None:
    """Hatch whole cells, and draw a line around them."""
    corners = [
        [
            (x_edges[x], y_edges[y]),
            (x_edges[x + 1], y_edges[y]),
            (x_edges[x + 1], y_edges[y + 1]),
            (x_edges[x], y_edges[y + 1]),
        ]
        for y, x in np.argwhere(cells)
    ]
    path = Path.make_compound_path(*(Path([*each, each[0]], closed=True) for each in corners))
    axes.add_patch(PathPatch(path, facecolor="none", hatch=_HATCH, linewidth=0))
    padded = np.pad(cells, 1)
    upright = np.argwhere(padded[1:-1, 1:] != padded[1:-1, :-1])
    level = np.argwhere(padded[1:, 1:-1] != padded[:-1, 1:-1])
    around = [[(x_edges[x], y_edges[y]), (x_edges[x], y_edges[y + 1])] for y, x in upright]
    around += [[(x_edges[x], y_edges[y]), (x_edges[x + 1], y_edges[y])] for y, x in level]
    axes.add_collection(LineCollection(around, colors="black", linewidths=1.0))


def _label_places(lines: QuadContourSet) -> Iterator[tuple[float, float]]:
    """Yield the middle of each line, as far as it is not near to the frame."""
    for line in chain.from_iterable(lines.allsegs):
        inner = line[((line > _EDGE) & (line < 1 - _EDGE)).all(axis=1)]
        if len(inner):
            x, y = inner[len(inner) // 2]
            yield float(x), float(y)


def _add_colour_bar(figure: Figure, axes: NDArray[np.object_], mesh: QuadMesh) -> None:
    bar = figure.colorbar(mesh, ax=axes, extend="both", shrink=0.85, pad=0.02)
    bar.set_label("X / Y: the time of X over the time of Y")
    bar.ax.yaxis.set_major_locator(FixedLocator(_TICKS))
    bar.ax.yaxis.set_major_formatter(FixedFormatter([f"{tick:g}" for tick in _TICKS]))
    bar.ax.yaxis.set_minor_locator(NullLocator())


def _add_legend(figure: Figure, *, has_gap: bool) -> None:
    patches = [
        Patch(
            facecolor="none",
            edgecolor="black",
            hatch=_HATCH,
            label="slow-down: X takes less than Y",
        )
    ]
    if has_gap:
        patches.append(Patch(facecolor=_NOTHING, label="not feasible: Equation 1"))
    figure.legend(handles=patches, loc="outside lower center", ncols=2, frameon=False)


def _colours() -> ListedColormap:
    """Return red over white to blue, without the ends that are too dark for lines."""
    return ListedColormap(colormaps["RdBu"](np.linspace(0.08, 0.92, 256)))


def _edges(centres: Floats) -> Floats:
    """Return the edges between cells: halfway, and the outer ones as far as the inner ones."""
    middle = [(left + right) / 2 for left, right in pairwise(centres)]
    return np.array([2 * centres[0] - middle[0], *middle, 2 * centres[-1] - middle[-1]])
