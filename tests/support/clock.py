"""Time that passes when a test says so."""

from __future__ import annotations


class Clock:
    """Seconds.

    Attributes:
        now: What it shows.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now
