"""Token trees on Table 2, online: what they add to SI and DSI, as a page has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_bench.report import markdown_table, times

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline_bench.report import Results, Row

_PREFIX = "table2-trees-"


def table2_trees(results: Results) -> str:
    """What trees add, over correct SI without them: a column for each number of targets.

    Args:
        results: Those that begin with `table2-trees-` count, one for each number of targets.
    """
    runs = _runs(results)
    if not runs:
        return ""
    headings = ["", "SI, ms", "SI, trees", "ideal"]
    for content in runs:
        dsi = f"DSI, {_target_count(content['rows'])} targets"
        headings += [dsi, "with trees", "ideal"]
    names = dict.fromkeys(row["name"] for row in runs[0]["trees"])
    lines = [[name, *_si_cells(runs[0], name), *_dsi_cells(runs, name)] for name in names]
    shape = runs[0]["trees"][0]
    words = (
        f"Medians of {shape['repeats']} prompts, width {shape['width']}, branches"
        f" {shape['branches']}; how many times as fast as SI without trees, each at its best"
        " lookahead, prefill included."
    )
    return f"{words}\n\n{markdown_table(headings, lines)}"


def table2_trees_headline(results: Results) -> str:
    """Say in one sentence what trees gain with the fewest servers."""
    runs = _runs(results)
    if not runs:
        return ""
    fewest = runs[0]
    si, dsi = (_range(fewest["trees"], strategy) for strategy in ("SI", "DSI"))
    return (
        f"**With token trees**, on its Vicuna rows: SI, on one target, {si} times as fast as"
        f" without them, DSI on {_target_count(fewest['rows'])} targets {dsi} times as fast as"
        " SI without them. How often a runner-up is right is assumed."
    )


def _range(rows: Iterable[Row], strategy: str) -> str:
    gains = [
        row["speed_up_over_si"]
        for row in rows
        if row["strategy"] == strategy and row.get("speed_up_over_si")
    ]
    return f"{min(gains):.2f} to {max(gains):.2f}" if gains else "-"


def _runs(results: Results) -> list[Row]:
    return sorted(
        (content for name, content in results.items() if name.startswith(_PREFIX)),
        key=lambda content: _target_count(content["rows"]),
    )


def _si_cells(content: Row, name: str) -> list[str]:
    plain, tree = _find(content["rows"], name, "SI"), _find(content["trees"], name, "SI")
    return [f"{plain['median_ms']:.0f}", *_over_si(tree)]


def _dsi_cells(runs: Iterable[Row], name: str) -> list[str]:
    cells = []
    for content in runs:
        chain, tree = _find(content["rows"], name, "DSI"), _find(content["trees"], name, "DSI")
        cells += [times(chain.get("speed_up_over_si")), *_over_si(tree)]
    return cells


def _over_si(row: Row) -> list[str]:
    return [times(row.get("speed_up_over_si")), times(row.get("ideal_speed_up_over_si"))]


def _find(rows: Iterable[Row], name: str, strategy: str) -> Row:
    return next(row for row in rows if (row["name"], row["strategy"]) == (name, strategy))


def _target_count(rows: Iterable[Row]) -> int:
    return max(int(count) for row in rows for count in row["target_counts"])
