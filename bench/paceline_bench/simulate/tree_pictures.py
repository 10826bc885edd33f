"""What trees gain, as heat maps over drafter latency and acceptance rate."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import ListedColormap, LogNorm

from paceline_bench.charts import new_figure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

    from paceline_bench.simulate.trees import Gain

_RANGE = (0.5, 2.0)  # of the colours; the numbers in the cells tell the rest
_TICKS = (0.5, 0.7, 1.0, 1.4, 2.0)
_NO_NUMBER = "0.85"


def draw_gains(gains: Sequence[Gain], *, title: str) -> Figure:
    """Draw DSI with trees: over plain DSI in the upper row, over SI in the lower one.

    Args:
        gains: Of one or more grids, each with a number of targets; those of DSI with trees of one
            shape are drawn.
        title: Above them all.
    """
    counts = sorted({gain.target_count for gain in gains})
    drafters = sorted({gain.drafter for gain in gains})
    size = 0.9 + 0.55 * len(drafters)
    figure = new_figure(width=size * len(counts) + 1.2, height=2 * size + 1.0)
    figure.suptitle(title, fontsize="medium")
    axes = figure.subplots(2, len(counts), sharex=True, sharey=True, squeeze=False)
    for column, count in enumerate(counts):
        own = [gain for gain in gains if gain.target_count == count]
        upper, lower = axes[0][column], axes[1][column]
        upper.set_title(f"over plain DSI, SP = {count}", size="small")
        image = _draw(upper, own, [gain.over_chain for gain in own])
        lower.set_title(f"over SI, SP = {count}", size="small")
        _draw(lower, own, [gain.over_si for gain in own])
        lower.set_xlabel("drafter latency (target = 1)")
    for each in axes[:, 0]:
        each.set_ylabel("acceptance rate")
    bar = figure.colorbar(image, ax=axes, extend="both", shrink=0.85, label="times as fast")
    bar.set_ticks(_TICKS, labels=[f"{tick:g}" for tick in _TICKS])
    bar.minorticks_off()
    return figure


def _draw(axes: Axes, gains: Sequence[Gain], values: Sequence[float]) -> AxesImage:
    drafters = sorted({gain.drafter for gain in gains})
    rates = sorted({gain.acceptance_rate for gain in gains})
    ratios = np.full((len(rates), len(drafters)), np.nan)
    for gain, value in zip(gains, values, strict=True):
        x, y = drafters.index(gain.drafter), rates.index(gain.acceptance_rate)
        ratios[y, x] = value
        axes.text(x, y, f"{value:.2f}", ha="center", va="center", size="x-small")
    colours = ListedColormap(colormaps["RdBu"](np.linspace(0.15, 0.85, 256)))
    axes.set_facecolor(_NO_NUMBER)
    image = axes.imshow(ratios, norm=LogNorm(*_RANGE), cmap=colours, origin="lower", aspect="auto")
    axes.set_xticks(range(len(drafters)), [f"{drafter:g}" for drafter in drafters])
    axes.set_yticks(range(len(rates)), [f"{rate:.0%}" for rate in rates])
    axes.tick_params(labelsize="x-small")
    return image
