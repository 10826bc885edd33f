"""What the pages say of `paceline bench table2 --grid`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_bench.report import circumstances_line, markdown_table
from paceline_bench.table2.grid import MOST_SLOWER

if TYPE_CHECKING:
    from paceline_bench.report import Results, Row

__all__ = ["grid"]


def grid(results: Results) -> str:
    """DSI beside the better of the others on the online grid, once that was measured."""
    content = results.get("grid")
    if content is None:
        return ""
    by_place = {
        (row["drafter"], row["acceptance_rate"]): row
        for row in content["rows"]
        if row["strategy"] == "DSI"
    }
    drafters, rates = (sorted({place[axis] for place in by_place}) for axis in (0, 1))
    lines = [
        [f"{rate:.0%}", *(_over_better(by_place.get((drafter, rate))) for drafter in drafters)]
        for rate in rates
    ]
    headings = ("acceptance \\ drafter latency", *(f"{drafter:g}" for drafter in drafters))
    words = "DSI's time over that of the better of SI and non-SI; bold where it is more than"
    return "\n\n".join(
        [
            f"{circumstances_line(content)}. {words} {MOST_SLOWER:g}:",
            markdown_table(headings, lines).strip(),
            "![The online grid: DSI beside the better of SI and non-SI](../bench/results/grid.png)",
        ]
    )


def _over_better(row: Row | None) -> str:
    if row is None:
        return "-"
    ratio = row.get("over_better")
    if ratio is None:
        return "output differs"
    return f"**{ratio:.3f}**" if ratio > MOST_SLOWER else f"{ratio:.3f}"
