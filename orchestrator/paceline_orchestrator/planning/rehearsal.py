"""DSI on the virtual clock: what the planner cannot say in closed form.

A correction is a fresh start: with one drafter that is no slower than the targets, and with targets
of equal, steady latency, all that is in flight when a draft token is rejected descends from it. So
one run of the protocol that serves users, in which every draft token is right, tells when the token
after any number of accepted ones is final; how likely that number is says the acceptance rate.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline_protocol.messages import CapacityChanged
from paceline_protocol.simulation import AgreementOracle, ServerLatency, simulate
from paceline_protocol.strategy import Strategy, create_method
from paceline_protocol.task import DecodingTask

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["VERIFICATION", "Setting", "expected_token_time", "rehearse"]

VERIFICATION = 10_000
"""What a verification takes, its call included: the unit of all times is a part of it."""

_TOKENS = (40, 160)  # the fewer, the more drafter steps are in a verification
_DRAFTS = 1600


@dataclass(frozen=True, slots=True)
class Setting:
    """Where to rehearse.

    Attributes:
        drafter_step: A draft token's time, in [1, VERIFICATION].
        call: What a draft's call takes before its first token, besides.
        target_count: Targets.
    """

    drafter_step: int
    call: int
    target_count: int


def rehearse(setting: Setting, *, lookahead: int) -> list[int]:
    """Return when each token after a correction is final, if every draft token is right.

    Cost:
        Some 50 ms of computing.
    """
    targets = [ServerLatency(VERIFICATION, VERIFICATION)] * setting.target_count
    drafter = ServerLatency(setting.drafter_step, setting.drafter_step, call=setting.call)
    capacity = CapacityChanged(targets=tuple(range(len(targets))), drafters=(0,))
    fewest, most = _TOKENS
    length = min(max(fewest, _DRAFTS * setting.drafter_step // VERIFICATION), most)
    oracle = AgreementOracle(1.0, seed=0, length=length + 1)
    task = DecodingTask(oracle.prompt(1), length, lookahead=lookahead)
    method = create_method(Strategy.DISTRIBUTED, task, capacity=capacity)
    result = simulate(
        method, oracle, targets=targets, drafters=[drafter], after_event=_let_others_run
    )
    return [int(each) for each in result.token_times]


def expected_token_time(times: Sequence[int], acceptance_rate: float) -> float:
    """Return the time between two corrections over the expected tokens.

    Args:
        times: See `rehearse`; a run longer than that counts as if it ended there.
        acceptance_rate: Probability that the target accepts a draft token, in [0, 1].
    """
    time_sum = token_sum = 0.0
    reached = 1.0  # the probability that so many draft tokens are accepted
    for accepted, final in enumerate(times):
        ends_here = reached if accepted == len(times) - 1 else reached * (1 - acceptance_rate)
        time_sum += ends_here * final
        token_sum += reached
        reached *= acceptance_rate
    return time_sum / token_sum


def _let_others_run() -> None:
    """Release the interpreter, which a computing thread else keeps from the event loop for 5 ms."""
    time.sleep(0)
