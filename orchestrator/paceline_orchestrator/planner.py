"""Chooses strategy, lookahead and number of targets from measured latencies, costs and load.

Equation 1 of the DSI paper says when verifications never wait for a target:

    ceil(target latency / (lookahead * drafter latency)) <= targets

It is the start. The lookahead of DSI is then picked by simulating the protocol itself, calls and
their cost included, since with work-conserving dispatch shorter blocks than it allows are often
better. Two things hold it up: a verification costs this process CPU time, and under load the
servers are shared.

Load. A request counts on its part of the targets, in which DSI can speculate. What a strategy is
worth is the larger of two times for each token: the request's own, on servers that nobody else
uses, and what all requests take at the targets they share, if all of them decode so:

                request's own                            all requests, at the targets
    non-SI      target                                   turn
    SI          (lookahead * drafter + target) / E       turn / E
    DSI         simulated, with a slower drafter         turn / target * its own: it never rests

with E tokens for each verification, and a turn in which the targets verify once for every request.
So DSI retreats as targets fill up. Where they are full, the strategy with the fewest target
forwards for each token wins: SI. Its lookahead is such that the drafter keeps up with all requests;
when it is full for all that, further requests leave it to the others and decode plainly: they
would gain what those lose, and leave targets idle. So each request gets at least what plain
decoding would give it.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline_orchestrator.protocol.strategy import Strategy
from paceline_orchestrator.rehearsal import VERIFICATION, Setting, rehearse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
# Dispatching may take this part of the time of the event loop, which has one core: one of so many.
# Beyond, answers begin to wait for one another, and a rejection for its restart.
_DISPATCH_PARTS = 2
# DSI's lookaheads whose times differ by less are equally good, and the longest has the least work.
_SAME_TIME = 1.002
# Cases that are left to be simulated: the last ones are the likeliest to come again.
_MOST_MISSING = 4


@dataclass(frozen=True, slots=True)
class Measurements:
    """What the planner knows.

    Attributes:
        target_step_ns: One decoding step of a target.
        target_first_ns: A target's first forward on the prompt.
        drafter_step_ns: One decoding step of the drafter, as its tokens arrive.
        acceptance_rate: Probability that the target accepts a draft token, in [0, 1].
        target_count: Targets there are, 1 or more.
        drafter_count: Drafters there are; without one the drafter's latency means nothing.
        call_ns: What a call takes before its first answer, besides its forward and its wait.
        dispatch_ns: What a verification costs this process, in CPU time.
        request_count: Requests that share the targets, this one included.
        drafting_count: Requests that share this one's drafter, this one included.
    """

    target_step_ns: int
    target_first_ns: int
    drafter_step_ns: int
    acceptance_rate: float
    target_count: int
    drafter_count: int = 1
    call_ns: int = 0
    dispatch_ns: int = 0
    request_count: int = 1
    drafting_count: int = 1

    @property
    def verification_ns(self) -> int:
        """A verification as its caller sees it, at an idle target."""
        return self.target_step_ns + self.call_ns

    @property
    def part(self) -> int:
        """This request's part of the targets, rounded; at least one, which it may have to share."""
        return max(1, (2 * self.target_count + self.request_count) // (2 * self.request_count))

    @property
    def crowding(self) -> float:
        """How many requests there are for each target."""
        return self.request_count / self.target_count


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
    """A way to decode, the expected time for each token, and whether the drafter keeps up."""

    strategy: Strategy
    lookahead: int
    target_count: int
    token_ns: int
    keeps_up: bool = True

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
        `choose` is cheap: it simulates nothing, and makes do with closed forms. `refine` takes some
        100 ms for each case that `choose` would have liked to have simulated: call it on a worker
        thread. Both can run at the same time.
    """

    def __init__(self) -> None:
        self._rehearsed: dict[_Case, dict[int, float]] = {}  # see rehearse
        self._missing: deque[_Case] = deque(maxlen=_MOST_MISSING)

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
        available = min(target_count or measurements.part, measurements.target_count)
        options = [_plain(measurements)]
        if measurements.drafter_count:
            options.append(_speculative(measurements, lookahead))
            options.append(self._distributed(measurements, lookahead, available))
        wanted = [option for option in options if strategy in (None, option.strategy)]
        if not wanted:  # speculation asked for, and no drafter: it will find one or decode plainly
            assert strategy is not None
            option = _Option(strategy, lookahead or 1, 1, measurements.verification_ns)
            return _plan(option, measurements, others=())
        best = wanted[0]
        for option in wanted[1:]:
            if option.keeps_up and option.token_ns * _WORTHWHILE_GAIN < best.token_ns:
                best = option
        if best.strategy is not Strategy.AUTOREGRESSIVE and measurements.crowding <= 1:
            self._miss(_case(measurements, available))
        return _plan(best, measurements, others=[each for each in options if each is not best])

    def refine(self) -> None:
        """Simulate DSI where it was not yet, so that `choose` knows its best lookahead.

        Nothing is simulated where speculation does not pay, nor where DSI has no target to itself.
        """
        while self._missing:
            case = self._missing.pop()
            self._rehearsed[case] = case.rehearse()

    def _miss(self, case: _Case) -> None:
        if case not in self._rehearsed and case not in self._missing:
            self._missing.append(case)

    def _distributed(
        self, measurements: Measurements, lookahead: int | None, target_count: int
    ) -> _Option:
        alone = _alone(measurements)
        target_ns, drafter_ns = alone.verification_ns, alone.drafter_step_ns
        feasible = smallest_lookahead(target_ns, drafter_ns, target_count=target_count)
        rehearsed = self._rehearsed.get(_case(measurements, target_count), {})
        if lookahead is None and rehearsed:
            lookahead = _longest_of_the_best(rehearsed)
        lookahead = lookahead or min(
            max(feasible, _affordable_lookahead(measurements)), _MAX_LOOKAHEAD
        )
        needed = needed_target_count(target_ns, drafter_ns, lookahead=lookahead)
        if lookahead in rehearsed:
            rival = _speculative(alone, None)
            token_ns = min(round(rehearsed[lookahead] * rival.token_ns), target_ns)
        else:
            token_ns = _distributed_token_ns(alone, max(lookahead, feasible))
        token_ns = round(token_ns * max(1.0, measurements.crowding))
        return _Option(Strategy.DISTRIBUTED, lookahead, min(needed, target_count), token_ns)


def _longest_of_the_best(rehearsed: Mapping[int, float]) -> int:
    bearable = _SAME_TIME * min(rehearsed.values())
    return max(lookahead for lookahead, time in rehearsed.items() if time <= bearable)


def _plain(measurements: Measurements) -> _Option:
    token_ns = max(measurements.verification_ns, _turn_ns(measurements))
    return _Option(Strategy.AUTOREGRESSIVE, 0, 1, round(token_ns))


def _speculative(measurements: Measurements, lookahead: int | None) -> _Option:
    token_ns, best = min(
        (_speculative_token_ns(measurements, candidate), candidate)
        for candidate in ([lookahead] if lookahead else _sustainable_lookaheads(measurements))
    )
    keeps_up = _keeps_up(measurements, best, drafting=measurements.drafting_count)
    return _Option(Strategy.SPECULATIVE, best, 1, token_ns, keeps_up)


def _sustainable_lookaheads(measurements: Measurements) -> list[int]:
    """Return the lookaheads of SI with which the drafters keep up with everybody's rounds.

    The first draft token of a block is worth the most, so where they cannot keep up, each request
    that drafts at all drafts one.
    """
    everybody = measurements.request_count / measurements.drafter_count
    return [1] + [
        lookahead
        for lookahead in range(2, _MAX_LOOKAHEAD + 1)
        if _keeps_up(measurements, lookahead, drafting=everybody)
    ]


def _keeps_up(measurements: Measurements, lookahead: int, *, drafting: float) -> bool:
    """Whether a drafter that so many requests draft at has their drafts ready when they want them.

    Each wants one in a round of SI, or in a turn of the targets if that takes longer.
    """
    round_ns = max(_round_ns(measurements, lookahead), _turn_ns(measurements))
    return drafting * lookahead * measurements.drafter_step_ns <= round_ns


def _speculative_token_ns(measurements: Measurements, lookahead: int) -> int:
    """Return the time of a round over its expected tokens, 1 + a + ... + a^lookahead.

    A round takes its own time, or where servers are shared, what all rounds take at one of them.
    """
    drafting_ns = measurements.drafting_count * lookahead * measurements.drafter_step_ns
    round_ns = max(_round_ns(measurements, lookahead), _turn_ns(measurements), drafting_ns)
    tokens = sum(measurements.acceptance_rate**accepted for accepted in range(lookahead + 1))
    return round(round_ns / tokens)


def _round_ns(measurements: Measurements, lookahead: int) -> int:
    """Return the time of a round of SI where nobody else is: a draft, then a verification."""
    drafting_ns = measurements.call_ns + lookahead * measurements.drafter_step_ns
    return drafting_ns + measurements.verification_ns


def _turn_ns(measurements: Measurements) -> float:
    """Return how long the targets take to serve every request once."""
    return measurements.crowding * measurements.target_step_ns


def _distributed_token_ns(measurements: Measurements, lookahead: int) -> int:
    """Return the time between two corrections over the expected tokens, if no verification waits.

    With run length G before a correction, which is 1 / (1 - a) tokens in all, the verdict on it
    comes target + ceil(G / lookahead) blocks' drafting after the last one; the expectation of that
    ceil is a / (1 - a^lookahead). For lookahead 1 it is the paper's Proposition 1. A draft's call
    is paid once in a run, if there is a draft token in it.
    """
    rate, target_ns = measurements.acceptance_rate, measurements.verification_ns
    if rate >= 1:
        return min(measurements.drafter_step_ns, target_ns)
    drafting_ns = rate * measurements.call_ns
    drafting_ns += lookahead * measurements.drafter_step_ns * rate / (1 - rate**lookahead)
    return min(round((1 - rate) * (target_ns + drafting_ns)), target_ns)


def _alone(measurements: Measurements) -> Measurements:
    """Return the same for DSI on its own part: it never rests, and so has a slower drafter.

    All requests might draft so, and at least those do that draft now.
    """
    everybody = _ceil_div(measurements.request_count, max(1, measurements.drafter_count))
    sharing = max(measurements.drafting_count, everybody)
    return replace(
        measurements,
        drafter_step_ns=measurements.drafter_step_ns * sharing,
        request_count=1,
        drafting_count=1,
    )


def _affordable_lookahead(measurements: Measurements) -> int:
    """Return the smallest lookahead of DSI whose verifications this process can dispatch.

    However many requests there are, they verify what the drafters draft: one block of lookahead
    tokens after the other.
    """
    drafters = min(measurements.drafter_count, measurements.request_count)
    dispatching_ns = _DISPATCH_PARTS * drafters * measurements.dispatch_ns
    return min(max(1, _ceil_div(dispatching_ns, measurements.drafter_step_ns)), _MAX_LOOKAHEAD)


def _plan(option: _Option, measurements: Measurements, *, others: Sequence[_Option]) -> Plan:
    costly = measurements.target_first_ns > _BROADCAST_STEPS * measurements.target_step_ns
    return Plan(
        strategy=option.strategy,
        lookahead=option.lookahead,
        target_count=option.target_count,
        broadcast_prefill=costly and option.target_count > 1,
        token_ns=option.token_ns,
        note=f"{option} ({_why(measurements, others)})",
    )


def _why(measurements: Measurements, others: Sequence[_Option]) -> str:
    reasons = [str(option) for option in others] or ["no drafter"]
    if measurements.request_count > 1:
        reasons.append(
            f"{measurements.request_count} requests on {measurements.target_count} target(s), "
            f"{measurements.drafting_count} at the drafter"
        )
    affordable = _affordable_lookahead(measurements)
    if others and affordable > 1:
        cost = f"{measurements.dispatch_ns / 1e6:.1f} ms of CPU"
        reasons.append(f"DSI from lookahead {affordable} on, at {cost} for a verification")
    return "; ".join(reasons)


def _case(measurements: Measurements, target_count: int) -> _Case:
    """Return what a simulation depends on, rounded so that similar measurements share it."""
    alone = _alone(measurements)
    return _Case(
        Setting(
            drafter_step=max(1, _rounded(alone.drafter_step_ns / alone.verification_ns, 4)),
            call=_rounded(alone.call_ns / alone.verification_ns, 1),
            acceptance_rate=round(20 * alone.acceptance_rate) / 20,
            target_count=target_count,
        ),
        affordable_lookahead=_affordable_lookahead(measurements),
    )


@dataclass(frozen=True, slots=True)
class _Case:
    """What a simulation depends on."""

    setting: Setting
    affordable_lookahead: int

    def rehearse(self) -> dict[int, float]:
        """Simulate the lookaheads that are worth it."""
        alone = Measurements(
            target_step_ns=VERIFICATION - self.setting.call,
            target_first_ns=VERIFICATION,
            drafter_step_ns=self.setting.drafter_step,
            acceptance_rate=self.setting.acceptance_rate,
            target_count=self.setting.target_count,
            call_ns=self.setting.call,
        )
        return rehearse(
            self.setting,
            speculative_lookahead=_speculative(alone, None).lookahead,
            lookaheads=self._lookaheads(alone),
        )

    def _lookaheads(self, alone: Measurements) -> list[int]:
        """Return Equation 1's, by halves down to the affordable one, and longer ones as good.

        Those are where next to no draft token is accepted: a long block is seldom finished.
        """
        lookahead = smallest_lookahead(
            VERIFICATION, self.setting.drafter_step, target_count=self.setting.target_count
        )
        lookahead = min(max(lookahead, self.affordable_lookahead), _MAX_LOOKAHEAD)
        lookaheads = [lookahead]
        while lookaheads[-1] > self.affordable_lookahead:
            lookaheads.append(max(self.affordable_lookahead, _ceil_div(lookaheads[-1], 2)))
        bearable_ns = _SAME_TIME * _distributed_token_ns(alone, lookahead)
        while (
            lookahead < _MAX_LOOKAHEAD
            and _distributed_token_ns(alone, 2 * lookahead) <= bearable_ns
        ):
            lookahead = min(2 * lookahead, _MAX_LOOKAHEAD)
            lookaheads.append(lookahead)
        return lookaheads


def _rounded(ratio: float, steps: int) -> int:
    """Return a part of a verification in units of it, rounded: so many steps double it."""
    if ratio * VERIFICATION < 1:
        return 0
    return round(VERIFICATION * 2 ** (round(steps * math.log2(ratio)) / steps))


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)
