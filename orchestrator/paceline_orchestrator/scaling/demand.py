"""How many verifiers the service wants: one function, in integers.

    floor      every stream may use as many as Equation 1 says:  ceil(t / (lookahead * d))
    elastic    what runs or waits at verifiers shall not wait:   one for each verification
    desired    the larger of the two, less those that nobody scales, within the operator's limits

The latencies of a pair of models hardly move; how many streams there are does. Integers, because in
floating point ceil(t / (k * d)) is one too many in two of a thousand cases, and another one than a
chart's template would say.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median_low
from typing import TYPE_CHECKING

from paceline_orchestrator.fleet.discovery import Role
from paceline_orchestrator.planning.equation import needed_target_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from paceline_orchestrator.fleet.pool import ServerPool
    from paceline_orchestrator.fleet.server import ModelServer

# Whoever was active is thought to be so for as long: demand comes in bursts.
_ACTIVE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Demand:
    """What streams ask of the verifiers.

    Attributes:
        stream_verifiers: What Equation 1 says for each stream, added up.
        verification_count: Verifications that run, or wait for a verifier.
        is_active: Whether there was any request lately.
    """

    stream_verifiers: int = 0
    verification_count: int = 0
    is_active: bool = False

    @classmethod
    def sum(cls, demands: Iterable[Demand]) -> Demand:
        """Add up what several orchestrators ask."""
        known = list(demands)
        return cls(
            sum(it.stream_verifiers for it in known),
            sum(it.verification_count for it in known),
            any(it.is_active for it in known),
        )


def unlimited_verifiers(demand: Demand, *, fixed: int = 0) -> int:
    """Return how many the load wants beside the `fixed` ones, whatever the operator's limits."""
    return max(0, max(demand.stream_verifiers, demand.verification_count) - fixed)


def desired_verifiers(wanted: int, *, least: int, most: int) -> int:
    """Return how many of those that the load wants the service wants, within the limits."""
    return max(least, min(most, wanted))


@dataclass(frozen=True, slots=True)
class _Stream:
    verifier_limit: Callable[[], int]
    lookahead: int

    def wanted(self, target_us: int, drafter_us: int) -> int:
        """Return how many verifiers it wants; one while a latency is not known."""
        if not (target_us and drafter_us):
            return 1
        needed = needed_target_count(target_us, drafter_us, lookahead=self.lookahead)
        return min(needed, self.verifier_limit())


class DemandMeter:
    """What the streams of this orchestrator ask.

    Args:
        pool: Has measured the latencies.
        lookahead: Draft tokens in a verification that verifiers are provided for, where a stream
            does not ask for another number.
        clock: Tells seconds.

    Attributes:
        woken: Set when a request comes after a while without any.
    """

    def __init__(
        self, pool: ServerPool, *, lookahead: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pool = pool
        self._lookahead = lookahead
        self._clock = clock
        self._streams: dict[object, _Stream] = {}
        self._active_until = -math.inf
        self.woken = asyncio.Event()

    @property
    def is_active(self) -> bool:
        """Whether a request runs, or one came or ended lately."""
        return bool(self._streams) or self._clock() < self._active_until

    def arrived(self) -> None:
        """Note a request, whatever becomes of it: also one that finds no verifier is demand."""
        if not self.is_active:
            self.woken.set()
        self._active_until = self._clock() + _ACTIVE_SECONDS

    @contextmanager
    def stream(
        self, *, verifier_limit: Callable[[], int], lookahead: int | None = None
    ) -> Iterator[None]:
        """Count a stream for as long as it runs.

        Args:
            verifier_limit: Tells how many targets it could use by now if there were as many.
            lookahead: Draft tokens in a verification, if the client said how many.
        """
        key = object()
        self._streams[key] = _Stream(verifier_limit, lookahead or self._lookahead)
        try:
            yield
        finally:
            self.arrived()
            del self._streams[key]

    def demand(self) -> Demand:
        """Return what is asked now.

        Concurrency: Any thread may ask: what changes meanwhile is copied first.
        """
        targets = [it for it in self._pool.servers if it.role is Role.TARGET]
        drafters = [it for it in self._pool.servers if it.role is Role.DRAFTER]
        latencies_us = _step_us(targets), _step_us(drafters)
        return Demand(
            stream_verifiers=sum(it.wanted(*latencies_us) for it in list(self._streams.values())),
            verification_count=sum(it.call_count for it in targets),
            is_active=self.is_active,
        )


def _step_us(servers: Iterable[ModelServer]) -> int:
    """Return a decoding step of the median server, in us; 0 while none is known."""
    known = [step_us for it in servers if (step_us := it.latency.step_ns // 1000)]
    return median_low(known) if known else 0


class RunningMaximum:
    """The largest of the values of the last while: up at once, down late.

    Args:
        seconds: How long a while is.
        clock: Tells seconds.
    """

    def __init__(self, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._values: deque[tuple[float, int]] = deque()  # descending, the oldest first

    def push(self, value: int) -> int:
        """Take in a value, and return the largest."""
        now = self._clock()
        while self._values and self._values[-1][1] <= value:
            self._values.pop()
        self._values.append((now, value))
        while self._values[0][0] < now - self._seconds:
            self._values.popleft()
        return self._values[0][1]
