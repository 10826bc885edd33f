"""What is printed and published of self-drafting, from what was kept of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline_bench.report import speed, table, times

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paceline_bench.report import Row

__all__ = ["break_even", "report"]

_COLUMNS: dict[str, Callable[[Row], str]] = {
    "": lambda row: row["name"],
    "tokens/forward": lambda row: f"{row['tokens_per_forward']:.2f}",
    "rows/forward": lambda row: f"{row['rows_per_forward']:.1f}",
    "drafter forwards": lambda row: (
        f"{row['drafter_forwards']:,}" if row["drafter_forwards"] else "-"
    ),
    "tokens/s": speed,
    "÷ non-SI": lambda row: times(row["times_as_fast"] if row["identical"] else None),
    "extra parameters": lambda row: (
        f"{row['extra_parameters']:,}" if row["extra_parameters"] else "-"
    ),
    "text": lambda row: "identical" if row["identical"] else "DIFFERENT",
}


def report(content: Mapping[str, Any]) -> str:
    """Lay out the ways in Markdown, and the break-even with two models."""
    rows = content["rows"]
    lines = [break_even(row, two=rows[1]) for row in rows[2:]]
    return "\n".join([table(rows, _COLUMNS), *lines, ""])


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
