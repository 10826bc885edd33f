"""A fair queue: which share is served next at a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_engine.scheduling.jobs import Batch


class Turns:
    """Start-time fair queueing of one server among shares of equal weight.

    Goyal, Vin and Cheng 1996, "Start-time fair queueing". Each share has a virtual clock, which its
    own service moves on. The share with the smallest clock is served first. A share that arrives,
    or comes back, starts at the clock of the share in service, so no share saves up turns.

    Difference: a forward is charged at its end, when its length is known. A share's next turn is
    therefore known when its forward ends, which is before the share can be served again.

    Invariants:
        The service of two shares that both want service differs by at most one forward of each
        (tests/unit/engine/test_turns.py).
    """

    def __init__(self) -> None:
        self._now = 0
        self._clocks: dict[str, int] = {}

    def of(self, share: str) -> int:
        """Return a share's place: the smallest is served next."""
        return max(self._now, self._clocks.get(share, 0))

    def begin(self, share: str) -> None:
        """Serve a share: its clock is the time now."""
        self._now = self.of(share)
        self._clocks = {each: at for each, at in self._clocks.items() if at > self._now}

    def charge(self, share: str, service: int) -> None:
        """Move a share's clock on by the service that it had, in ns or any other unit."""
        self._clocks[share] = self.of(share) + service

    def charge_forward(self, batch: Batch, row_counts: Sequence[int], *, forward_ns: int) -> None:
        """Charge a forward to the shares of its jobs, by rows; without rows in equal parts."""
        row_sum = sum(row_counts)
        for job, rows in zip(batch.jobs, row_counts, strict=True):
            part = rows / row_sum if row_sum else 1 / len(row_counts)
            self.charge(job.share, round(forward_ns * part))

    def rest(self) -> None:
        """Reset all clocks, because no share waits."""
        self._clocks.clear()
