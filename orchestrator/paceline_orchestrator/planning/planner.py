"""Chooses strategy, lookahead and number of targets from measured latencies, costs and load.

The closed forms of `estimates` are the start. The lookahead of DSI is then picked by simulating the
protocol itself, calls and their cost included, since with work-conserving dispatch shorter blocks
than Equation 1 allows are often better. Two things hold it up: a verification costs this process
CPU time, and under load the servers are shared.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline_orchestrator.planning.estimates import (
    LOOKAHEADS,
    MAX_LOOKAHEAD,
    Measurements,
    Option,
    affordable_lookahead,
    distributed_token_ns,
    needed_target_count,
    on_its_part,
    pays_to_broadcast,
    plain,
    smallest_lookahead,
    speculative,
)
from paceline_orchestrator.planning.rehearsal import (
    VERIFICATION,
    Setting,
    expected_token_time,
    rehearse,
)
from paceline_protocol.strategy import Strategy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Plan", "Planner", "Wish"]

# Another method is taken only where it is faster by more than the estimates are good for.
_WORTHWHILE_GAIN = 1.02
# DSI's lookaheads whose times differ by less are equally good, and the longest has the least work.
_SAME_TIME = 1.002
# Settings that are left to be simulated: the last ones are the likeliest to come again.
_MOST_MISSING = 4
# Settings whose simulations are kept, those used last: of 10 to 30 KiB each. A system that does not
# change has a few, since similar measurements share one.
_MOST_REHEARSED = 64


@dataclass(frozen=True, slots=True)
class Plan:
    """How to decode a request.

    Attributes:
        strategy: The method.
        lookahead: Draft tokens in a verification; 0 for plain decoding.
        target_count: Targets to use.
        broadcast_prefill: Whether they should all prefill the prompt at the start.
        token_ns: Expected time for each token after the first.
        plain_token_ns: The same, had it been decoded plainly.
        note: What was chosen and why, in one line.
    """

    strategy: Strategy
    lookahead: int
    target_count: int
    broadcast_prefill: bool
    token_ns: int
    plain_token_ns: int
    note: str


@dataclass(frozen=True, slots=True)
class Wish:
    """What a request says of how it is to be decoded. None leaves it to the planner.

    Attributes:
        strategy: The method.
        lookahead: Draft tokens in a verification.
        target_count: The most targets to use.
    """

    strategy: Strategy | None = None
    lookahead: int | None = None
    target_count: int | None = None


_NO_WISH = Wish()


class Planner:
    """Plans requests; remembers what it lately simulated.

    Concurrency:
        `choose` is cheap: it simulates nothing, and makes do with closed forms. `refine` takes some
        100 ms for each setting that `choose` would have liked to have simulated: call it on a
        worker thread. Both can run at the same time.
    """

    def __init__(self) -> None:
        # By lookahead; the setting used last comes last.
        self._rehearsed: OrderedDict[Setting, dict[int, list[int]]] = OrderedDict()
        self._missing: deque[Setting] = deque(maxlen=_MOST_MISSING)

    def choose(
        self,
        measurements: Measurements,
        wish: Wish = _NO_WISH,
    ) -> Plan:
        """Plan a request by what is known, and what it wishes."""
        strategy, lookahead, target_count = wish.strategy, wish.lookahead, wish.target_count
        available = min(target_count or measurements.part, measurements.target_count)
        options = [plain(measurements)]
        if measurements.drafter_count:
            options.append(speculative(measurements, lookahead))
            options.append(self._distributed(measurements, lookahead, available))
        wanted = [option for option in options if strategy in (None, option.strategy)]
        if not wanted:  # speculation asked for, and no drafter: it will find one or decode plainly
            assert strategy is not None
            option = Option(strategy, lookahead or 1, 1, measurements.verification_ns)
            return _plan(option, measurements, others=())
        best = wanted[0]
        for option in wanted[1:]:
            if option.keeps_up and option.token_ns * _WORTHWHILE_GAIN < best.token_ns:
                best = option
        if best.strategy is not Strategy.AUTOREGRESSIVE and measurements.crowding <= 1:
            self._miss(_setting(measurements, available))
        return _plan(best, measurements, others=[each for each in options if each is not best])

    def refine(self) -> None:
        """Simulate DSI where it was not yet, so that `choose` knows its best lookahead.

        Nothing is simulated where speculation does not pay, nor where DSI has no target to itself.
        What fails is forgotten, and simulated again when it is next asked for.
        """
        while self._missing:
            setting = self._missing.pop()
            self._rehearsed[setting] = {}  # known from here on, or `choose` would ask for it again
            try:
                self._rehearsed[setting] = {
                    lookahead: rehearse(setting, lookahead=lookahead)
                    for lookahead in _lookaheads(setting)
                }
            except BaseException:
                del self._rehearsed[setting]
                raise
            while len(self._rehearsed) > _MOST_REHEARSED:
                self._rehearsed.popitem(last=False)

    def _miss(self, setting: Setting) -> None:
        is_known = setting in self._rehearsed or setting in self._missing
        if not is_known and setting.drafter_step <= VERIFICATION:
            self._missing.append(setting)

    def _distributed(
        self, measurements: Measurements, lookahead: int | None, target_count: int
    ) -> Option:
        own = on_its_part(measurements)
        target_ns, drafter_ns = own.verification_ns, own.drafter_step_ns
        feasible = smallest_lookahead(target_ns, drafter_ns, target_count=target_count)
        affordable = affordable_lookahead(measurements)
        rehearsed = self._rehearsed_times(measurements, target_count)
        if lookahead is None:
            lookahead = _longest_of_the_best(rehearsed, at_least=affordable)
        lookahead = lookahead or min(max(feasible, affordable), MAX_LOOKAHEAD)
        needed = needed_target_count(target_ns, drafter_ns, lookahead=lookahead)
        if lookahead in rehearsed:
            token_ns = min(rehearsed[lookahead], target_ns)
        else:
            token_ns = distributed_token_ns(own, max(lookahead, feasible))
        token_ns = round(token_ns * max(1.0, measurements.crowding))
        return Option(Strategy.DISTRIBUTED, lookahead, min(needed, target_count), token_ns)

    def _rehearsed_times(self, measurements: Measurements, target_count: int) -> dict[int, int]:
        """Return DSI's time for each token, in ns, by lookahead, as far as it was simulated.

        A setting is only near to what was measured; SI, in closed form in both, tells how near.
        """
        setting = _setting(measurements, target_count)
        with suppress(KeyError):  # unknown, or `refine` has dropped it just now
            self._rehearsed.move_to_end(setting)
        rehearsed = self._rehearsed.get(setting, {})
        rate = measurements.acceptance_rate
        if not rehearsed:
            return {}
        rival = speculative(on_its_part(measurements), None).token_ns
        rehearsed_rival = speculative(_measured(setting, acceptance_rate=rate), None).token_ns
        return {
            lookahead: round(expected_token_time(times, rate) * rival / rehearsed_rival)
            for lookahead, times in rehearsed.items()
        }


def _longest_of_the_best(times: Mapping[int, int], *, at_least: int) -> int | None:
    affordable = {each: time for each, time in times.items() if each >= at_least}
    bearable = _SAME_TIME * min(affordable.values(), default=0)
    return max((each for each, time in affordable.items() if time <= bearable), default=None)


def _plan(option: Option, measurements: Measurements, *, others: Sequence[Option]) -> Plan:
    return Plan(
        strategy=option.strategy,
        lookahead=option.lookahead,
        target_count=option.target_count,
        broadcast_prefill=pays_to_broadcast(
            first=measurements.target_first_ns,
            step=measurements.target_step_ns,
            target_count=option.target_count,
        ),
        token_ns=option.token_ns,
        plain_token_ns=plain(measurements).token_ns,
        note=f"{option} ({_why(measurements, others)})",
    )


def _why(measurements: Measurements, others: Sequence[Option]) -> str:
    reasons = [str(option) for option in others] or ["no drafter"]
    if measurements.request_count > 1:
        reasons.append(
            f"{measurements.request_count} requests on {measurements.target_count} target(s), "
            f"{measurements.drafting_count} at the drafter"
        )
    affordable = affordable_lookahead(measurements)
    if others and affordable > 1:
        cost = f"{measurements.dispatch_ns / 1e6:.1f} ms of CPU"
        reasons.append(f"DSI from lookahead {affordable} on, at {cost} for a verification")
    return "; ".join(reasons)


def _setting(measurements: Measurements, target_count: int) -> Setting:
    """Return what a simulation depends on, rounded so that similar measurements share it."""
    own = on_its_part(measurements)
    return Setting(
        drafter_step=max(1, _rounded(own.drafter_step_ns / own.verification_ns, 4)),
        call=_rounded(own.call_ns / own.verification_ns, 1),
        target_count=target_count,
    )


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
    return sorted({*shorter, min(feasible, MAX_LOOKAHEAD), min(longest, MAX_LOOKAHEAD)})


def _rounded(ratio: float, steps: int) -> int:
    """Return a part of a verification in units of it, rounded: so many steps double it."""
    if ratio * VERIFICATION < 1:
        return 0
    return round(VERIFICATION * 2 ** (round(steps * math.log2(ratio)) / steps))
