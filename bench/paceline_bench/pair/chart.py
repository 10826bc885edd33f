"""A pair of models as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_bench.charts import COLOURS, new_figure
from paceline_bench.pair.acceptance import accepted_shares
from paceline_bench.pair.contest import Method

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from paceline_bench.pair.contest import Entry
    from paceline_bench.pair.results import Acceptance, PairResult

__all__ = ["draw_pair"]

_METHOD_COLOURS = {
    Method.BARE: "#bbbbbb",
    Method.PLAIN: COLOURS["non-SI"],
    Method.SPECULATIVE: COLOURS["SI"],
    Method.LOOKUP: "#e6c36a",
    Method.DISTRIBUTED: COLOURS["DSI"],
}
_TARGET, _DRAFTER = "#0072b2", "#e69f00"


def draw_pair(result: PairResult) -> Figure:
    """Draw the speed of every way, what forwards take, and how far drafts are right."""
    figure = new_figure(width=11.0, height=max(4.8, 0.34 * len(result.entries) + 1.2))
    with_speeds, with_shares = bool(result.entries), result.acceptance is not None
    figure.suptitle(_title(result), size="medium")
    grid = figure.add_gridspec(
        1 + with_shares, 1 + with_speeds, width_ratios=(3, 2)[: 1 + with_speeds]
    )
    if with_speeds:
        _draw_speeds(figure.add_subplot(grid[:, 0]), result.entries)
    _draw_rows(figure.add_subplot(grid[0, -1]), result)
    if result.acceptance is not None:
        _draw_shares(figure.add_subplot(grid[1, -1]), result.acceptance)
    return figure


def _title(result: PairResult) -> str:
    target, drafter = result.target.description, result.drafter.description
    return f"{target.name} and {drafter.name}, {target.dtype} on {target.device}"


def _draw_speeds(axes: Axes, entries: list[Entry]) -> None:
    names = []
    for place, entry in enumerate(entries):
        contestant = entry.contestant
        names.append(contestant.name)
        if not entry.is_identical:
            axes.text(0, place, " text differs: no speed", va="center", fontsize="small")
            continue
        speed = entry.tokens_per_second
        slowest, fastest = (
            1e3 / ms for ms in (max(entry.repeats_ms_per_token), min(entry.repeats_ms_per_token))
        )
        axes.barh(place, speed, color=_METHOD_COLOURS[contestant.method], height=0.75)
        axes.hlines(place, slowest, fastest, color="black", linewidth=1.0)
        axes.text(fastest, place, f" {speed:.0f}", va="center", fontsize="small")
    axes.set_yticks(range(len(entries)), names, fontsize="small")
    axes.set_ylim(len(entries) - 0.4, -0.6)
    axes.margins(x=0.12)
    axes.set_xlabel("tokens/s, greedy, one text at a time: the median repeat; line: all repeats")
    groups = [entry.contestant.group for entry in entries]
    for place, group in enumerate(groups):
        if group not in groups[:place]:
            axes.text(
                0.99,
                place,
                group.value,
                transform=axes.get_yaxis_transform(),
                ha="right",
                va="center",
                fontsize="small",
                style="italic",
            )
            if place:
                axes.axhline(place - 0.5, color="black", linewidth=0.6)


def _draw_rows(axes: Axes, result: PairResult) -> None:
    for name, model, colour in (
        ("target", result.target, _TARGET),
        ("drafter", result.drafter, _DRAFTER),
    ):
        axes.plot(list(model.rows_ms), list(model.rows_ms.values()), "o-", color=colour, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(result.target.rows_ms), list(map(str, result.target.rows_ms)))
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("rows of a forward")
    axes.set_ylabel("ms for a forward, median")
    axes.legend(frameon=False, fontsize="small")


def _draw_shares(axes: Axes, acceptance: Acceptance) -> None:
    shares = accepted_shares(acceptance.blocks)
    axes.bar(range(1, len(shares) + 1), shares, color=_DRAFTER, width=0.7)
    axes.set_ylim(0, 1)
    axes.set_xticks(range(1, len(shares) + 1))
    axes.set_xlabel("first n draft tokens of a block")
    axes.set_ylabel("all right, share of blocks")
