"""What the published tables share: the shape of the results, and what single cells say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

__all__ = ["Results", "Row", "circumstances_line", "speed", "times"]

Row: TypeAlias = dict[str, Any]
Results: TypeAlias = Mapping[str, Row]
"""The content of each results file, by its name without suffix."""


def circumstances_line(content: Row) -> str:
    """Say when and where something was measured, and with what command."""
    found = content["circumstances"]
    load_average = f"{found['load_average']:g} at the end"
    if found.get("load_average_at_start") is not None:
        load_average = f"{found['load_average_at_start']:g} at the start, {load_average}"
    return (
        f"`{found['command']}`, {found['date']}, {found['machine']}, Python {found['python']};"
        f" load average {load_average}"
    )


def speed(row: Row) -> str:
    """Return tokens/s; none without equality, with a star if the machine was short of CPU."""
    mark = "*" if row.get("limit") else ""
    return f"{row['tokens_per_second']:.0f}{mark}" if row["identical"] else "text differs"


def times(value: float | None) -> str:
    """Lay out how many times as fast something is; a dash if that is not known."""
    return "-" if value is None else f"{value:.2f}x"
