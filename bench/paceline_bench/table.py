"""The one writer of tables: a benchmark declares columns, for Markdown and for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console

from paceline_local.screen import print_whole
from paceline_local.screen import table as screen_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paceline_bench.report import Row

UNKNOWN = "-"
"""Stands where a value is not known."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: the first one is set to the left, the others to the right.

    Attributes:
        heading: The word above it.
        value: A row's value: the name of its field, or a function of the row. None, and a key that
            a row lacks, are not known.
        form: How a known value is written: `str.format` with one field.
    """

    heading: str
    value: str | Callable[[Any], object]
    form: str = "{}"

    def cell(self, row: Any) -> str:
        """Return the words of a row."""
        if isinstance(self.value, str):
            is_mapping = isinstance(row, Mapping)
            value = row.get(self.value) if is_mapping else getattr(row, self.value)
        else:
            value = self.value(row)
        return UNKNOWN if value is None else self.form.format(value)

    def within(self, key: Any, *, heading: str | None = None) -> Column:
        """Return this column for rows that keep such a row under a key, if they have it."""
        return Column(
            self.heading if heading is None else heading,
            lambda row: self.cell(row[key]) if key in row else None,
        )


def markdown(rows: Iterable[Any], columns: Sequence[Column]) -> str:
    """Lay out a table in Markdown."""
    headings = [column.heading for column in columns]
    marks = ["---"] + ["---:"] * (len(columns) - 1)
    cells = ([column.cell(row) for column in columns] for row in rows)
    return "".join(f"| {' | '.join(line)} |\n" for line in (headings, marks, *cells))


def print_table(rows: Iterable[Any], columns: Sequence[Column]) -> None:
    """Print a table on a terminal."""
    headings = [column.heading for column in columns]
    cells = [[column.cell(row) for column in columns] for row in rows]
    print_whole(screen_table(headings, cells), Console(highlight=False))


def speed(row: Row) -> str:
    """Write tokens/s: none without equality, with a star if the machine was short of CPU."""
    if not row["identical"]:
        return "text differs"
    return f"{row['tokens_per_second']:.0f}{'*' if row.get('limit') else ''}"


def times(value: float | None) -> str:
    """Write how many times as fast something is."""
    return UNKNOWN if value is None else f"{value:.2f}x"


SAME_OUTPUT = Column("output", lambda row: "identical" if row["identical"] else "DIFFERENT")
OVER_PLAIN = Column(
    "÷ non-SI", lambda row: row["times_as_fast"] if row["identical"] else None, "{:.2f}x"
)
