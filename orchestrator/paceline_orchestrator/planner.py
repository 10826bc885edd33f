"""Chooses strategy, lookahead and number of targets from measured latencies.

Equation 1 of the DSI paper says when verifications never wait for a target:

    ceil(target latency / (lookahead * drafter latency)) <= targets

It is the start; the lookahead of DSI is then picked by simulating the protocol itself, since with
work-conserving dispatch shorter blocks than it allows are often better.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TypeAlias

from paceline_orchestrator.protocol.messages import CapacityChanged
from paceline_orchestrator.protocol.strategy import Strategy, create_method
from paceline_orchestrator.protocol.task import DecodingTask
from paceline_orchestrator.simulation import AgreementOracle, ServerLatency, simulate

__all__ = [
    "Measurements",
    "Plan",
    "Planner",
    "needed_target_count",
    "smallest_lookahead",
]

_MAX_LOOKAHEAD = 64  # as in GenerateRequest.lookahead
# Another method is taken only where it is faster by more than the estimates are good for.
_WORTHWHILE_GAIN = 1.02
# From here on the prompt goes to all targets at once: waiting for a cold target in the middle of a
# generation costs its whole prefill, having it prefill at the start costs a busy target.
_BROADCAST_STEPS = 2
_SIMULATED_TOKENS = 160
_SIMULATED_SEEDS = 2
_SIMULATED_STEP = 10_000  # the target's latency, in units of the simulation

_Key: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Measurements:
    """What the planner knows.

    Attributes:
        target_step_ns: One decoding step of a target, with its call.
        target_first_ns: A target's first forward on the prompt.
        drafter_step_ns: One decoding step of the drafter.
        acceptance_rate: Probability that the target accepts a draft token, in [0, 1].
        target_count: Targets there are, 1 or more.
        drafter_count: Drafters there are; without one the drafter's latency means nothing.
    """

    target_step_ns: int
    target_first_ns: int
    drafter_step_ns: int
    acceptance_rate: float
    target_count: int
    drafter_count: int = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """How to decode a request.

    Attributes:
        strategy: The method.
        lookahead: Draft tokens in a verification; 0 for plain decoding.
        target_count: Targets to use.
        broadcast_prefill: Whether they should all prefill the prompt at the start.
        token_ns: Expected time for each token after the first.
        note: What was chosen and why, in one line.
    """

    strategy: Strategy
    lookahead: int
    target_count: int
    broadcast_prefill: bool
    token_ns: int
    note: str


@dataclass(frozen=True, slots=True)
class _Option:
    """A way to decode, and the expected time for each token."""

    strategy: Strategy
    lookahead: int
    target_count: int
    token_ns: int

    def __str__(self) -> str:
        label = {
            Strategy.AUTOREGRESSIVE: "plain decoding",
            Strategy.SPECULATIVE: f"SI with lookahead {self.lookahead}",
            Strategy.DISTRIBUTED: (
                f"DSI with lookahead {self.lookahead} on {self.target_count} target(s)"
            ),
        }[self.strategy]
        return f"{label}: {self.token_ns / 1e6:.1f} ms per token"


def needed_target_count(target_ns: int, drafter_ns: int, *, lookahead: int) -> int:
    """Return how many targets keep verifications from waiting (Equation 1)."""
    return _ceil_div(target_ns, lookahead * drafter_ns)


def smallest_lookahead(target_ns: int, drafter_ns: int, *, target_count: int) -> int:
    """Return the smallest lookahead with which Equation 1 holds."""
    return max(1, _ceil_div(target_ns, target_count * drafter_ns))


class Planner:
    """Plans requests; remembers what it simulated.

    Concurrency:
        `choose` is cheap and does not simulate. `refine` takes some 100 ms of computing: call it on
        a worker thread, when measurements have changed. Both can run at the same time.
    """

    def __init__(self) -> None:
        self._simulated: dict[_Key, dict[int, float]] = {}  # by lookahead: see _simulate

    def choose(
        self,
        measurements: Measurements,
        *,
        strategy: Strategy | None = None,
        lookahead: int | None = None,
        target_count: int | None = None,
    ) -> Plan:
        """Plan a request.

        Args:
            measurements: What is known.
            strategy: The one asked for; None chooses.
            lookahead: The one asked for; None chooses.
            target_count: The most targets to use; None chooses.
        """
        available = min(target_count or measurements.target_count, measurements.target_count)
        options = [_plain(measurements)]
        if measurements.drafter_count:
            options.append(_speculative(measurements, lookahead))
            options.append(self._distributed(measurements, lookahead, available))
        wanted = [option for option in options if strategy in (None, option.strategy)]
        if not wanted:  # speculation asked for, and no drafter: it will find one or decode plainly
            assert strategy is not None
            return _plan(
                _Option(strategy, lookahead or 1, 1, measurements.target_step_ns),
                measurements,
                why="no drafter",
            )
        best = wanted[0]
        for option in wanted[1:]:
            if option.token_ns * _WORTHWHILE_GAIN < best.token_ns:
                best = option
        others = "; ".join(str(option) for option in options if option is not best)
        return _plan(best, measurements, why=others or "no drafter")

    def refine(self, measurements: Measurements) -> None:
        """Simulate DSI for these measurements, so that `choose` knows its best lookahead.

        Nothing is simulated where speculation does not pay.
        """
        if self.choose(measurements).strategy is Strategy.AUTOREGRESSIVE:
            return
        key = _key(measurements, measurements.target_count)
        if key not in self._simulated:
            self._simulated[key] = _simulate(key)

    def _distributed(
        self, measurements: Measurements, lookahead: int | None, target_count: int
    ) -> _Option:
        target_ns, drafter_ns = measurements.target_step_ns, measurements.drafter_step_ns
        feasible = smallest_lookahead(target_ns, drafter_ns, target_count=target_count)
        simulated = self._simulated.get(_key(measurements, target_count), {})
        if lookahead is None and simulated:
            lookahead = min(simulated, key=lambda candidate: simulated[candidate])
        lookahead = lookahead or min(feasible, _MAX_LOOKAHEAD)
        needed = needed_target_count(target_ns, drafter_ns, lookahead=lookahead)
        if lookahead in simulated:
            rival = _speculative(measurements, None)
            token_ns = min(round(simulated[lookahead] * rival.token_ns), target_ns)
        else:
            token_ns = _distributed_token_ns(measurements, max(lookahead, feasible))
        return _Option(Strategy.DISTRIBUTED, lookahead, min(needed, target_count), token_ns)


def _plain(measurements: Measurements) -> _Option:
    return _Option(Strategy.AUTOREGRESSIVE, 0, 1, measurements.target_step_ns)


def _speculative(measurements: Measurements, lookahead: int | None) -> _Option:
    candidates = [lookahead] if lookahead else range(1, _MAX_LOOKAHEAD + 1)
    token_ns, best = min(
        (_speculative_token_ns(measurements, candidate), candidate) for candidate in candidates
    )
    return _Option(Strategy.SPECULATIVE, best, 1, token_ns)


def _speculative_token_ns(measurements: Measurements, lookahead: int) -> int:
    """Return the time of a round over its expected tokens, 1 + a + ... + a^lookahead."""
    round_ns = lookahead * measurements.drafter_step_ns + measurements.target_step_ns
    tokens = sum(measurements.acceptance_rate**accepted for accepted in range(lookahead + 1))
    return round(round_ns / tokens)


def _distributed_token_ns(measurements: Measurements, lookahead: int) -> int:
    """Return the time between two corrections over the expected tokens, if no verification waits.

    With run length G before a correction, which is 1 / (1 - a) tokens in all, the verdict on it
    comes target + ceil(G / lookahead) blocks' drafting after the last one; the expectation of that
    ceil is a / (1 - a^lookahead). For lookahead 1 it is the paper's Proposition 1.
    """
    rate, target_ns = measurements.acceptance_rate, measurements.target_step_ns
    if rate >= 1:
        return min(measurements.drafter_step_ns, target_ns)
    drafting_ns = lookahead * measurements.drafter_step_ns * rate / (1 - rate**lookahead)
    return min(round((1 - rate) * (target_ns + drafting_ns)), target_ns)


def _plan(option: _Option, measurements: Measurements, *, why: str) -> Plan:
    costly = measurements.target_first_ns > _BROADCAST_STEPS * measurements.target_step_ns
    return Plan(
        strategy=option.strategy,
        lookahead=option.lookahead,
        target_count=option.target_count,
        broadcast_prefill=costly and option.target_count > 1,
        token_ns=option.token_ns,
        note=f"{option} ({why})",
    )


def _key(measurements: Measurements, target_count: int) -> _Key:
    """Return what the simulation depends on, rounded so that similar measurements share it."""
    ratio = measurements.drafter_step_ns / measurements.target_step_ns
    drafter_step = max(1, round(float(f"{ratio:.1e}") * _SIMULATED_STEP))
    return drafter_step, round(20 * measurements.acceptance_rate), target_count


def _simulate(key: _Key) -> dict[int, float]:
    """Return DSI's time relative to the best SI's, by lookahead: Equation 1's, and shorter ones.

    The two are simulated with the same agreements, so that luck cancels out.
    """
    drafter_step, rate, target_count = key
    rounded = Measurements(_SIMULATED_STEP, 0, drafter_step, rate / 20, target_count)
    feasible = smallest_lookahead(_SIMULATED_STEP, drafter_step, target_count=target_count)
    feasible = min(feasible, _MAX_LOOKAHEAD)
    candidates = {1, _ceil_div(feasible, 4), _ceil_div(feasible, 2), feasible}
    rival = _speculative(rounded, None)
    rival_time = _simulated_time(Strategy.SPECULATIVE, rival.lookahead, rounded)
    return {
        lookahead: _simulated_time(Strategy.DISTRIBUTED, lookahead, rounded) / rival_time
        for lookahead in sorted(candidates)
    }


def _simulated_time(strategy: Strategy, lookahead: int, measurements: Measurements) -> float:
    targets = [ServerLatency(measurements.target_step_ns, measurements.target_step_ns)]
    targets *= measurements.target_count
    drafter = ServerLatency(measurements.drafter_step_ns, measurements.drafter_step_ns)
    capacity = CapacityChanged(targets=tuple(range(len(targets))), drafters=(0,))
    total = 0.0
    for seed in range(_SIMULATED_SEEDS):
        oracle = AgreementOracle(
            measurements.acceptance_rate, seed=seed, length=_SIMULATED_TOKENS + 1
        )
        task = DecodingTask(oracle.prompt(1), _SIMULATED_TOKENS, lookahead=lookahead)
        method = create_method(strategy, task, capacity=capacity)
        result = simulate(
            method, oracle, targets=targets, drafters=[drafter], after_event=_let_others_run
        )
        total += float(result.total_time)
    return total


def _let_others_run() -> None:
    """Release the interpreter, which a computing thread else keeps from the event loop for 5 ms."""
    time.sleep(0)


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)
