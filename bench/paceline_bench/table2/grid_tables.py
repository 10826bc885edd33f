"""What is printed and published of `paceline bench table2 --grid`, from its JSON rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_bench.report import circumstances_line, goal_line, markdown_table, restless_line
from paceline_bench.table2.grid import MOST_SLOWER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_bench.report import Results, Row

_DIFFERENT = "AN OUTPUT DIFFERED from plain decoding, so that cell has no number: please report it."


def grid_report(rows: Sequence[Row]) -> str:
    """Lay the grid out in Markdown, and say how far the goal was met."""
    planned = [row for row in rows if row["strategy"] == "DSI"]
    found = [(row["over_better"], row["name"]) for row in planned if "over_better" in row]
    lines = ["DSI's time ÷ that of the better of SI and non-SI\n", _matrix(planned)]
    if found:
        what = "DSI ÷ the better of SI and non-SI"
        lines.append(goal_line(what, found, limit=MOST_SLOWER) + "\n")
    if restless := sum(row["restless_runs"] for row in planned):
        lines.append(restless_line(restless) + "\n")
    if len(found) < len(planned):
        lines.append(_DIFFERENT + "\n")
    return "\n".join(lines)


def grid(results: Results) -> str:
    """DSI beside the better of the others on the online grid, once that was measured."""
    content = results.get("grid")
    if content is None:
        return ""
    words = "DSI's time over that of the better of SI and non-SI; bold where it is more than"
    return "\n\n".join(
        [
            f"{circumstances_line(content)}. {words} {MOST_SLOWER:g}:",
            _matrix([row for row in content["rows"] if row["strategy"] == "DSI"]).strip(),
            "![The online grid: DSI beside the better of SI and non-SI](../bench/results/grid.png)",
        ]
    )


def _matrix(planned: Sequence[Row]) -> str:
    by_place = {(row["drafter"], row["acceptance_rate"]): row for row in planned}
    drafters, rates = (sorted({place[axis] for place in by_place}) for axis in (0, 1))
    lines = [
        [f"{rate:.0%}", *(_over_better(by_place.get((drafter, rate))) for drafter in drafters)]
        for rate in rates
    ]
    headings = ("acceptance \\ drafter latency", *(f"{drafter:g}" for drafter in drafters))
    return markdown_table(headings, lines)


def _over_better(row: Row | None) -> str:
    if row is None:
        return "-"
    ratio = row.get("over_better")
    if ratio is None:
        return "output differs"
    return f"**{ratio:.3f}**" if ratio > MOST_SLOWER else f"{ratio:.3f}"
