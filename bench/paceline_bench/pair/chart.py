"""A pair of models as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_bench.charts import COLOURS, new_figure
from paceline_bench.pair.contest import Method

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from paceline_bench.report import Row

_METHOD_COLOURS = {
    Method.BARE: "#bbbbbb",
    Method.PLAIN: COLOURS["non-SI"],
    Method.SPECULATIVE: COLOURS["SI"],
    Method.LOOKUP: "#e6c36a",
    Method.DISTRIBUTED: COLOURS["DSI"],
}
_TARGET, _DRAFTER = "#0072b2", "#e69f00"


def draw_pair(content: Mapping[str, Any]) -> Figure:
    """Draw the speed of every way, what forwards take, and how far drafts are right.

    Args:
        content: As it is kept; parts may be missing.
    """
    rows, models, acceptance = content["rows"], content["models"], content.get("acceptance")
    figure = new_figure(width=11.0, height=max(4.8, 0.34 * len(rows) + 1.2))
    with_speeds, with_shares = bool(rows), acceptance is not None
    target, drafter = models["target"], models["drafter"]
    title = f"{target['name']} and {drafter['name']}, {target['dtype']} on {target['device']}"
    figure.suptitle(title, size="medium")
    grid = figure.add_gridspec(
        1 + with_shares, 1 + with_speeds, width_ratios=(3, 2)[: 1 + with_speeds]
    )
    if with_speeds:
        _draw_speeds(figure.add_subplot(grid[:, 0]), rows)
    _draw_rows(figure.add_subplot(grid[0, -1]), models)
    if acceptance is not None:
        _draw_shares(figure.add_subplot(grid[1, -1]), acceptance["accepted_shares"])
    return figure


def _draw_speeds(axes: Axes, rows: Sequence[Row]) -> None:
    for place, row in enumerate(rows):
        if not row["identical"]:
            axes.text(0, place, " text differs: no speed", va="center", fontsize="small")
            continue
        speed, times_ms = row["tokens_per_second"], row["repeats_ms_per_token"]
        slowest, fastest = 1e3 / max(times_ms), 1e3 / min(times_ms)
        axes.barh(place, speed, color=_METHOD_COLOURS[Method(row["method"])], height=0.75)
        axes.hlines(place, slowest, fastest, color="black", linewidth=1.0)
        axes.text(fastest, place, f" {speed:.0f}", va="center", fontsize="small")
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize="small")
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.margins(x=0.12)
    axes.set_xlabel("tokens/s, greedy, one text at a time: the median repeat; line: all repeats")
    groups = [row["group"] for row in rows]
    for place, group in enumerate(groups):
        if group not in groups[:place]:
            axes.text(
                0.99,
                place,
                group,
                transform=axes.get_yaxis_transform(),
                ha="right",
                va="center",
                fontsize="small",
                style="italic",
            )
            if place:
                axes.axhline(place - 0.5, color="black", linewidth=0.6)


def _draw_rows(axes: Axes, models: Mapping[str, Row]) -> None:
    for role, colour in (("target", _TARGET), ("drafter", _DRAFTER)):
        rows_ms = models[role]["rows_ms"]
        axes.plot(list(rows_ms), list(rows_ms.values()), "o-", color=colour, label=role)
    axes.set_xscale("log", base=2)
    counts = list(models["target"]["rows_ms"])
    axes.set_xticks(counts, list(map(str, counts)))
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("rows of a forward")
    axes.set_ylabel("ms for a forward, median")
    axes.legend(frameon=False, fontsize="small")


def _draw_shares(axes: Axes, shares: Sequence[float]) -> None:
    axes.bar(range(1, len(shares) + 1), shares, color=_DRAFTER, width=0.7)
    axes.set_ylim(0, 1)
    axes.set_xticks(range(1, len(shares) + 1))
    axes.set_xlabel("first n draft tokens of a block")
    axes.set_ylabel("all right, share of blocks")
