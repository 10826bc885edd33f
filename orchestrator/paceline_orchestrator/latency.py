"""What calls to one server cost, learnt from the answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline_orchestrator.wire import Timing

__all__ = ["LatencyMeter"]

# A moving average that forgets half of its past in about five answers.
_WEIGHT = 1 / 8
# The worst of the last answers or so: it has halved after seventy.
_WORST_DECAY = 0.99
# Forwards of up to so many rows cost about one decoding step.
_STEP_ROWS = 16


class LatencyMeter:
    """Moving averages, in nanoseconds; before the first answer, what the server said of itself."""

    def __init__(self) -> None:
        self._table: tuple[tuple[int, int], ...] = ()
        self._prefill_fixed_ns = 0
        self._prefill_ns_per_token = 0
        self._step_ns: float | None = None
        self._queue_ns = 0.0
        self._network_ns = 0.0
        self._worst_wait_ns = 0.0

    @property
    def step_ns(self) -> int:
        """One decoding step; 0 while nothing is known."""
        if self._step_ns is not None:
            return round(self._step_ns)
        return self._table[0][1] if self._table else 0

    @property
    def queue_ns(self) -> int:
        """The wait in the server's queue."""
        return round(self._queue_ns)

    @property
    def network_ns(self) -> int:
        """The rest of a call: network, gRPC and event loops, both ways."""
        return round(self._network_ns)

    @property
    def worst_wait_ns(self) -> int:
        """The longest that a call lately took beyond its forwards."""
        return round(self._worst_wait_ns)

    def adopt(
        self,
        table: tuple[tuple[int, int], ...],
        *,
        prefill_fixed_ns: int,
        prefill_ns_per_token: int,
    ) -> None:
        """Take over what a server measured itself: median ns by rows, ascending."""
        self._table = table
        self._prefill_fixed_ns = prefill_fixed_ns
        self._prefill_ns_per_token = prefill_ns_per_token

    def observe(self, timing: Timing, *, elapsed_ns: int) -> None:
        """Learn from an answer that took `elapsed_ns` here."""
        self._queue_ns += _WEIGHT * (timing.queue_ns - self._queue_ns)
        network_ns = max(0, elapsed_ns - timing.queue_ns - timing.forward_ns)
        self._network_ns += _WEIGHT * (network_ns - self._network_ns)
        wait_ns = max(0, elapsed_ns - timing.forward_ns)
        self._worst_wait_ns = max(wait_ns, _WORST_DECAY * self._worst_wait_ns)
        if timing.forward_count and timing.row_count <= _STEP_ROWS * timing.forward_count:
            step_ns = timing.forward_ns / timing.forward_count
            known_ns = step_ns if self._step_ns is None else self._step_ns
            self._step_ns = known_ns + _WEIGHT * (step_ns - known_ns)

    def expected_ns(self, row_count: int) -> int:
        """Estimate a forward of `row_count` rows."""
        within = next((ns for rows, ns in self._table if rows >= row_count), None)
        if within is None:
            prefill_ns = self._prefill_fixed_ns + row_count * self._prefill_ns_per_token
            within = max(prefill_ns, self._table[-1][1] if self._table else 0)
        return max(self.step_ns, within)
