"""The values of a server's metrics page, and their growth between two snapshots."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Samples:
    """Values by metric and labels."""

    values: Mapping[str, Mapping[_Labels, float]]

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def total(self, name: str, **labels: str) -> float:
        """Add up a metric's values with these labels; 0 if there are none."""
        wanted = labels.items()
        return sum(value for it, value in self.values.get(name, {}).items() if wanted <= it)

    def since(self, before: Samples) -> Samples:
        """Return the growth since then; a lower counter began again with its process."""
        gained = {}
        for name, values in self.values.items():
            old = before.values.get(name, {})
            gained[name] = {
                labels: value - old.get(labels, 0.0) if value >= old.get(labels, 0.0) else value
                for labels, value in values.items()
            }
        return Samples(gained)

    @classmethod
    def sum(cls, parts: Iterable[Samples]) -> Samples:
        """Add up the samples of several servers."""
        sums: dict[str, dict[_Labels, float]] = {}
        for part in parts:
            for name, values in part.values.items():
                into = sums.setdefault(name, defaultdict(float))
                for labels, value in values.items():
                    into[labels] += value
        return cls(sums)


def parse_page(text: str) -> Samples:
    """Read a page of metrics; a histogram's sum and count only.

    Raises:
        ValueError: The text is not a page of metrics.
    """
    lines = (line for line in text.splitlines(keepends=True) if "_bucket{" not in line)
    values: dict[str, dict[_Labels, float]] = {}
    for family in text_string_to_metric_families("".join(lines)):
        for sample in family.samples:
            values.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return Samples(values)


@dataclass(frozen=True, slots=True)
class Readings:
    """A snapshot of a server, or of several of them together.

    Attributes:
        now: The current samples.
        gained: The growth of counters since the last snapshot; None in the first one.
        seconds: Time between the two snapshots.
    """

    now: Samples
    gained: Samples | None = None
    seconds: float = 0.0

    @classmethod
    def sum(cls, parts: Iterable[Readings]) -> Readings:
        """Add up several servers; a new server counts from its second snapshot on."""
        known = list(parts)
        gained = [it.gained for it in known if it.gained is not None]
        return cls(
            Samples.sum(it.now for it in known),
            Samples.sum(gained) if gained else None,
            max((it.seconds for it in known), default=0.0),
        )

    def rate(self, *counters: str, **labels: str) -> float | None:
        """Return how much a second these counters gained together; None in the first snapshot."""
        if self.gained is None or not self.seconds:
            return None
        return sum(self.gained.total(it, **labels) for it in counters) / self.seconds

    def share(self, part: str, *, of: str) -> float | None:
        """Divide the growth of two counters; without any growth, their whole counts."""
        for samples in (self.gained, self.now):
            if samples is not None and (whole := samples.total(of)):
                return samples.total(part) / whole
        return None

    def mean(self, histogram: str) -> float | None:
        """Return the mean of a histogram's growth; without any growth, of all its values."""
        return self.share(f"{histogram}_sum", of=f"{histogram}_count")
