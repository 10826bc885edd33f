"""What calls to one server cost, learnt from the answers."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from paceline_orchestrator.fleet.row_prices import RowPrices

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline_contract.calls import CallTiming

# A moving average that forgets half of its past in about five answers.
_WEIGHT = 1 / 8
# Of forwards with up to so many rows for each call a decoding step can be told.
_STEP_ROWS = 16
# A wait in the queue of so small a part of the forward is none.
_NO_WAIT = 0.1
# What was seen of others and nothing more was heard of is half as much after this time. Requests
# that leave a server alone because of them would else never learn that they are gone.
_QUEUE_HALF_LIFE_SECONDS = 1.0


class ObservedLatency:
    """Moving averages, in nanoseconds; before the first answer, what the server said of itself.

    Args:
        clock: Seconds that never go back; None is time.monotonic.

    Attributes:
        prices: What the rows of its forwards cost, as the server measured it.
    """

    def __init__(self, *, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or time.monotonic
        self._table: tuple[tuple[int, int], ...] = ()
        self.prices = RowPrices()
        self._prefill_fixed_ns = 0
        self._prefill_ns_per_token = 0
        self._step_ns: float | None = None
        self._queue_ns = 0.0
        self._queue_seen_at = 0.0
        self._beside = 0.0
        self._was_free = False
        self._call_ns: float | None = None
        self._lag_ns = 0.0

    @property
    def step_ns(self) -> int:
        """One decoding step, with no rows beside it; 0 while nothing is known."""
        if self._step_ns is not None:
            return round(self._step_ns)
        return self._table[0][1] if self._table else 0

    @property
    def queue_ns(self) -> int:
        """The wait in the server's queue; what was seen of it ages."""
        return round(self._queue_ns * self._faded)

    @property
    def other_calls(self) -> float:
        """How many calls of others one meets: in its forward, and in those that it waits for."""
        if not self.step_ns:
            return 0.0
        in_one = 1 + self._beside * self._faded
        waited = self.queue_ns / (self.step_ns * self.prices.of(in_one))
        return in_one * (1 + waited) - 1

    @property
    def _faded(self) -> float:
        """What is left of what was last seen."""
        return math.exp2(-(self._clock() - self._queue_seen_at) / _QUEUE_HALF_LIFE_SECONDS)

    @property
    def seems_free(self) -> bool:
        """Whether the last answer neither waited nor met others, and is not long ago."""
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
        shares_forwards: bool = False,
    ) -> None:
        """Take over what a server measured itself: median ns by rows, ascending."""
        self._table = table
        self.prices = RowPrices.measured(table, shares_forwards=shares_forwards)
        self._prefill_fixed_ns = prefill_fixed_ns
        self._prefill_ns_per_token = prefill_ns_per_token

    def observe(self, timing: CallTiming, *, elapsed_ns: int, is_first: bool = True) -> None:
        """Learn from an answer.

        Args:
            timing: Where the server says that the time went.
            elapsed_ns: What it took here, since the call was sent or its last answer came.
            is_first: Whether it is the call's first answer, which includes the way of the call.
        """
        count = max(1, timing.forward_count)
        beside = max(0.0, timing.shared_call_count / count - 1)
        queue_ns, faded_beside = self.queue_ns, self._beside * self._faded
        self._queue_ns = queue_ns + _WEIGHT * (timing.queue_ns / count - queue_ns)
        self._beside = faded_beside + _WEIGHT * (beside - faded_beside)
        self._queue_seen_at = self._clock()
        self._was_free = timing.queue_ns <= _NO_WAIT * timing.forward_ns and not beside
        rest_ns = max(0, elapsed_ns - timing.queue_ns - timing.forward_ns)
        if timing.began_early:
            pass  # its call passed meanwhile, and shows nowhere
        elif is_first:
            self._call_ns = _average(self._call_ns, rest_ns)
        elif timing.forward_count:
            self._lag_ns += _WEIGHT * (rest_ns / timing.forward_count - self._lag_ns)
        self._learn_step(timing)

    def _learn_step(self, timing: CallTiming) -> None:
        """Tell a decoding step from a forward, whatever else was computed in it, but no prompts."""
        count, calls = timing.forward_count, max(timing.forward_count, timing.shared_call_count)
        rows = max(timing.row_count, timing.shared_row_count)
        if count and timing.row_count <= _STEP_ROWS * count and rows <= _STEP_ROWS * calls:
            alone_ns = timing.forward_ns / count / self.prices.of(rows / count)
            self._step_ns = _average(self._step_ns, alone_ns)

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
