"""What is printed of `paceline bench cascade`, from what was kept of it."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any

from paceline_bench.cascade.recipes import ONE_STAGE_MORE
from paceline_bench.gpus import GPU_WORDS, per_gpu
from paceline_bench.pair.contest import Group, Method, times_as_fast
from paceline_bench.pair.tables import contest_tables
from paceline_bench.table import OVER_PLAIN, SAME_OUTPUT, Column, markdown, speed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from paceline_bench.report import Row

_COSTS = {"measured": "measured costs", "parameters": "parameter counts"}


def _improvement(cost: str) -> Column:
    return Column(f"SWI, {_COSTS[cost]}", lambda row: row["swi"] and row["swi"][cost], "{:.2f}")


_COLUMNS = (
    Column("", "name"),
    Column("parameters", lambda row: row["parameters"] or None),
    _improvement("measured"),
    _improvement("parameters"),
    Column("tokens/target forward", "tokens_per_forward", "{:.2f}"),
    Column(
        "drafter forwards",
        lambda row: " + ".join(f"{count:,}" for count in row["drafter_models"].values()) or None,
    ),
    Column("acceptance", "acceptance_rate", "{:.0%}"),
    Column("tokens/s", speed),
    OVER_PLAIN,
    SAME_OUTPUT,
)
_SEARCHED = (
    Column("", lambda row: f"{row['texts']}: {row['name']}"),
    Column("by", lambda row: _COSTS[row["cost"]]),
    Column("best parameters", "parameters"),
    Column("SWI", "swi", "{:.2f}"),
)


def report(content: Mapping[str, Any], *, by_gpu: bool = False) -> str:
    """Lay out the variants in Markdown, for each kind of text, and what was searched.

    Args:
        by_gpu: Whether to say also what each device makes of it.
    """
    columns = _COLUMNS + (per_gpu(itemgetter("gpu_count")) if by_gpu else ())
    kinds = list(dict.fromkeys(row["texts"] for row in content["rows"]))
    tables = [
        f"{kind}, each drafter at its best parameters for SI and measured costs:\n\n"
        + markdown(_of_kind(content["rows"], kind), columns)
        for kind in kinds
    ]
    lookups = [
        f"{kind}, from the text alone:\n\n" + contest_tables(_of_kind(content["lookup"], kind))
        for kind in kinds
    ]
    searched = "The search, on other prompts:\n\n" + markdown(content["searched"], _SEARCHED)
    lines = [*_costs(content["costs"]), *_orders(content["searched"])]
    lines += [line for kind in kinds for line in _lookups(_of_kind(content["lookup"], kind), kind)]
    lines += [GPU_WORDS] if by_gpu else []
    return "\n".join([*tables, *lookups, searched, *lines, ""])


def _of_kind(rows: Sequence[Row], kind: str) -> list[Row]:
    return [row for row in rows if row["texts"] == kind]


def _costs(costs: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    for model, measured in costs["measured"].items():
        yield (
            f"- a forward of {model} costs {measured:.3f} of the target's as measured,"
            f" {costs['parameters'][model]:.3f} by parameters"
        )
    yield "- Max-Gram costs nothing"


def _orders(searched: Sequence[Row]) -> Iterator[str]:
    """Say of each stack whether it is as good as without a stage: the paper's order."""
    found = {(it["texts"], it["name"], it["cost"]): it["swi"] for it in searched}
    for (texts, name, cost), improvement in found.items():
        if (fewer := ONE_STAGE_MORE.get(name)) is not None:
            without = found[texts, fewer, cost]
            holds = "at least as good as" if improvement >= without else "WORSE than"
            yield (
                f"- {texts}, by {_COSTS[cost]}: {name} is {holds} {fewer},"
                f" {improvement / without:.2f}x"
            )


def _lookups(rows: Sequence[Row], kind: str) -> Iterator[str]:
    """Say how Max-Gram stands beside the library's lookup."""
    lookups = {row["group"]: row for row in rows if row["method"] == Method.LOOKUP.value}
    library = lookups.pop(Group.LIBRARY.value)
    for group, row in lookups.items():
        tokens = row["tokens_per_forward"] / library["tokens_per_forward"]
        faster = times_as_fast(row["repeats_ms_per_token"], library["repeats_ms_per_token"])
        holds = "at least as good as" if min(tokens, faster) >= 1 else "WORSE than"
        yield (
            f"- {kind}, {group}: Max-Gram alone is {holds} prompt lookup, {tokens:.2f}x the tokens"
            f" of a forward, {faster:.2f}x as fast"
        )
