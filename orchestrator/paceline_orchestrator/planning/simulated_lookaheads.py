"""DSI's time for each token by lookahead, from simulations: it has no closed form.

A correction is a fresh start: with one drafter that is no slower than the targets, and with targets
of equal, steady latency, all that is in flight when a draft token is rejected descends from it. So
one run of the protocol that serves users, in which every draft token is right, tells when the token
after any number of accepted ones is final; how likely that number is says the acceptance rate.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline_contract.limits import MOST_LOOKAHEAD
from paceline_orchestrator.planning.background_computation import let_others_run
from paceline_orchestrator.planning.equation import LOOKAHEADS, smallest_lookahead
from paceline_orchestrator.planning.estimates import distributed_token_ns, on_its_part
from paceline_orchestrator.planning.measurements import Measurements
from paceline_orchestrator.planning.simulation_cache import SimulationCache
from paceline_protocol.distributed import DistributedDecoding
from paceline_protocol.laboratory.oracles import AgreementOracle
from paceline_protocol.laboratory.simulation import ServerLatency, simulate
from paceline_protocol.messages import CapacityChanged
from paceline_protocol.task import DecodingTask

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

VERIFICATION = 10_000
"""What a verification takes, its call included: the unit of all times is a part of it."""

# Settings that are left to be simulated: the last ones are the likeliest to come again.
_MOST_MISSING = 4
# Settings whose simulations are kept, those used last: of at most 6 KiB each. A system that does
# not change has a few, since similar measurements share one; on a busy machine latencies wander.
_MOST_REHEARSED = 32
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


def rehearse(
    setting: Setting, *, lookahead: int, after_event: Callable[[], None] = let_others_run
) -> list[int]:
    """Return when each token after a correction is final, if every draft token is right.

    Args:
        setting: Where.
        lookahead: Draft tokens in a verification.
        after_event: Called between events; may end it with an exception.

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
    result = simulate(
        DistributedDecoding(task, capacity),
        oracle,
        targets=targets,
        drafters=[drafter],
        after_event=after_event,
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


class SimulatedLookaheads(SimulationCache[Setting, "Mapping[int, Sequence[int]]"]):
    """What is known of settings: by lookahead, what `rehearse` returns."""

    def __init__(self) -> None:
        super().__init__(
            _rehearse_lookaheads, most_missing=_MOST_MISSING, most_known=_MOST_REHEARSED
        )

    def times(self, measurements: Measurements, target_count: int) -> dict[int, int]:
        """Return DSI's time for each token, in ns, by lookahead, as far as it was simulated.

        A setting is only near to what was measured; DSI's closed form in both tells how near.
        """
        setting = setting_of(measurements, target_count)
        rehearsed = self.known(setting)
        if rehearsed is None:
            return {}
        rate = measurements.acceptance_rate
        own, near = on_its_part(measurements), _measured(setting, acceptance_rate=rate)
        return {
            lookahead: round(
                expected_token_time(times, rate)
                * _closed_form_ns(own, lookahead, target_count=target_count)
                / _closed_form_ns(near, lookahead, target_count=target_count)
            )
            for lookahead, times in rehearsed.items()
        }

    def ask_for(self, measurements: Measurements, target_count: int) -> None:
        """Have a setting rehearsed, unless it was, or drafts can never be ahead in it."""
        setting = setting_of(measurements, target_count)
        if setting.drafter_step <= VERIFICATION:
            self.simulate_later(setting)


def _rehearse_lookaheads(
    setting: Setting, *, after_event: Callable[[], None]
) -> Mapping[int, Sequence[int]]:
    return {
        # Times are below 2^32: a list of them would take nine times as much memory.
        lookahead: array("I", rehearse(setting, lookahead=lookahead, after_event=after_event))
        for lookahead in _lookaheads(setting)
    }


def setting_of(measurements: Measurements, target_count: int) -> Setting:
    """Return what a simulation depends on, rounded so that similar measurements share it."""
    own = on_its_part(measurements)
    return Setting(
        drafter_step=max(1, rounded(own.drafter_step_ns / own.verification_ns, 4)),
        call=rounded(own.call_ns / own.verification_ns, 1),
        target_count=target_count,
    )


def _closed_form_ns(measurements: Measurements, lookahead: int, *, target_count: int) -> int:
    target_ns, drafter_ns = measurements.verification_ns, measurements.drafter_step_ns
    feasible = smallest_lookahead(target_ns, drafter_ns, target_count=target_count)
    return distributed_token_ns(measurements, max(lookahead, feasible))


def _measured(setting: Setting, *, acceptance_rate: float) -> Measurements:
    """Return what would be measured in a setting."""
    return Measurements(
        target_step_ns=VERIFICATION - setting.call,
        target_first_ns=VERIFICATION,
        drafter_step_ns=setting.drafter_step,
        acceptance_rate=acceptance_rate,
        target_count=setting.target_count,
        call_ns=setting.call,
    )


def _lookaheads(setting: Setting) -> list[int]:
    """Return Equation 1's, those below, and those up to a block as long as a verification.

    Longer ones than Equation 1 asks for are as good where next to no draft token is accepted.
    """
    step, targets = setting.drafter_step, setting.target_count
    feasible = smallest_lookahead(VERIFICATION, step, target_count=targets)
    longest = smallest_lookahead(VERIFICATION, step, target_count=1)
    shorter = (each for each in LOOKAHEADS if each < longest)
    return sorted({*shorter, min(feasible, MOST_LOOKAHEAD), min(longest, MOST_LOOKAHEAD)})


def rounded(ratio: float, steps: int) -> int:
    """Return a part of a verification in units of it, rounded: so many steps double it.

    Or any other part, of 10,000.
    """
    if ratio * VERIFICATION < 1:
        return 0
    return round(VERIFICATION * 2 ** (round(steps * math.log2(ratio)) / steps))
