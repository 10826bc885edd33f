"""Table 2 as a picture."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from paceline_bench.charts import COLOURS, new_figure
from paceline_bench.report import spread
from paceline_bench.table2.tables import MOST_OVER_FLOOR

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from paceline_bench.table2.measurement import Measured, RowResult

_BAR = 0.26
_GOAL = "#a3123a"
_WIDTH_OF_LEGEND = 10.0


def draw_table2(results: Sequence[RowResult]) -> Figure:
    """Draw each row's times beside ideal and floor, and below how far they are above these."""
    width = max(7.0, 2.5 + 1.15 * len(results))
    figure = new_figure(width=width, height=7.0)
    times, ratios = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for place, result in enumerate(results):
        for index, each in enumerate(result.headline):
            x = place + (index - 1) * _BAR
            _draw_time(times, x, each)
            _draw_ratios(ratios, x, each)
    tokens, prompts = results[0].max_tokens, len(results[0].plain.times)
    times.set_ylabel(f"ms for {tokens} tokens, prefill included")
    times.set_title(
        f"Table 2 of the DSI paper, online: median of {prompts} prompts,"
        f" and their spread ({_ends(prompts)})",
        size="medium",
    )
    columns = 8 if width > _WIDTH_OF_LEGEND else 4
    figure.legend(handles=_legend(), ncols=columns, loc="outside lower center", frameon=False)
    ratios.axhline(1.0, color="black", linewidth=0.8)
    ratios.axhline(MOST_OVER_FLOOR, color=_GOAL, linewidth=1.2, linestyle="--")
    ratios.set_ylabel("time over floor and ideal")
    ratios.set_xticks(
        range(len(results)), [result.row.name.replace("/", "\n") for result in results]
    )
    ratios.tick_params(axis="x", labelsize="small")
    return figure


def _ends(prompts: int) -> str:
    return "first to last decile" if prompts >= 10 else "least to most"


def _draw_time(axes: Axes, x: float, each: Measured) -> None:
    times = spread(each.times)
    ends = [[times.median - times.low], [times.high - times.median]]
    colour = COLOURS[each.way.strategy_name]
    axes.bar(
        x, times.median, width=_BAR * 0.92, color=colour, yerr=ends, error_kw={"linewidth": 0.8}
    )
    left, right = x - _BAR * 0.46, x + _BAR * 0.46
    axes.hlines(statistics.median(each.ideals), left, right, color="black", linewidth=1.4)
    axes.hlines(
        statistics.median(each.floors),
        left,
        right,
        color="black",
        linewidth=1.4,
        linestyle="dotted",
    )


def _draw_ratios(axes: Axes, x: float, each: Measured) -> None:
    colour = COLOURS[each.way.strategy_name]
    floor = spread(each.over_floor)
    axes.vlines(x, floor.low, floor.high, color=colour, linewidth=1.0)
    axes.plot(x, floor.median, "o", color=colour, markersize=5)
    ideal = statistics.median(each.over_ideal)
    axes.plot(x, ideal, "o", color=colour, markersize=5, markerfacecolor="white")


def _legend() -> list[Patch | Line2D]:
    bars: list[Patch | Line2D] = [
        Patch(color=COLOURS[name], label=name) for name in ("non-SI", "SI", "DSI")
    ]
    return [
        *bars,
        Line2D([], [], color="black", linewidth=1.4, label="ideal"),
        Line2D([], [], color="black", linewidth=1.4, linestyle="dotted", label="floor"),
        Line2D([], [], color="black", marker="o", linestyle="", label="over floor"),
        Line2D([], [], color="black", marker="o", linestyle="", mfc="white", label="over ideal"),
        Line2D([], [], color=_GOAL, linestyle="--", label=f"goal: {MOST_OVER_FLOOR:g} of floor"),
    ]
