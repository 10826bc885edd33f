"""The online grid as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.colors import TwoSlopeNorm
from matplotlib.patches import Patch, Rectangle

from paceline_bench.charts import draw_ratios, new_figure
from paceline_bench.table2.grid import MOST_SLOWER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

    from paceline_bench.report import Row

_RANGE = (0.5, 1.2)  # of the colours; the numbers in the squares tell the rest
_FRAME = 2.5


def draw_grid(rows: Sequence[Row]) -> Figure:
    """Draw DSI's time over that of the better of SI and non-SI, cell by cell.

    Args:
        rows: Of all cells of one grid, in any order.
    """
    ratios = {
        (row["drafter"], row["acceptance_rate"]): row.get("over_better")
        for row in rows
        if row["strategy"] == "DSI"
    }
    drafters, rates = (sorted({place[axis] for place in ratios}) for axis in (0, 1))
    size = 2.2 + 0.9 * len(drafters)
    figure = new_figure(width=size + 1.6, height=size)
    axes = figure.subplots()
    norm = TwoSlopeNorm(1.0, *_RANGE)
    picture = draw_ratios(axes, ratios, norm=norm, colours="RdBu_r", form="{:.3f}", size="medium")
    for (drafter, rate), ratio in ratios.items():
        if ratio is not None and ratio > MOST_SLOWER:
            corner = (drafters.index(drafter) - 0.46, rates.index(rate) - 0.46)
            axes.add_patch(Rectangle(corner, 0.92, 0.92, fill=False, linewidth=_FRAME))
    axes.set_xlabel("drafter latency (target = 1)")
    axes.set_ylabel("acceptance rate")
    axes.set_title("DSI's time over that of the better of SI and non-SI, online", size="medium")
    figure.colorbar(picture, extend="both", label="below 1 DSI is faster")
    slower = Patch(fill=False, linewidth=_FRAME, label=f"above the goal of {MOST_SLOWER:g}")
    figure.legend(handles=[slower], loc="outside lower center", frameon=False)
    return figure
