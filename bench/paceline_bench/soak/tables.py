"""What a soak has found, as a table in Markdown and as a line for the log."""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from paceline_bench.report import circumstances
from paceline_bench.soak.rounds import growth
from paceline_bench.table import Column, markdown

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from paceline_bench.soak.rounds import Growth, Reading, Soak

    _Process = tuple[str, Sequence[Reading]]

LOG_MARK = "<!-- soaks: new lines go above this one -->"
"""Where a log has its list of soaks."""

CLIENT = "client"
"""The process that asks, which has no limit."""

_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Soaked:
    """What a soak has found.

    Attributes:
        plan: What was asked for.
        readings: By process, after the warm-up and after each round.
        wrong_count: Outputs that were not plain decoding's.
        limit: The most bytes by which each server may grow with each request.
    """

    plan: Soak
    readings: dict[str, list[Reading]]
    wrong_count: int
    limit: float

    @property
    def excesses(self) -> tuple[str, ...]:
        """The servers that grew beyond the limit. The client's process also keeps the readings."""
        return tuple(
            name
            for name, readings in self.readings.items()
            if name != CLIENT and growth(readings).bytes_per_request > self.limit
        )

    @property
    def held(self) -> bool:
        """Whether each server stayed within the limit, and every output was right."""
        return not self.excesses and not self.wrong_count


def soak_table(soaked: Soaked) -> str:
    """Lay out what each process held after the warm-up, and at the end."""
    return markdown(soaked.readings.items(), _COLUMNS)


def log_line(soaked: Soaked) -> str:
    """Say in one line of a list what came of it."""
    plan = soaked.plan
    slopes = ", ".join(
        f"{name} {_slope(growth(readings))}" for name, readings in soaked.readings.items()
    )
    strategies = ", ".join(strategy.abbreviation for strategy in plan.strategies)
    wrong = f", {soaked.wrong_count} outputs WRONG" if soaked.wrong_count else ""
    return (
        f"- {circumstances()['date']}: {plan.request_count:,} requests ({strategies}) after "
        f"{plan.warm_up_count:,}, {plan.max_tokens} tokens each, {plan.leaving_share:.0%} left "
        f"early, seed {plan.seed}; bytes a request: {slopes}; goal for each server "
        f"{soaked.limit:g}: {_verdict(soaked)}{wrong}"
    )


def _verdict(soaked: Soaked) -> str:
    return f"MISSED by {', '.join(soaked.excesses)}" if soaked.excesses else "met"


def add_to_log(line: str, log: Path) -> None:
    """Put a line at the end of a log's list of soaks.

    Raises:
        ValueError: The log has no such list.
    """
    text = log.read_text()
    if LOG_MARK not in text:
        raise ValueError(f"{log} has no line {LOG_MARK!r}")
    log.write_text(text.replace(LOG_MARK, f"{line}\n{LOG_MARK}", 1))


def record(soaked: Soaked) -> list[dict[str, Any]]:
    """Return a row for each process, for JSON."""
    return [
        {
            "process": name,
            "own_bytes_per_request": growth(readings).bytes_per_request,
            "own_error": growth(readings).error,
            "resident_bytes_per_request": growth(readings, resident=True).bytes_per_request,
            "readings": [_plain(it) for it in readings],
        }
        for name, readings in soaked.readings.items()
    ]


def _plain(reading: Reading) -> dict[str, int | None]:
    return {
        "requests": reading.request_count,
        "own_bytes": reading.own_bytes,
        "resident_bytes": reading.resident_bytes,
        "descriptors": reading.descriptor_count,
        "threads": reading.thread_count,
        "tasks": reading.task_count,
        "sessions": reading.session_count,
    }


def _slope(grown: Growth) -> str:
    return f"{grown.bytes_per_request:+.0f} ± {grown.error:.0f}"


def _change(what: str) -> Column:
    def words(process: _Process) -> str:
        first, last = (getattr(process[1][at], f"{what}_count") for at in (0, -1))
        if first is None or last is None:
            return "none"
        return str(last) if first == last else f"{first} to {last}"

    return Column(f"{what}s", words)


_COLUMNS = (
    Column("process", itemgetter(0)),
    Column(
        "MiB",
        lambda process: " to ".join(f"{process[1][at].own_bytes / _MIB:.1f}" for at in (0, -1)),
    ),
    Column("bytes a request", lambda process: _slope(growth(process[1]))),
    Column("the same, of RSS", lambda process: _slope(growth(process[1], resident=True))),
    *map(_change, ("descriptor", "thread", "task", "session")),
)
