"""Table 2 as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.colors import TwoSlopeNorm
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from paceline_bench.charts import COLOURS, draw_ratios, new_figure
from paceline_bench.table2.grid import MOST_SLOWER
from paceline_bench.table2.tables import MOST_OVER_FLOOR

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from paceline_bench.report import Row


_STRATEGIES = ("non-SI", "SI", "DSI")
_BAR = 0.26
_GOAL = "#a3123a"
_WIDTH_OF_LEGEND = 10.0


def draw_table2(rows: Sequence[Row], *, max_tokens: int) -> Figure:
    """Draw each row's times beside ideal and floor, and below how far they are above these.

    Args:
        rows: As they are kept (results.py).
        max_tokens: Tokens of each run.
    """
    names = list(dict.fromkeys(row["name"] for row in rows))
    placed = [
        (names.index(row["name"]) + (_STRATEGIES.index(row["strategy"]) - 1) * _BAR, row)
        for row in rows
        if row["strategy"] in _STRATEGIES
    ]
    width = max(7.0, 2.5 + 1.15 * len(names))
    figure = new_figure(width=width, height=7.0)
    times, ratios = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    prompts = rows[0]["repeats"]
    ends = "first to last decile" if prompts >= 10 else "least to most"
    for place, row in placed:
        _draw_time(times, place, row)
        _draw_ratios(ratios, place, row)
    times.set_ylabel(f"ms for {max_tokens} tokens, prefill included")
    times.set_title(
        f"Table 2 of the DSI paper, online: median of {prompts} prompts, and their spread ({ends})",
        size="medium",
    )
    ratios.axhline(1.0, color="black", linewidth=0.8)
    ratios.axhline(MOST_OVER_FLOOR, color=_GOAL, linewidth=1.2, linestyle="--")
    ratios.set_ylabel("time over floor and ideal")
    ratios.set_xticks(range(len(names)), [name.replace("/", "\n") for name in names])
    ratios.tick_params(axis="x", labelsize="small")
    columns = 8 if width > _WIDTH_OF_LEGEND else 4
    figure.legend(handles=_legend(), ncols=columns, loc="outside lower center", frameon=False)
    return figure


def _draw_time(axes: Axes, place: float, row: Row) -> None:
    median = row["median_ms"]
    ends = [[median - row["low_ms"]], [row["high_ms"] - median]]
    width, colour = _BAR * 0.92, COLOURS[row["strategy"]]
    axes.bar(place, median, width=width, color=colour, yerr=ends, error_kw={"linewidth": 0.8})
    for key, style in (("ideal_ms", "solid"), ("floor_ms", "dotted")):
        left, right = place - width / 2, place + width / 2
        axes.hlines(row[key], left, right, color="black", linewidth=1.4, linestyle=style)


def _draw_ratios(axes: Axes, place: float, row: Row) -> None:
    colour = COLOURS[row["strategy"]]
    low, high = row["online_over_floor_low"], row["online_over_floor_high"]
    axes.vlines(place, low, high, color=colour, linewidth=1.0)
    axes.plot(place, row["online_over_floor"], "o", color=colour, markersize=5)
    ideal = row["online_over_ideal"]
    axes.plot(place, ideal, "o", color=colour, markersize=5, markerfacecolor="white")


def _legend() -> list[Patch | Line2D]:
    return [
        *(Patch(color=COLOURS[name], label=name) for name in _STRATEGIES),
        Line2D([], [], color="black", linewidth=1.4, label="ideal"),
        Line2D([], [], color="black", linewidth=1.4, linestyle="dotted", label="floor"),
        Line2D([], [], color="black", marker="o", linestyle="", label="over floor"),
        Line2D([], [], color="black", marker="o", linestyle="", mfc="white", label="over ideal"),
        Line2D([], [], color=_GOAL, linestyle="--", label=f"goal: {MOST_OVER_FLOOR:g} of floor"),
    ]


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
