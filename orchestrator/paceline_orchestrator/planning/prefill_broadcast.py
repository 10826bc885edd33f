"""Whether DSI sends a prompt to all targets at its start, or to each with its first verification.

Each target has to prefill the prompt once. If all targets begin at once, every target is ready
sooner. If each begins with its first verification, draft tokens found meanwhile are judged in the
same forward, and the first tokens come sooner. No rule that we tried was right on all rows of the
paper's Table 2. The choice affects only the first corrections, and both runs use the same random
numbers, so a short simulation separates them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline_orchestrator.planning.background_computation import let_others_run
from paceline_orchestrator.planning.simulated_lookaheads import VERIFICATION
from paceline_orchestrator.planning.simulation_cache import SimulationCache
from paceline_protocol.distributed import DistributedDecoding
from paceline_protocol.laboratory.oracles import AgreementOracle
from paceline_protocol.laboratory.simulation import ServerLatency, simulate
from paceline_protocol.messages import CapacityChanged
from paceline_protocol.task import DecodingTask

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline_orchestrator.planning.simulated_lookaheads import Setting

_TOKENS = 40
_REPEATS = 8


@dataclass(frozen=True, slots=True)
class PrefillCase:
    """What the better choice depends on.

    Attributes:
        first: A target's first forward, the prompt's, in the setting's unit.
        lookahead: Draft tokens in a verification.
        acceptance_percent: How many of 100 draft tokens the target accepts.
    """

    setting: Setting
    first: int
    lookahead: int
    acceptance_percent: int


class PrefillBroadcasts(SimulationCache[PrefillCase, bool]):
    """The choices that were simulated."""

    def __init__(self) -> None:
        super().__init__(is_better_broadcast)

    def is_better(self, case: PrefillCase) -> bool:
        """Whether all targets should begin with the prompt. No, until that was simulated."""
        if case.setting.target_count == 1 or case.first <= VERIFICATION:
            return False
        return bool(self.get(case))


def is_better_broadcast(
    start: PrefillCase, *, after_event: Callable[[], None] = let_others_run
) -> bool:
    """Whether requests that begin so are done sooner if the prompt goes to all targets at once.

    Args:
        start: How they begin.
        after_event: Called between events; may end it with an exception.

    Cost:
        Some 100 ms of computing.
    """
    carried, broadcast = (
        sum(
            _total_time(start, seed=seed, broadcast=broadcast, after_event=after_event)
            for seed in range(_REPEATS)
        )
        for broadcast in (False, True)
    )
    return broadcast < carried


def _total_time(
    start: PrefillCase, *, seed: int, broadcast: bool, after_event: Callable[[], None]
) -> float:
    setting = start.setting
    oracle = AgreementOracle(start.acceptance_percent / 100, seed=seed, length=_TOKENS + 1)
    task = DecodingTask(
        oracle.prompt(1),
        _TOKENS,
        lookahead=start.lookahead,
        broadcast_prefill=broadcast,
        keep_prefill=True,
    )
    targets = tuple(range(setting.target_count))
    result = simulate(
        DistributedDecoding(task, CapacityChanged(targets=targets, drafters=(0,))),
        oracle,
        targets=[ServerLatency(start.first, VERIFICATION)] * setting.target_count,
        drafters=[ServerLatency(setting.drafter_step, setting.drafter_step, call=setting.call)],
        after_event=after_event,
    )
    return float(result.total_time)
