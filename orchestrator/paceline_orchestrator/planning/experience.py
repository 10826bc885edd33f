"""What the planner is told: measured latencies, costs and load, and how often drafts are right.

The orchestrator is stateless, and one of several. Of its own requests it knows where they are; of
the others' it hears in the answers of the servers: how many calls were in a forward, and how long
one waited for it. Whichever of the two says that more requests share the servers is believed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.errors import TokenizerMismatchError
from paceline_orchestrator.fleet.row_prices import RowPrices
from paceline_orchestrator.planning.estimates import Measurements
from paceline_orchestrator.planning.planner import Plan, Planner, Wish
from paceline_protocol.methods import METHODS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline_orchestrator.fleet.pool import ServerPool
    from paceline_orchestrator.fleet.server import ModelServer
    from paceline_orchestrator.fleet.wire import ModelFacts
    from paceline_protocol.methods import Strategy

__all__ = ["Planning"]

_log = logging.getLogger(__name__)

# Where nothing was measured yet. Of the latencies, their ratios are what matters.
_ASSUMED_ACCEPTANCE_RATE = 0.7
_ASSUMED_TARGET_NS = 30_000_000
_ASSUMED_DRAFTER_NS = 5_000_000
_ASSUMED_CALL_NS = 1_000_000
_ASSUMED_DISPATCH_NS = 1_000_000
# As many verdicts, or verifications, do the assumptions count for; and after so many new ones the
# older count half.
_ASSUMED_COUNT = 20
_REMEMBERED_COUNT = 2000
# Of the calls that one of ours meets, on average: our own last one, where a forward that has become
# worthless has to run to its end.
_IGNORED_CALLS = 0.5


class _Mean:
    """A mean that forgets."""

    def __init__(self, assumed: float) -> None:
        self._sum = assumed * _ASSUMED_COUNT
        self._count = float(_ASSUMED_COUNT)

    @property
    def value(self) -> float:
        return self._sum / self._count

    def add(self, amount: float, *, count: int) -> None:
        """Take in the sum of so many values."""
        if self._count > _REMEMBERED_COUNT:
            self._sum /= 2
            self._count /= 2
        self._sum += amount
        self._count += count


class Planning:
    """Plans requests from what earlier ones have shown.

    Args:
        pool: The model servers.
        cpu_clock: CPU time of the event loop's thread, in ns.
    """

    def __init__(
        self, pool: ServerPool, *, cpu_clock: Callable[[], int] = time.thread_time_ns
    ) -> None:
        self._pool = pool
        self._planner = Planner()
        self._acceptance_rate = _Mean(_ASSUMED_ACCEPTANCE_RATE)
        self._dispatch_ns = _Mean(_ASSUMED_DISPATCH_NS)
        self._cpu_clock = cpu_clock
        self._cpu_seen_ns = cpu_clock()
        self._refining: asyncio.Task[None] | None = None

    def plan(self, wish: Wish, model: ModelFacts, *, prompt_length: int) -> Plan:
        """Choose how to decode a request; what it wishes wins.

        Raises:
            TokenizerMismatchError: It asks for speculation, and no drafter fits the target.
        """
        targets = self._pool.targets(model)
        measurements = self._measure(
            targets, self._drafters(model, wish.strategy), prompt_length=prompt_length
        )
        if measurements.request_count == 1:
            self._cpu_seen_ns = self._cpu_clock()  # what it did at rest was not dispatching
        plan = self._planner.choose(measurements, wish)
        if wish.target_count and METHODS[plan.strategy].overlaps:
            plan = replace(plan, target_count=wish.target_count)
        return plan if wish.strategy is None else replace(plan, note="")

    def learn(self, *, accepted_count: int, rejected_count: int, verification_count: int) -> None:
        """Take in what became of a request's draft tokens, and what its verifications cost.

        With several requests at once, the CPU time since the last of them ended was spent on all;
        in the long run so were the verifications that it is set against.
        """
        self._acceptance_rate.add(accepted_count, count=accepted_count + rejected_count)
        now_ns = self._cpu_clock()
        self._dispatch_ns.add(now_ns - self._cpu_seen_ns, count=verification_count)
        self._cpu_seen_ns = now_ns

    def refine_soon(self, tasks: asyncio.TaskGroup) -> None:
        """Let the planner simulate what it was lately asked for, on a thread, one at a time."""
        if self._refining is None or self._refining.done():
            self._refining = tasks.create_task(self._refine(), name="refine the plan")

    async def _refine(self) -> None:
        try:
            await asyncio.to_thread(self._planner.refine)
        except Exception:  # noqa: BLE001 - requests can do without it, and must not end with it
            _log.exception("the planner failed")

    def _drafters(self, model: ModelFacts, strategy: Strategy | None) -> list[ModelServer]:
        try:
            return self._pool.drafters(model)
        except TokenizerMismatchError:
            if strategy is None or not METHODS[strategy].drafts:
                return []
            raise

    def _measure(
        self, targets: Sequence[ModelServer], drafters: Sequence[ModelServer], *, prompt_length: int
    ) -> Measurements:
        target = targets[0].latency
        target_ns = target.step_ns or _ASSUMED_TARGET_NS
        drafter = drafters[0] if drafters else None
        drafter_ns = drafter.latency.step_ns if drafter else 0
        return Measurements(
            target_step_ns=target_ns,
            target_first_ns=max(target_ns, target.expected_ns(prompt_length)),
            drafter_step_ns=(drafter_ns or _ASSUMED_DRAFTER_NS)
            + (drafter.latency.lag_ns if drafter else 0),
            acceptance_rate=self._acceptance_rate.value,
            target_count=len(targets),
            drafter_count=len(drafters),
            call_ns=_ASSUMED_CALL_NS if target.call_ns is None else target.call_ns,
            dispatch_ns=round(self._dispatch_ns.value),
            request_count=1 + _others(targets, own=sum(it.home_count for it in targets)),
            drafting_count=1 + (_others((drafter,), own=drafter.session_count) if drafter else 0),
            target_prices=target.prices,
            drafter_prices=drafter.latency.prices if drafter else RowPrices(),
        )


def _others(servers: Sequence[ModelServer], *, own: int) -> int:
    """Return how many other requests share servers: our own, or more if the answers say so.

    There is at least one request for each call that one of ours meets.
    """
    met = (max(0.0, it.latency.other_calls - _IGNORED_CALLS) for it in servers)
    return max(own, math.ceil(sum(met)))
