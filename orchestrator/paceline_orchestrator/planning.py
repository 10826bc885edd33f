"""What the planner is told: measured latencies, and how often drafts have been accepted."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.errors import TokenizerMismatchError
from paceline.v1 import orchestrator_service_pb2 as pb
from paceline_orchestrator.planner import Measurements, Plan, Planner
from paceline_orchestrator.protocol.strategy import Strategy

if TYPE_CHECKING:
    from paceline_orchestrator.pool import ServerPool
    from paceline_orchestrator.protocol.commitment import DraftStatistics
    from paceline_orchestrator.server import ModelServer
    from paceline_orchestrator.wire import ModelFacts

__all__ = ["Planning"]

_log = logging.getLogger(__name__)

_STRATEGIES = {
    pb.STRATEGY_AUTOREGRESSIVE: Strategy.AUTOREGRESSIVE,
    pb.STRATEGY_SPECULATIVE: Strategy.SPECULATIVE,
    pb.STRATEGY_DISTRIBUTED: Strategy.DISTRIBUTED,
}
# Before the first verdict; and as many verdicts as it counts for.
_ASSUMED_ACCEPTANCE_RATE = 0.7
_ASSUMED_VERDICTS = 20
# Older verdicts count half after so many new ones.
_REMEMBERED_VERDICTS = 2000
# Where nothing was measured yet: the ratio of the two is what matters.
_ASSUMED_TARGET_NS = 30_000_000
_ASSUMED_DRAFTER_NS = 5_000_000


class Planning:
    """Plans requests from what earlier ones have shown."""

    def __init__(self, pool: ServerPool) -> None:
        self._pool = pool
        self._planner = Planner()
        self._accepted = _ASSUMED_ACCEPTANCE_RATE * _ASSUMED_VERDICTS
        self._judged = float(_ASSUMED_VERDICTS)
        self._last: Measurements | None = None

    def plan(self, request: pb.GenerateRequest, model: ModelFacts, *, prompt_length: int) -> Plan:
        """Choose how to decode a request; what it says itself wins.

        Raises:
            TokenizerMismatchError: It asks for speculation, and no drafter fits the target.
        """
        strategy = _STRATEGIES.get(request.strategy)
        targets = self._pool.targets(model)
        measurements = self._measure(
            targets, self._drafters(model, strategy), prompt_length=prompt_length
        )
        if strategy is not Strategy.AUTOREGRESSIVE:
            self._last = measurements
        wanted_targets = request.target_count if request.HasField("target_count") else None
        plan = self._planner.choose(
            measurements,
            strategy=strategy,
            lookahead=request.lookahead if request.HasField("lookahead") else None,
            target_count=wanted_targets,
        )
        if wanted_targets and plan.strategy is Strategy.DISTRIBUTED:
            plan = replace(plan, target_count=wanted_targets)
        return plan if strategy is None else replace(plan, note="")

    def learn(self, drafts: DraftStatistics) -> None:
        """Take in what became of a request's draft tokens."""
        if self._judged > _REMEMBERED_VERDICTS:
            self._accepted /= 2
            self._judged /= 2
        self._accepted += drafts.accepted
        self._judged += drafts.accepted + drafts.rejected

    def refine_soon(self, tasks: asyncio.TaskGroup) -> None:
        """Simulate what was last measured, on a thread; the planner remembers what is not new."""
        if self._last is not None:
            tasks.create_task(self._refine(self._last), name="refine the plan")

    async def _refine(self, measurements: Measurements) -> None:
        try:
            await asyncio.to_thread(self._planner.refine, measurements)
        except Exception:  # noqa: BLE001 - requests can do without it, and must not end with it
            _log.exception("the planner failed")

    def _drafters(self, model: ModelFacts, strategy: Strategy | None) -> list[ModelServer]:
        try:
            return self._pool.drafters(model)
        except TokenizerMismatchError:
            if strategy in (None, Strategy.AUTOREGRESSIVE):
                return []
            raise

    def _measure(
        self, targets: list[ModelServer], drafters: list[ModelServer], *, prompt_length: int
    ) -> Measurements:
        target = targets[0].latency
        target_ns = target.step_ns or _ASSUMED_TARGET_NS
        drafter_ns = drafters[0].latency.step_ns if drafters else 0
        return Measurements(
            target_step_ns=target_ns + target.queue_ns + target.network_ns,
            target_first_ns=max(target_ns, target.expected_ns(prompt_length)),
            drafter_step_ns=drafter_ns or _ASSUMED_DRAFTER_NS,
            acceptance_rate=self._accepted / self._judged,
            # Work that others wait for is not worth a guess: under load DSI shrinks, and ends.
            target_count=max(1, sum(server.session_count == 0 for server in targets)),
            drafter_count=len(drafters),
        )
