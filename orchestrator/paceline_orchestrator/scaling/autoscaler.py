"""Says how many verifiers the whole service wants: as a gauge, and to scalers that ask."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from prometheus_client import Gauge

from paceline_orchestrator.scaling.demand import (
    Demand,
    RunningMaximum,
    desired_verifiers,
    unlimited_verifiers,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from prometheus_client import CollectorRegistry

    from paceline_orchestrator.scaling.demand import DemandMeter
    from paceline_orchestrator.settings import ScalingSettings

_PERIOD_SECONDS = 1.0


class Autoscaler:
    """Looks at the demand each second, and at once when a request comes after a while of rest.

    An asynchronous context manager: inside the block it looks.

    Args:
        meter: What the streams of this replica ask.
        settings: Limits, and for how long a demand that is gone is still served.
        registry: Where metrics are kept.
        replica_id: This process's name among the replicas, in [0, 2^53).
        others: Asks what the streams of the other replicas ask; None if there are none, or each is
            to speak for itself.

    Attributes:
        desired: How many verifiers are wanted.
        is_active: Whether there is demand.
        replica_id: See above.
    """

    def __init__(
        self,
        meter: DemandMeter,
        *,
        settings: ScalingSettings,
        registry: CollectorRegistry,
        replica_id: int,
        others: Callable[[], Awaitable[Demand]] | None = None,
    ) -> None:
        self._meter = meter
        self._settings = settings
        self._others = others
        self._maximum = RunningMaximum(settings.scale_down_seconds)
        self._changed = asyncio.Condition()
        self._tasks = asyncio.TaskGroup()
        self.replica_id = replica_id
        self.desired = settings.least_verifiers
        self.is_active = False
        self._desired_gauge = Gauge(
            "paceline_desired_verifiers",
            "Targets that the service wants beside the fixed ones (every replica says the same)",
            registry=registry,
        )
        self._desired_gauge.set(self.desired)
        self._unlimited_gauge = Gauge(
            "paceline_desired_verifiers_unlimited",
            "The same without the operator's limits: more than the most is what they withhold",
            registry=registry,
        )
        self._asked_at = time.monotonic()
        self._asked_age = Gauge(
            "paceline_scaler_asked_age_seconds",
            "Time since KEDA asked this replica, or since the start",
            registry=registry,
        )
        self._asked_age.set_function(lambda: time.monotonic() - self._asked_at)
        # Asked for at every scrape, on the endpoint's thread: what runs now, not a second ago.
        Gauge(
            "paceline_stream_verifiers",
            "Targets that Equation 1 gives the streams of this replica",
            registry=registry,
        ).set_function(lambda: meter.demand().stream_verifiers)
        Gauge(
            "paceline_verifications_in_flight",
            "Verifications of this replica that run or wait at targets",
            registry=registry,
        ).set_function(lambda: meter.demand().verification_count)

    def answer(self) -> int:
        """Return how many verifiers are wanted to a scaler outside, and note that it asked."""
        self._asked_at = time.monotonic()
        return self.desired

    def own_demand(self) -> Demand:
        """Return what the streams of this replica ask."""
        return self._meter.demand()

    async def activity(self) -> AsyncIterator[bool]:
        """Yield whether there is demand, at once and whenever it changes."""
        told = self.is_active
        yield told
        while True:
            async with self._changed:
                while self.is_active is told:
                    await self._changed.wait()
                told = self.is_active
            yield told

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._looking = self._tasks.create_task(self._look_on(), name="autoscaler: look")
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._looking.cancel()
        await self._tasks.__aexit__(None, None, None)

    async def _look_on(self) -> None:
        while True:
            self._meter.woken.clear()
            await self._look()
            with suppress(TimeoutError):
                async with asyncio.timeout(_PERIOD_SECONDS):
                    await self._meter.woken.wait()

    async def _look(self) -> None:
        own = self.own_demand()
        others = await self._others() if self._others is not None else Demand()
        everything = Demand.sum((own, others))
        settings = self._settings
        wanted = self._maximum.push(unlimited_verifiers(everything, fixed=settings.fixed_verifiers))
        self.desired = desired_verifiers(
            wanted, least=settings.least_verifiers, most=settings.most_verifiers
        )
        self._desired_gauge.set(self.desired)
        self._unlimited_gauge.set(wanted)
        async with self._changed:
            self.is_active = everything.is_active
            self._changed.notify_all()
