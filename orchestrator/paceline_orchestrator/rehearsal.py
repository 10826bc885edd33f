"""DSI beside SI on the virtual clock: what the planner cannot say in closed form.

The protocols that serve users are simulated, with the same agreements, so that luck cancels out.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline_orchestrator.protocol.messages import CapacityChanged
from paceline_orchestrator.protocol.strategy import Strategy, create_method
from paceline_orchestrator.protocol.task import DecodingTask
from paceline_orchestrator.simulation import AgreementOracle, ServerLatency, simulate

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["VERIFICATION", "Setting", "rehearse"]

VERIFICATION = 10_000
"""What a verification takes, its call included: the unit of all times is a part of it."""

_SEEDS = 2
_TOKENS = (40, 160)  # the fewer, the more drafter steps are in a verification
_DRAFTS = 1600


@dataclass(frozen=True, slots=True)
class Setting:
    """Where to rehearse.

    Attributes:
        drafter_step: A draft token's time, 1 or more.
        call: What a draft's call takes before its first token, besides.
        acceptance_rate: Probability that the target accepts a draft token, in [0, 1].
        target_count: Targets.
    """

    drafter_step: int
    call: int
    acceptance_rate: float
    target_count: int


def rehearse(
    setting: Setting, *, speculative_lookahead: int, lookaheads: Iterable[int]
) -> dict[int, float]:
    """Return DSI's time by lookahead, relative to that of SI with its own lookahead.

    Cost:
        Some 100 ms of computing for each lookahead.
    """
    rival_time = _total_time(Strategy.SPECULATIVE, speculative_lookahead, setting)
    return {
        lookahead: _total_time(Strategy.DISTRIBUTED, lookahead, setting) / rival_time
        for lookahead in lookaheads
    }


def _total_time(strategy: Strategy, lookahead: int, setting: Setting) -> float:
    targets = [ServerLatency(VERIFICATION, VERIFICATION)] * setting.target_count
    drafter = ServerLatency(setting.drafter_step, setting.drafter_step, call=setting.call)
    capacity = CapacityChanged(targets=tuple(range(len(targets))), drafters=(0,))
    fewest, most = _TOKENS
    length = min(max(fewest, _DRAFTS * setting.drafter_step // VERIFICATION), most)
    total = 0.0
    for seed in range(_SEEDS):
        oracle = AgreementOracle(setting.acceptance_rate, seed=seed, length=length + 1)
        task = DecodingTask(oracle.prompt(1), length, lookahead=lookahead)
        method = create_method(strategy, task, capacity=capacity)
        result = simulate(
            method, oracle, targets=targets, drafters=[drafter], after_event=_let_others_run
        )
        total += float(result.total_time)
    return total


def _let_others_run() -> None:
    """Release the interpreter, which a computing thread else keeps from the event loop for 5 ms."""
    time.sleep(0)
