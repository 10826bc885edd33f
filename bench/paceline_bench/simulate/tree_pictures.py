"""What trees gain, as heat maps over drafter latency and acceptance rate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.colors import LogNorm

from paceline_bench.charts import draw_ratios, new_figure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

    from paceline_bench.simulate.trees import Gain

_RANGE = (0.5, 2.0)  # of the colours; the numbers in the squares tell the rest
_TICKS = (0.5, 0.7, 1.0, 1.4, 2.0)
_ROWS = {"over_chain": "over plain DSI", "over_si": "over SI"}


def draw_gains(gains: Sequence[Gain], *, title: str) -> Figure:
    """Draw DSI with trees: over plain DSI in the upper row, over SI in the lower one.

    Args:
        gains: Of one or more grids, each with a number of targets; those of DSI with trees of one
            shape are drawn.
        title: Above them all.
    """
    counts = sorted({gain.target_count for gain in gains})
    size = 0.9 + 0.55 * len({gain.drafter for gain in gains})
    figure = new_figure(width=size * len(counts) + 1.2, height=2 * size + 1.0)
    figure.suptitle(title, fontsize="medium")
    axes = figure.subplots(2, len(counts), sharex=True, sharey=True, squeeze=False)
    for line, (name, words) in zip(axes, _ROWS.items(), strict=True):
        for each, count in zip(line, counts, strict=True):
            own = [gain for gain in gains if gain.target_count == count]
            ratios = {(gain.drafter, gain.acceptance_rate): getattr(gain, name) for gain in own}
            norm = LogNorm(*_RANGE)
            image = draw_ratios(
                each, ratios, norm=norm, colours="RdBu", form="{:.2f}", size="x-small"
            )
            each.set_title(f"{words}, SP = {count}", size="small")
            each.tick_params(labelsize="x-small")
        line[0].set_ylabel("acceptance rate")
    for each in axes[-1]:
        each.set_xlabel("drafter latency (target = 1)")
    bar = figure.colorbar(image, ax=axes, extend="both", shrink=0.85, label="times as fast")
    bar.set_ticks(_TICKS, labels=[f"{tick:g}" for tick in _TICKS])
    bar.minorticks_off()
    return figure
