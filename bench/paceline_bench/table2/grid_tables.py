"""What is printed and published of `paceline bench table2 --grid`, from its JSON rows."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING

from paceline_bench.report import circumstances_line, goal_line, restless_line
from paceline_bench.table import Column, markdown
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
    by_rate: dict[float, Row] = {}
    for row in sorted(planned, key=itemgetter("acceptance_rate")):
        rate = row["acceptance_rate"]
        by_rate.setdefault(rate, {"rate": rate})[row["drafter"]] = row
    columns = [Column("acceptance \\ drafter latency", "rate", "{:.0%}")] + [
        Column(f"{drafter:g}", _over_better).within(drafter)
        for drafter in sorted({row["drafter"] for row in planned})
    ]
    return markdown(by_rate.values(), columns)


def _over_better(row: Row) -> str:
    ratio = row.get("over_better")
    if ratio is None:
        return "output differs"
    return f"**{ratio:.3f}**" if ratio > MOST_SLOWER else f"{ratio:.3f}"
