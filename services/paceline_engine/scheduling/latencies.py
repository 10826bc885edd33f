"""The measured cost of forwards on this machine."""

from __future__ import annotations

import threading
import time
from array import array
from bisect import bisect_left
from collections import defaultdict, deque
from itertools import accumulate
from statistics import median_low
from typing import TYPE_CHECKING

from paceline_engine.scheduling.model_text import ModelText
from paceline_engine.terms.calls import SessionSpec
from paceline_engine.terms.latencies import ForwardLatency, ModelLatencies

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline_engine.terms.backend import Backend, Interrupt

_MEASURED_ROWS = (1, 2, 4, 8, 16)
_MEASURED_CONTEXT = 32
_MEASURED_PREFILLS = (64, 256, 1024, 4096)
# A prefill says what a row adds if it takes so much longer than one of a quarter of its rows; a GPU
# computes some hundreds of rows in the time in which it reads the weights. Or if it takes so long.
_TELLING_RATIO, _TELLING_NS = 1.5, 50_000_000

_WINDOW = 64
_NEWS = 16
"""After so many new forwards the curve is computed again; at first after as many as it has."""
_MOST_ROWS, _LEAST_ROWS = 1024, 16
_MAX_ROWS = 256
"""Forwards with more rows are prefills: too rare and too different for a median."""

# A model that is merely slow is never taken for a hung one: caches, swapping and a busy machine
# cost less than this together.
_PATIENCE_FACTOR = 10
_LEAST_PATIENCE_NS = 10_000_000_000


class LatencyMeter:
    """Collects the times of forwards. May be used on any thread."""

    def __init__(self) -> None:
        self._by_rows: defaultdict[int, deque[int]] = defaultdict(lambda: deque(maxlen=_WINDOW))
        self._prefill: tuple[int, int] | None = None
        self._longest: tuple[int, int] | None = None
        self._lock = threading.RLock()
        self._curve: list[tuple[int, float]] = []
        self._read = self._unread = 0

    def record(self, row_count: int, forward_ns: int) -> None:
        """Record a forward, under the power of two that is nearest to its rows."""
        with self._lock:
            self._record_longest(row_count, forward_ns)
            if 1 <= row_count <= _MAX_ROWS:
                self._by_rows[1 << ((4 * row_count // 3).bit_length() - 1)].append(forward_ns)
                self._unread += 1

    def record_prefills(self, short: tuple[int, int], long: tuple[int, int]) -> None:
        """Fit a line through two prefills, each given as (rows, ns)."""
        (short_rows, short_ns), (long_rows, long_ns) = short, long
        per_token = max(0, long_ns - short_ns) // max(1, long_rows - short_rows)
        self._prefill = (max(0, short_ns - per_token * short_rows), per_token)
        self._record_longest(long_rows, long_ns)

    def patience_ns(self, length: int, *, most_rows: int) -> int | None:
        """Return how long a forward after so many tokens may take before it counts as hung.

        This is ten times an upper bound, and at least 10 s; None before any forward. A forward of n
        rows after L tokens takes a + b n + c n L, so k times the rows and m times the tokens take
        at most k m times as long. The bound scales the longest forward so far in this way, which
        counts as a whole prompt, with as many tokens as rows.

        Args:
            length: The length of the longest sequence in the forward.
            most_rows: How many rows the forward has at most, with those of other sequences.
        """
        if self._longest is None:
            return None
        rows, longest_ns = self._longest
        curve = self._known_curve()
        slowest_ns = curve[-1][1] if curve else 0.0
        larger = max(1.0, length / rows) * max(1.0, most_rows / rows)
        expected_ns = max(longest_ns * larger, slowest_ns)
        return max(_LEAST_PATIENCE_NS, round(_PATIENCE_FACTOR * expected_ns))

    @property
    def ns_per_row(self) -> float:
        """The time that a row adds to a prompt's forward; if not measured, to any forward."""
        return (self._prefill[1] if self._prefill else 0) or self._slope()

    def cost_ns(self, row_count: int) -> float:
        """Return the time of a forward of so many rows, interpolated; 0 before any measurement."""
        curve = self._known_curve()
        if not curve or not row_count:
            return 0.0
        place = bisect_left(curve, (row_count, 0.0))
        if place == 0:
            return curve[0][1]
        if place == len(curve):
            rows, median_ns = curve[-1]
            return median_ns + (row_count - rows) * self._slope()
        (fewer, less), (more, longer) = curve[place - 1], curve[place]
        return less + (longer - less) * (row_count - fewer) / (more - fewer)

    def most_rows(self) -> int:
        """Return how many rows a forward needs for 90 % of the most rows per second.

        A forward of n rows takes about a + b n, so it computes n / (a + b n) rows per ns. The limit
        for large n is 1 / b, and 90 % of it are reached at n = 9 a / b.
        """
        slope = self._slope()
        if not slope:
            return _MOST_ROWS
        fixed = max(0.0, self.cost_ns(1) - slope)
        return max(_LEAST_ROWS, min(_MOST_ROWS, round(9 * fixed / slope)))

    def _slope(self) -> float:
        """Return the time that a row adds, between the fewest and the most rows measured."""
        curve = self._known_curve()
        if len(curve) < 2:
            return 0.0
        (fewest, shortest), (most, longest) = curve[0], curve[-1]
        return max(0.0, (longest - shortest) / (most - fewest))

    def _known_curve(self) -> list[tuple[int, float]]:
        """Return medians by rows, computed again now and then; they never fall with more rows."""
        with self._lock:
            if self._unread and self._unread >= min(_NEWS, self._read):
                self._read, self._unread = self._read + self._unread, 0
                medians = [(each.rows, float(each.median_ns)) for each in self.latencies().forwards]
                least = accumulate((ns for _, ns in medians), max)
                self._curve = [(rows, ns) for (rows, _), ns in zip(medians, least, strict=True)]
            return self._curve

    def _record_longest(self, row_count: int, forward_ns: int) -> None:
        """Learn from the longest forwards, except from forwards that hung."""
        if self._longest is not None:
            if row_count < self._longest[0]:
                return
            patience_ns = self.patience_ns(row_count, most_rows=row_count)
            if patience_ns is not None and forward_ns > patience_ns:
                return
        self._longest = (max(1, row_count), forward_ns)

    def latencies(self) -> ModelLatencies:
        """Return the medians and the prefill line."""
        with self._lock:
            forwards = tuple(
                ForwardLatency(rows, median_low(times))
                for rows, times in sorted(self._by_rows.items())
            )
        return ModelLatencies(forwards, *(self._prefill or (None, None)))


def measure(
    backend: Backend,
    meter: LatencyMeter,
    *,
    rounds: int,
    interrupt: Interrupt,
    clock_ns: Callable[[], int] = time.monotonic_ns,
) -> None:
    """Run a model warm, and record what its forwards cost. Runs on the worker thread.

    Cost: per round 5 forwards of 1 to 16 rows; and 4 prefills of at most 256 tokens, or of up to
    4,096 where these take as long as few.
    """
    limit = backend.description.context_length
    longest = min(limit, _MEASURED_PREFILLS[-1] + 1)
    tokens = array("I", (n % backend.description.vocabulary_size for n in range(longest)))

    def new_text(length: int) -> ModelText:
        # Just what is needed, so that buffers are taken once and never moved.
        return ModelText(backend, SessionSpec(reserve_length=length), interrupt=interrupt)

    def prefill_ns(prompt: array[int]) -> int:
        times = []
        for _ in range(2):  # The first time also pays for lazy initialisation.
            text = new_text(len(prompt) + 1)
            started_ns = clock_ns()
            text.draft(prompt)
            times.append(clock_ns() - started_ns)
        return times[-1]

    measured: list[tuple[int, int]] = []
    for length in _MEASURED_PREFILLS:
        prompt = tokens[:length]
        measured.append((len(prompt), prefill_ns(prompt)))
        if len(measured) > 1 and (_tells(*measured[-2:]) or len(prompt) < length):
            break
    meter.record_prefills(*measured[-2:])

    text = new_text(min(limit, _MEASURED_CONTEXT + _MEASURED_ROWS[-1]))
    prefix = tokens[:_MEASURED_CONTEXT]
    text.draft(prefix)
    for rows in _MEASURED_ROWS * rounds:
        block = tokens[len(prefix) : len(prefix) + rows - 1]
        started_ns = clock_ns()
        text.judge(prefix, block)
        forward_ns = clock_ns() - started_ns
        if backend.judges_row_by_row:
            # Of this block it computed the first row, and would compute others as slowly.
            forward_ns, text.row_count = rows * forward_ns // text.row_count, rows
        meter.record(text.row_count, forward_ns)


def _tells(shorter: tuple[int, int], longer: tuple[int, int]) -> bool:
    """Whether two prefills, as (rows, ns), say what a row adds."""
    return longer[1] >= _TELLING_NS or longer[1] >= _TELLING_RATIO * shorter[1]
