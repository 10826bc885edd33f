"""What the pages say of `paceline simulate`."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING

from paceline_bench.table import Column, markdown

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline_bench.report import Results, Row

_FIGURES = {"figure2": "Figure 2", "figure7": "Figure 7"}
_AS_SERVED = {"blocks": "", "work_conserving": ", as served"}


def simulate(results: Results) -> str:
    """What the paper claims of its heat maps, held against ours."""
    content, served = results["simulate"], results["simulate-served"]
    rows = (*content["rows"], *served["rows"])
    columns = (Column("claim of the paper", itemgetter(0)), *map(_figure_column, rows))
    commands = " and ".join(f"`{each['circumstances']['command']}`" for each in (content, served))
    table1 = "exactly" if content["table1_is_exact"] else "NOT exactly"
    return (
        f"{commands}, {content['circumstances']['date']}. Table 1 is reproduced {table1}.\n\n"
        + markdown(_CLAIMS.items(), columns)
    )


def _figure_column(row: Row) -> Column:
    heading = _FIGURES[row["figure"]] + _AS_SERVED[row["dispatch"]]
    return Column(heading, lambda claim: claim[1](row))


def _below_diagonal(row: Row) -> str:
    count = row["si_slower_elsewhere_count"]
    others = f"{count:,}" if count else "no"
    return (
        f"in {row['si_slower_below_count']:,} of those {row['below_count']:,} cells,"
        f" {others} others"
    )


def _never_slower(found: Row) -> str:
    if not found["slower_count"]:
        return "holds"
    cells = "1 cell" if found["slower_count"] == 1 else f"{found['slower_count']:,} cells"
    place = _at(found["worst_place"])
    return f"but for {cells}, by {found['worst_loss']:.1%} at most ({place})"


def _largest_gain(row: Row) -> str | None:
    if row["lookahead"] is not None:
        return None  # SI is not at its best there
    found = row["over_both"]
    place = _at(found["best_place"])
    return f"{found['best_ratio']:.2f}x ({place}), {found['mean_ratio']:.2f}x on average"


def _drawn_gain(row: Row) -> str | None:
    if row["lookahead"] is not None:
        return None
    return f"{row['drawn_best_ratio']:.2f}x ({_at(row['drawn_best_place'])})"


def _at(place: Sequence[float]) -> str:
    return f"drafter {place[0]:.2f}, acceptance {place[1]:.2f}"


_CLAIMS: dict[str, Callable[[Row], str | None]] = {
    "SI is slower than non-SI below the diagonal": _below_diagonal,
    "DSI is never slower than non-SI": lambda row: _never_slower(row["over_non_si"]),
    "DSI is never slower than SI": lambda row: _never_slower(row["over_si"]),
    "DSI over the better of the two: up to 1.6x": _largest_gain,
    "by the luck of the repeats": _drawn_gain,
    "cells": lambda row: f"{row['cell_count']:,}",
}
