"""What happened in a run of chaos, and what of it should not have."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.chaos.workload import Record

LONGEST_GAP_SECONDS = 5.0
FEWEST_FAULTS_A_MINUTE = 6.0


@dataclass
class Strike:
    """One fault at one server; times are the monotonic clock's.

    Attributes:
        orchestrator: Which one was struck, or None if it was a model server.
        hit: Whether it met something; others do not count.
    """

    fault: str
    server: str
    orchestrator: int | None
    begin: float
    end: float = 0.0
    hit: bool = False


@dataclass
class History:
    """A run as it is written down.

    Attributes:
        leftovers: What should have been gone, and was not.
        logged_errors: Lines of servers' logs, which may explain a finding.
    """

    seed: int
    began: float
    ended: float = 0.0
    strikes: list[Strike] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    logged_errors: list[str] = field(default_factory=list)

    @property
    def token_count(self) -> int:
        return sum(len(record.tokens) for record in self.records)

    @property
    def hit_count(self) -> int:
        return sum(strike.hit for strike in self.strikes)

    def findings(self) -> list[str]:
        """Say all that should not have happened; nothing if the promises held."""
        return [*self._about_streams(), *self._about_faults(), *self.leftovers]

    def summary(self) -> dict[str, Any]:
        seconds = self.ended - self.began
        gaps = [end - begin for record in self.records for begin, end, _ in record.gaps()]
        return {
            "seed": self.seed,
            "seconds": round(seconds, 1),
            "streams": len(self.records),
            "tokens": self.token_count,
            "strikes": len(self.strikes),
            "hits": self.hit_count,
            "hits_a_minute": round(self.hit_count * 60 / seconds, 1),
            "longest_gap_seconds": round(max(gaps, default=0.0), 2),
            "logged_errors": len(self.logged_errors),
            "findings": self.findings(),
        }

    def write(self, path: Path) -> None:
        """Write it as JSON; times count from the run's beginning."""
        path.parent.mkdir(parents=True, exist_ok=True)
        strikes = [
            {**asdict(it), "begin": it.begin - self.began, "end": it.end - self.began}
            for it in self.strikes
        ]
        streams = [self._told(record) for record in self.records]
        told = {
            "summary": self.summary(),
            "strikes": strikes,
            "streams": streams,
            "logged_errors": self.logged_errors,
        }
        path.write_text(json.dumps(told, indent=1))

    def _told(self, record: Record) -> dict[str, Any]:
        # A chunk every few ms is no news; how a stream began, broke and ended is.
        events = [
            (round(at - self.began, 3), orchestrator, what)
            for at, orchestrator, what in record.events
            if not what.isdigit()
        ]
        order = {**asdict(record.order), "prompt": record.order.prompt.decode()}
        gap = max((end - begin for begin, end, _ in record.gaps()), default=0.0)
        return {
            **order,
            "received": len(record.tokens),
            "done": record.is_done,
            "failure": record.failure,
            "longest_gap_seconds": round(gap, 3),
            "events": events,
        }

    def _about_streams(self) -> Iterator[str]:
        for number, record in enumerate(self.records):
            name = f"stream {number} ({record.order.strategy})"
            if record.failure:
                yield f"{name}: {record.failure}"
            elif not record.is_done:
                yield f"{name}: not done, {len(record.tokens)} of {record.order.max_tokens} tokens"
            elif not record.is_right:
                yield f"{name}: wrong tokens"
            for begin, end, orchestrator in record.gaps():
                silence = end - begin - self._struck_seconds(orchestrator, begin, end)
                if silence > LONGEST_GAP_SECONDS:
                    since = begin - self.began
                    yield f"{name}: nothing for {end - begin:.1f} s from {since:.1f} s on"

    def _struck_seconds(self, orchestrator: int, begin: float, end: float) -> float:
        """Return for how much of a time a fault of the orchestrator itself explains silence."""
        return sum(
            max(0.0, min(end, it.end or end) - max(begin, it.begin))
            for it in self.strikes
            if it.orchestrator == orchestrator
        )

    def _about_faults(self) -> Iterator[str]:
        rate = self.hit_count * 60 / (self.ended - self.began)
        if rate < FEWEST_FAULTS_A_MINUTE:
            yield f"only {rate:.1f} faults a minute hit something: the run proves little"
