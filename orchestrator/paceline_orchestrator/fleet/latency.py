"""What calls to one server cost, learnt from the answers."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline_orchestrator.fleet.wire import Timing

__all__ = ["ObservedLatency"]

# A moving average that forgets half of its past in about five answers.
_WEIGHT = 1 / 8
# Forwards of up to so many rows cost about one decoding step.
_STEP_ROWS = 16
# A wait in the queue of so small a part of the forward is none.
_NO_WAIT = 0.1
# A queue that nothing more was heard of is half as long after this time. Requests that leave a
# server alone because of its queue would else never learn that it is gone.
_QUEUE_HALF_LIFE_SECONDS = 1.0


class ObservedLatency:
    """Moving averages, in nanoseconds; before the first answer, what the server said of itself.

    Args:
        clock: Seconds that never go back; None is time.monotonic.
    """

    def __init__(self, *, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or time.monotonic
        self._table: tuple[tuple[int, int], ...] = ()
        self._prefill_fixed_ns = 0
        self._prefill_ns_per_token = 0
        self._step_ns: float | None = None
        self._queue_ns = 0.0
        self._queue_seen_at = 0.0
        self._was_free = False
        self._call_ns: float | None = None
        self._lag_ns = 0.0

    @property
    def step_ns(self) -> int:
        """One decoding step; 0 while nothing is known."""
        if self._step_ns is not None:
            return round(self._step_ns)
        return self._table[0][1] if self._table else 0

    @property
    def queue_ns(self) -> int:
        """The wait in the server's queue; what was seen of it ages."""
        age_seconds = self._clock() - self._queue_seen_at
        return round(self._queue_ns * math.exp2(-age_seconds / _QUEUE_HALF_LIFE_SECONDS))

    @property
    def calls_ahead(self) -> float:
        """How many forwards of others a call waits for."""
        return self.queue_ns / self.step_ns if self.step_ns else 0.0

    @property
    def seems_free(self) -> bool:
        """Whether the last answer did not wait in the queue, and is not long ago."""
        return self._was_free and self._clock() - self._queue_seen_at < _QUEUE_HALF_LIFE_SECONDS

    @property
    def call_ns(self) -> int | None:
        """The rest of a call, up to its first answer: network, gRPC and event loops, both ways."""
        return None if self._call_ns is None else round(self._call_ns)

    @property
    def lag_ns(self) -> int:
        """The rest of each further forward of a stream, beyond its own time."""
        return round(self._lag_ns)

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

    def observe(self, timing: Timing, *, elapsed_ns: int, is_first: bool = True) -> None:
        """Learn from an answer.

        Args:
            timing: Where the server says that the time went.
            elapsed_ns: What it took here, since the call was sent or its last answer came.
            is_first: Whether it is the call's first answer, which includes the way of the call.
        """
        queue_ns = timing.queue_ns / max(1, timing.forward_count)
        self._queue_ns = self.queue_ns + _WEIGHT * (queue_ns - self.queue_ns)
        self._queue_seen_at = self._clock()
        self._was_free = timing.queue_ns <= _NO_WAIT * timing.forward_ns
        rest_ns = max(0, elapsed_ns - timing.queue_ns - timing.forward_ns)
        if timing.began_early:
            pass  # its call passed meanwhile, and shows nowhere
        elif is_first:
            self._call_ns = _average(self._call_ns, rest_ns)
        elif timing.forward_count:
            self._lag_ns += _WEIGHT * (rest_ns / timing.forward_count - self._lag_ns)
        if timing.forward_count and timing.row_count <= _STEP_ROWS * timing.forward_count:
            self._step_ns = _average(self._step_ns, timing.forward_ns / timing.forward_count)

    @property
    def is_known(self) -> bool:
        """Whether the server has said what its forwards cost."""
        return bool(self._table)

    def expected_ns(self, row_count: int) -> int:
        """Estimate a forward of `row_count` rows."""
        within = next((ns for rows, ns in self._table if rows >= row_count), None)
        if within is None:
            prefill_ns = self._prefill_fixed_ns + row_count * self._prefill_ns_per_token
            within = max(prefill_ns, self._table[-1][1] if self._table else 0)
        return max(self.step_ns, within)


def _average(known: float | None, seen: float) -> float:
    return seen if known is None else known + _WEIGHT * (seen - known)
