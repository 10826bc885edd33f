"""What is printed of `paceline bench cascade`, from what was kept of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline_bench.cascade.recipes import CASCADE, SPECULATIVE
from paceline_bench.report import speed, table, times

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from paceline_bench.report import Row

__all__ = ["report"]

_COSTS = {"measured": "measured costs", "parameters": "parameter counts"}
_MISSING = (
    "- rows of the paper that are missing: those with a second model below the target, which the"
    " bundled pair has not"
)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


_COLUMNS: dict[str, Callable[[Row], str]] = {
    "": lambda row: row["name"],
    "parameters": lambda row: row["parameters"] or "-",
    "SWI, measured costs": lambda row: f"{row['swi']['measured']:.2f}",
    "SWI, parameter counts": lambda row: f"{row['swi']['parameters']:.2f}",
    "tokens/target forward": lambda row: f"{row['tokens_per_forward']:.2f}",
    "drafter forwards": lambda row: (
        f"{row['drafter_forwards']:,}" if row["drafter_forwards"] else "-"
    ),
    "acceptance": lambda row: _share(row["acceptance_rate"]),
    "tokens/s": speed,
    "÷ non-SI": lambda row: times(row["times_as_fast"] if row["identical"] else None),
    "text": lambda row: "identical" if row["identical"] else "DIFFERENT",
}
_SEARCHED: dict[str, Callable[[Row], str]] = {
    "": lambda row: f"{row['texts']}: {row['name']}",
    "by": lambda row: _COSTS[row["cost"]],
    "best parameters": lambda row: row["parameters"],
    "SWI": lambda row: f"{row['swi']:.2f}",
}


def report(content: Mapping[str, Any]) -> str:
    """Lay out the ways in Markdown, for each kind of text, and what was searched."""
    kinds = dict.fromkeys(row["texts"] for row in content["rows"])
    tables = [
        f"{kind}, each way at its best parameters for measured costs:\n\n"
        + table([row for row in content["rows"] if row["texts"] == kind], _COLUMNS)
        for kind in kinds
    ]
    searched = "The search, on other prompts:\n\n" + table(content["searched"], _SEARCHED)
    return "\n".join([*tables, searched, *_lines(content), ""])


def _lines(content: Mapping[str, Any]) -> Iterator[str]:
    costs = content["costs"]
    yield (
        f"- a forward of the drafter costs {costs['measured']:.3f} of the target's as measured,"
        f" {costs['parameters']:.3f} by parameters; Max-Gram nothing"
    )
    found = {(it["texts"], it["name"], it["cost"]): it["swi"] for it in content["searched"]}
    for (texts, name, cost), improvement in found.items():
        if name == CASCADE:
            alone = found[texts, SPECULATIVE, cost]
            holds = "at least as good as" if improvement >= alone else "WORSE than"
            yield (
                f"- {texts}, by {_COSTS[cost]}: with Max-Gram below it the drafter is {holds}"
                f" without, {improvement / alone:.2f}x"
            )
    yield _MISSING
