"""How long a request may take, and how long each of its calls."""

from __future__ import annotations

import time
from dataclasses import dataclass

__all__ = ["Deadline", "patience_seconds"]

# A hung server is found out after this. Less takes a machine whose cores are all busy for one: with
# 0.25 s, four model processes on two busy cores were late now and then.
_LEAST_SECONDS = 1.0
# Where a session begins, memory is allocated and a prompt's cost is guessed from other lengths.
_LEAST_COLD_SECONDS = 2.0
# Of a server that has not said what its forwards cost.
_UNKNOWN_SECONDS = 10.0
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


def patience_seconds(forward_ns: int | None, *, is_cold: bool = False) -> float:
    """Return after how long without an answer a server is asked whether it still has a call.

    A server that hangs may keep its connection alive and its health well, so that nothing else
    shows it. One that is busy with others says so, hence queues need no patience.

    Args:
        forward_ns: What the call's forwards should take; None if nothing is known of them.
        is_cold: Whether the session holds nothing yet.
    """
    if forward_ns is None:
        return _UNKNOWN_SECONDS
    least = _LEAST_COLD_SECONDS if is_cold else _LEAST_SECONDS
    return max(least, _PATIENCE * forward_ns / 1e9)
