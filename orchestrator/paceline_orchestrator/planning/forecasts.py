"""What each decoding method promises a request: the row that it brings to the planner."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from paceline_contract.limits import MOST_LOOKAHEAD
from paceline_orchestrator.planning.equation import needed_target_count, smallest_lookahead
from paceline_orchestrator.planning.estimates import (
    Option,
    affordable_lookahead,
    distributed_token_ns,
    on_its_part,
    plain,
    self_speculative,
    speculative,
    stretch,
)
from paceline_protocol.methods import Strategy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paceline_orchestrator.planning.measurements import Measurements
    from paceline_orchestrator.planning.simulated_lookaheads import SimulatedLookaheads

# DSI's lookaheads whose times differ by less are equally good, and the longest has the least work.
_SAME_TIME = 1.002


@dataclass(frozen=True, slots=True)
class Case:
    """What a forecast is for.

    Attributes:
        measurements: What is known.
        lookahead: What the request asks for; None leaves the choice to the forecast.
        target_count: Targets that it may count on, 1 or more.
        lookaheads: What was simulated of DSI's lookaheads.
        may_draft_ahead: Whether SI's drafter may go on while the target verifies.
    """

    measurements: Measurements
    _: KW_ONLY
    lookahead: int | None
    target_count: int
    lookaheads: SimulatedLookaheads
    may_draft_ahead: bool = True


def _distributed(case: Case) -> Option:
    measurements, lookahead = case.measurements, case.lookahead
    own = on_its_part(measurements)
    target_ns, drafter_ns = own.verification_ns, own.drafter_step_ns
    feasible = smallest_lookahead(target_ns, drafter_ns, target_count=case.target_count)
    affordable = affordable_lookahead(measurements)
    rehearsed = {
        each: round(min(time_ns, target_ns) * stretch(measurements, each))
        for each, time_ns in case.lookaheads.times(measurements, case.target_count).items()
    }
    if lookahead is None:
        lookahead = _longest_of_the_best(rehearsed, at_least=affordable)
    lookahead = lookahead or min(max(feasible, affordable), MOST_LOOKAHEAD)
    needed = needed_target_count(target_ns, drafter_ns, lookahead=lookahead)
    if lookahead in rehearsed:
        token_ns = rehearsed[lookahead]
    else:
        token_ns = distributed_token_ns(own, max(lookahead, feasible))
        token_ns = round(token_ns * stretch(measurements, lookahead))
    return Option(
        Strategy.DISTRIBUTED,
        lookahead=lookahead,
        target_count=min(needed, case.target_count),
        token_ns=token_ns,
        note=_cost(measurements, affordable),
    )


def _longest_of_the_best(times: Mapping[int, int], *, at_least: int) -> int | None:
    affordable = {each: time for each, time in times.items() if each >= at_least}
    bearable = _SAME_TIME * min(affordable.values(), default=0)
    return max((each for each, time in affordable.items() if time <= bearable), default=None)


def _cost(measurements: Measurements, affordable: int) -> str:
    if affordable == 1:
        return ""
    cost = f"{measurements.dispatch_ns / 1e6:.1f} ms of CPU"
    return f"DSI from lookahead {affordable} on, at {cost} for a verification"


FORECASTS: dict[Strategy, Callable[[Case], Option]] = {
    Strategy.AUTOREGRESSIVE: lambda case: plain(case.measurements),
    Strategy.SPECULATIVE: lambda case: speculative(
        case.measurements, case.lookahead, may_draft_ahead=case.may_draft_ahead
    ),
    Strategy.DISTRIBUTED: _distributed,
    Strategy.SELF_SPECULATIVE: lambda case: self_speculative(case.measurements),
}
"""By method, as in paceline_protocol.methods; asked only where there is what the method needs."""
