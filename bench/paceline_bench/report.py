"""What every benchmark keeps and publishes: medians with their spread, circumstances, JSON."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import statistics
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

Row: TypeAlias = dict[str, Any]
Results: TypeAlias = "Mapping[str, Row]"
"""The content of each results file, by its name without suffix."""

_PACKAGES = ("grpcio", "protobuf", "torch", "transformers")
# Where results went has nothing to do with them.
_OUTPUT_OPTION = re.compile(r" --(?:json|chart|output-directory)[ =]\S+")
_NUMBERS = re.compile(r"\[\n *[-+.\deE]+(?:,\n *[-+.\deE]+)*\n *\]")


@dataclass(frozen=True, slots=True)
class Spread:
    """The middle of some measurements, and how far they lie apart.

    Attributes:
        median: Half of them are at or below it.
        low: The first decile; the smallest of fewer than ten.
        high: The last decile; the largest of fewer than ten.
        count: How many there were.
    """

    median: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.median:.4g} ({self.low:.4g} to {self.high:.4g})"


def spread(values: Sequence[float]) -> Spread:
    """Summarise at least one measurement."""
    count = len(values)
    ordered = sorted(values)
    tenth = count // 10
    return Spread(
        statistics.median(ordered), ordered[tenth], high=ordered[count - 1 - tenth], count=count
    )


def goal_line(what: str, found: Iterable[tuple[float, str]], *, limit: float) -> str:
    """Say in one line of a list whether the worst of some values, each with its place, will do."""
    worst, where = max(found)
    verdict = "met" if worst <= limit else "MISSED"
    return f"- {what}: at worst {worst:.3f} ({where}); goal {limit:g}: {verdict}"


def restless_line(count: int) -> str:
    """Say in one line of a list that some timed runs did not begin on an idle system."""
    return f"- began while the orchestrator still computed behind an earlier request: {count} runs"


def load_average() -> float:
    """Return how many processes wanted to compute, on average over the last minute."""
    return round(os.getloadavg()[0], 2)


def circumstances(*, load_at_start: float | None = None) -> dict[str, Any]:
    """Say when, on what machine and with what versions something was measured.

    Args:
        load_at_start: The load average before it began; None if it was not looked at.
    """
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "command": _OUTPUT_OPTION.sub("", shlex.join(["paceline", *sys.argv[1:]])),
        "machine": f"{os.cpu_count()} x {platform.machine()}, {platform.system()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "load_average_at_start": load_at_start,
        "load_average": load_average(),
    }


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


def write_json(
    path: Path,
    rows: Sequence[Mapping[str, Any]],
    *,
    load_at_start: float | None = None,
    **more: Any,
) -> None:
    """Write a benchmark's rows, with the circumstances and whatever else belongs to them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    found = circumstances(load_at_start=load_at_start)
    content = {"circumstances": found, **more, "rows": list(rows)}
    path.write_text(json_text(content))


def json_text(content: Mapping[str, Any]) -> str:
    """Return results as JSON whose changes can be read, a list of numbers in one line."""
    text = json.dumps(content, indent=1)
    return _NUMBERS.sub(lambda found: "".join(found[0].split()).replace(",", ", "), text) + "\n"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
