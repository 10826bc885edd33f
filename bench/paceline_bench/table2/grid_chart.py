"""The online grid as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import ListedColormap, TwoSlopeNorm
from matplotlib.patches import Patch, Rectangle

from paceline_bench.charts import new_figure
from paceline_bench.table2.grid import MOST_SLOWER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

    from paceline_bench.report import Row

_RANGE = (0.5, 1.2)  # of the colours; the numbers in the cells tell the rest
_NO_NUMBER = "0.85"
_FRAME = 2.5


def draw_grid(rows: Sequence[Row]) -> Figure:
    """Draw DSI's time over that of the better of SI and non-SI, cell by cell.

    Args:
        rows: Of all cells of one grid, in any order.
    """
    planned = [row for row in rows if row["strategy"] == "DSI"]
    drafters = sorted({row["drafter"] for row in planned})
    rates = sorted({row["acceptance_rate"] for row in planned})
    ratios = np.full((len(rates), len(drafters)), np.nan)
    size = 2.2 + 0.9 * len(drafters)
    figure = new_figure(width=size + 1.6, height=size)
    axes = figure.subplots()
    for row in planned:
        x, y = drafters.index(row["drafter"]), rates.index(row["acceptance_rate"])
        ratios[y, x] = ratio = row.get("over_better", np.nan)
        words = f"{ratio:.3f}" if row["identical"] else "differs"
        axes.text(x, y, words, ha="center", va="center")
        if ratio > MOST_SLOWER:
            corner = (x - 0.46, y - 0.46)
            axes.add_patch(Rectangle(corner, 0.92, 0.92, fill=False, linewidth=_FRAME))
    norm = TwoSlopeNorm(1.0, *_RANGE)
    colours = ListedColormap(colormaps["RdBu_r"](np.linspace(0.15, 0.85, 256)))
    axes.set_facecolor(_NO_NUMBER)
    picture = axes.imshow(ratios, norm=norm, cmap=colours, origin="lower", aspect="auto")
    axes.set_xticks(range(len(drafters)), [f"{drafter:g}" for drafter in drafters])
    axes.set_yticks(range(len(rates)), [f"{rate:.0%}" for rate in rates])
    axes.set_xlabel("drafter latency (target = 1)")
    axes.set_ylabel("acceptance rate")
    axes.set_title("DSI's time over that of the better of SI and non-SI, online", size="medium")
    figure.colorbar(picture, extend="both", label="below 1 DSI is faster")
    slower = Patch(fill=False, linewidth=_FRAME, label=f"above the goal of {MOST_SLOWER:g}")
    figure.legend(handles=[slower], loc="outside lower center", frameon=False)
    return figure
