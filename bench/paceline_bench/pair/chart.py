"""A pair of models as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_bench.charts import (
    COLOURS,
    GREY,
    Series,
    draw_bars,
    draw_lines,
    name_bars,
    new_figure,
    speed_bar,
)
from paceline_bench.pair.contest import Method

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from paceline_bench.report import Row

_METHOD_COLOURS = {
    Method.BARE: GREY,
    Method.PLAIN: COLOURS["non-SI"],
    Method.SPECULATIVE: COLOURS["SI"],
    Method.LOOKUP: "#e6c36a",
    Method.DISTRIBUTED: COLOURS["DSI"],
}
_ROLE_COLOURS = {"target": "#0072b2", "drafter": "#e69f00"}


def draw_pair(content: Mapping[str, Any]) -> Figure:
    """Draw the speed of every configuration, what forwards take, and how far drafts are right.

    Args:
        content: As it is kept; parts may be missing.
    """
    rows, models, acceptance = content["rows"], content["models"], content.get("acceptance")
    figure = new_figure(width=11.0, height=max(4.8, 0.34 * len(rows) + 1.2))
    target, drafter = models["target"], models["drafter"]
    title = f"{target['name']} and {drafter['name']}, {target['dtype']} on {target['device']}"
    figure.suptitle(title, size="medium")
    # Speeds take the left side; the other parts share the right side.
    sides, parts = 1 + bool(rows), 1 + (acceptance is not None)
    grid = figure.add_gridspec(parts, sides, width_ratios=(3, 2)[:sides])
    if rows:
        _draw_speeds(figure.add_subplot(grid[:, 0]), rows)
    _draw_forwards(figure.add_subplot(grid[0, -1]), models)
    if acceptance is not None:
        _draw_shares(figure.add_subplot(grid[1, -1]), acceptance["accepted_shares"])
    return figure


def _draw_speeds(axes: Axes, rows: Sequence[Row]) -> None:
    bars = [
        speed_bar(
            row,
            "tokens_per_second",
            [1e3 / ms for ms in row["repeats_ms_per_token"]],
            colour=_METHOD_COLOURS[Method(row["method"])],
            form="{:.0f}",
        )
        for row in rows
    ]
    words = "tokens/s, greedy, one text at a time: the median repeat; line: all repeats"
    draw_bars(axes, bars, x_label=words)
    name_bars(axes, [row["name"] for row in rows])
    groups = [row["group"] for row in rows]
    style = {"ha": "right", "va": "center", "fontsize": "small", "style": "italic"}
    for group in dict.fromkeys(groups):
        place = groups.index(group)
        axes.text(0.99, place, group, style, transform=axes.get_yaxis_transform())
        if place:
            axes.axhline(place - 0.5, color="black", linewidth=0.6)


def _draw_forwards(axes: Axes, models: Mapping[str, Row]) -> None:
    series = [
        Series(
            points=[(int(count), ms) for count, ms in models[role]["rows_ms"].items()],
            colour=colour,
            label=role,
        )
        for role, colour in _ROLE_COLOURS.items()
    ]
    draw_lines(axes, series, x_label="rows of a forward", y_label="ms for a forward, median")
    axes.set_ylim(bottom=0)


def _draw_shares(axes: Axes, shares: Sequence[float]) -> None:
    positions = range(1, len(shares) + 1)
    axes.bar(positions, shares, color=_ROLE_COLOURS["drafter"], width=0.7)
    axes.set_ylim(0, 1)
    axes.set_xticks(positions)
    axes.set_xlabel("first n draft tokens of a block")
    axes.set_ylabel("all right, share of blocks")
