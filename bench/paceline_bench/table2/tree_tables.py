"""Token trees on Table 2, online: what they add to SI and DSI, as a page has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_bench.table import Column, markdown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

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
    columns = [
        Column("", "name"),
        Column("SI, ms", lambda named: _find(runs[0]["rows"], named, "SI")["median_ms"], "{:.0f}"),
        *_over_si(runs[0]["trees"], "SI", "SI, trees"),
    ]
    for run in runs:
        heading = f"DSI, {_target_count(run['rows'])} targets"
        columns += [_over_si(run["rows"], "DSI", heading)[0]]
        columns += _over_si(run["trees"], "DSI", "with trees")
    names = dict.fromkeys(row["name"] for row in runs[0]["trees"])
    shape = runs[0]["trees"][0]
    words = (
        f"Medians of {shape['repeats']} prompts, width {shape['width']}, branches"
        f" {shape['branches']}; how many times as fast as SI without trees, each at its best"
        " lookahead, prefill included."
    )
    lines = [{"name": name} for name in names]
    return f"{words}\n\n{markdown(lines, columns)}"


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


def _over_si(rows: Sequence[Row], strategy: str, heading: str) -> tuple[Column, Column]:
    """Return what a strategy gains over SI, and what it would gain without any overhead."""

    def gain(key: str) -> Callable[[Row], float | None]:
        return lambda named: _find(rows, named, strategy).get(key)

    return (
        Column(heading, gain("speed_up_over_si"), "{:.2f}x"),
        Column("ideal", gain("ideal_speed_up_over_si"), "{:.2f}x"),
    )


def _find(rows: Iterable[Row], named: Row, strategy: str) -> Row:
    wanted = (named["name"], strategy)
    return next(row for row in rows if (row["name"], row["strategy"]) == wanted)


def _target_count(rows: Iterable[Row]) -> int:
    return max(int(count) for row in rows for count in row["target_counts"])
