"""What is printed and published of self-drafting, from what was kept of it."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any

from paceline_bench.gpus import GPU_WORDS, per_gpu
from paceline_bench.table import OVER_PLAIN, SAME_OUTPUT, Column, markdown, speed, times

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline_bench.report import Row

_TOKENS_AND_ROWS = (
    Column("tokens/forward", "tokens_per_forward", "{:.2f}"),
    Column("rows/forward", "rows_per_forward", "{:.1f}"),
)
_SPEED = (Column("tokens/s", speed), OVER_PLAIN)
_COLUMNS = (
    Column("", "name"),
    *_TOKENS_AND_ROWS,
    Column("drafter forwards", lambda row: row["drafter_forwards"] or None, "{:,}"),
    *_SPEED,
    Column("extra parameters", lambda row: row["extra_parameters"] or None, "{:,}"),
    SAME_OUTPUT,
)
_SWEPT = (
    Column("", lambda row: row["adapter"] or "non-SI"),
    Column("tree", lambda row: row["kind"] if row["nodes"] else None),
    Column("gamma", lambda row: row["reach"] or None),
    Column("guesses", lambda row: row["nodes"] or None),
    Column("pruned below", lambda row: row["prune_below"] or None, "{:g}"),
    *_TOKENS_AND_ROWS,
    Column("in upper layers", "upper_rows_per_forward", "{:.1f}"),
    *_SPEED,
    SAME_OUTPUT,
)


def sweep_report(content: Mapping[str, Any]) -> str:
    """Lay out a sweep over trees in Markdown, and say which tree is the best of each adapter."""
    rows = content["rows"]
    adapters = dict.fromkeys(row["adapter"] for row in rows if row["nodes"])
    lines = [_best_tree(adapter, rows) for adapter in adapters]
    return "\n".join([markdown(rows, _SWEPT), *lines, ""])


def _best_tree(adapter: str, rows: Sequence[Row]) -> str:
    own = [row for row in rows if row["adapter"] == adapter and row["identical"]]
    if not own:
        return f"- {adapter}: every text differs"
    best = max(own, key=lambda row: row["times_as_fast"])
    pruned = f", pruned below {best['prune_below']:g}" if best["prune_below"] else ""
    return (
        f"- {adapter}: fastest with {best['nodes']} guesses ({best['kind']}, gamma"
        f" {best['reach']}{pruned}): {times(best['times_as_fast'])} of plain decoding,"
        f" {best['tokens_per_forward']:.2f} tokens a forward"
    )


def report(content: Mapping[str, Any], *, by_gpu: bool = False) -> str:
    """Lay out the variants in Markdown, and the break-even with two models.

    Args:
        by_gpu: Whether to say also what each device makes of it.
    """
    rows = content["rows"]
    columns = _COLUMNS + (per_gpu(itemgetter("gpu_count")) if by_gpu else ())
    lines = [break_even(row, two=rows[1]) for row in rows[2:]]
    return "\n".join([markdown(rows, columns), *lines, *([GPU_WORDS] if by_gpu else []), ""])


def break_even(row: Row, *, two: Row) -> str:
    """Say what a forward of two models has to give to be as good as one of this way.

    Speculative Streaming, equation 6: (gamma C_d + C_t) / zeta = C_ss / beta, with what a forward
    took here, drafts and calls included.
    """
    cost = _seconds_per_forward(two) / _seconds_per_forward(row)
    needed = cost * row["tokens_per_forward"]
    return (
        f"- as good as {row['name']}, {two['name']} would have to give {needed:.2f} tokens for each"
        f" target forward ({cost:.2f} times as many); it gives {two['tokens_per_forward']:.2f}"
    )


def _seconds_per_forward(row: Row) -> float:
    seconds: float = row["tokens_per_forward"] / row["tokens_per_second"]
    return seconds
