"""How long a request may take, and how long each of its calls."""

from __future__ import annotations

import time
from dataclasses import dataclass

__all__ = ["Deadline"]

# A hung server is found out after this. Less takes a machine whose cores are all busy for one: with
# 0.25 s, four model processes on two busy cores were late now and then.
_LEAST_SECONDS = 1.0
_MOST_SECONDS = 10.0
_PATIENCE = 4


@dataclass(frozen=True, slots=True)
class Deadline:
    """The end of a request, on the monotonic clock."""

    at: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """Set it from now on."""
        return cls(time.monotonic() + seconds)

    @property
    def remaining_seconds(self) -> float:
        """What is left; never below 0."""
        return max(0.0, self.at - time.monotonic())

    def for_call(self, expected_ns: int) -> float:
        """Bound a call that should take `expected_ns`.

        A hung server keeps its connection alive, so that nothing but this finds it out.
        """
        patient = min(max(_LEAST_SECONDS, _PATIENCE * expected_ns / 1e9), _MOST_SECONDS)
        return min(patient, self.remaining_seconds)
