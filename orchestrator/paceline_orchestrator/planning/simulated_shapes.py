"""Which tree shape is fastest for each method, by simulation with the measured price of rows.

A tree saves a forward where a rejected token's correction is in it, and costs rows in every one,
at targets and at drafters; SI may draft ahead, DSI overlaps. What that is worth to each of them
depends on how often runners-up are right and on what the servers measured of their rows. So every
method that drafts is simulated with both, as a chain and with trees of some shapes, all on the same
draws and the same clock, and then they are compared.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from paceline_contract.limits import MOST_LOOKAHEAD
from paceline_orchestrator.fleet.row_prices import RowPrices
from paceline_orchestrator.planning.background_computation import let_others_run
from paceline_orchestrator.planning.estimates import BLOCK_ROWS, plain
from paceline_orchestrator.planning.simulated_lookaheads import (
    VERIFICATION,
    rounded,
    setting_of,
)
from paceline_orchestrator.planning.simulation_cache import SimulationCache
from paceline_protocol.draft_shape import CHAIN, Shape
from paceline_protocol.laboratory.oracles import AgreementOracle
from paceline_protocol.laboratory.simulation import ServerLatency, simulate
from paceline_protocol.messages import CapacityChanged
from paceline_protocol.methods import Strategy, create_method
from paceline_protocol.ranks import shares_of
from paceline_protocol.task import DecodingTask

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from paceline_orchestrator.planning.estimates import Option
    from paceline_orchestrator.planning.measurements import Measurements
    from paceline_orchestrator.planning.simulated_lookaheads import Setting

OPEN_SHAPES = (CHAIN, Shape(2), Shape(4), Shape(4, 3))
"""What is tried where a request leaves it open; the chain comes first, as it always has to."""

# What a larger tree has to gain over a smaller one; a tree over a chain, and over plain decoding,
# more, since what is around forwards (messages, this process's own work) grows with them, too, and
# is not simulated.
_WORTHWHILE_GAIN = 1.02
_LEAST_GAIN = 1.05
# Few are enough, since all shapes meet the same random numbers.
_TOKENS = 60
_REPEATS = 4
# Rows whose price is told apart.
_PRICED_ROWS = (2, 4, 8, 16, 32, 64)
_WIDEST = max(shape.width for shape in OPEN_SHAPES)
# Longer blocks are simulated with the nearest of some lookaheads: a few tokens more make no
# difference to which shape is fastest.
_EXACT_LOOKAHEADS, _LOOKAHEAD_STEP = 8, 1.25
# Times of a verification whose ratio is smaller, and prices, count as the same as those that were
# simulated: both waver from request to request, and each simulation takes up to a second.
_SAME_RATIO, _SAME_CALL_RATIO = 1.2, 2.1
_SAME_PRICE, _SAME_PRICE_RATIO = 0.11, 1.1
_SAME_CALL = VERIFICATION // 30
_MOST_CIRCUMSTANCES = 32

Times: TypeAlias = "Mapping[Shape, float]"
"""A method's time for each token by the shape of its trees, in parts of a verification."""


@dataclass(frozen=True, slots=True)
class ShapeCase:
    """What a method's times depend on, rounded so that similar cases share it.

    Attributes:
        strategy: The method.
        lookahead: Draft tokens in a verification.
        setting: The servers.
        rejected: How many of 10,000 draft tokens the target rejects.
        decays: In tenths, how often each runner-up is right where all before it are wrong.
        target_prices: Prices of a target's rows.
        drafter_prices: Prices of the drafter's rows.
        tree_tokens: See DecodingTask; tree_depth and drafts_ahead likewise.
        targets_run_on: Whether a withdrawn forward runs to its end at a target.
        drafter_runs_on: The same at the drafter.
        shapes: What to try, a chain first.
    """

    strategy: Strategy
    lookahead: int
    setting: Setting
    rejected: int
    decays: tuple[int, ...]
    target_prices: RowPrices
    drafter_prices: RowPrices
    tree_tokens: int
    tree_depth: int
    drafts_ahead: bool = False
    targets_run_on: bool = False
    drafter_runs_on: bool = False
    shapes: tuple[Shape, ...] = OPEN_SHAPES


class _Circumstances(NamedTuple):
    """What was measured of a case, which is the same for all methods; see `ShapeCase`."""

    drafter_step: int
    call: int
    rejected: int
    decays: tuple[int, ...]
    target_prices: RowPrices
    drafter_prices: RowPrices

    def is_near(self, other: _Circumstances) -> bool:
        """Whether a simulation of the one says what is fastest in the other."""
        return (
            _are_near(self.drafter_step, other.drafter_step, ratio=_SAME_RATIO)
            and _are_near(self.call, other.call, ratio=_SAME_CALL_RATIO, least=_SAME_CALL)
            and _are_near(self.rejected, other.rejected, ratio=_SAME_RATIO)
            and len(self.decays) == len(other.decays)
            and all(abs(one - it) <= 1 for one, it in zip(self.decays, other.decays, strict=True))
            and _cost_the_same(self.target_prices, other.target_prices)
            and _cost_the_same(self.drafter_prices, other.drafter_prices)
        )


def _are_near(one: float, other: float, *, ratio: float, least: float = 0.0) -> bool:
    low, high = sorted((one, other))
    return high <= max(ratio * low, least)


def _cost_the_same(one: RowPrices, other: RowPrices) -> bool:
    return one.shares_forwards == other.shares_forwards and all(
        _are_near(one.of(rows), other.of(rows), ratio=_SAME_PRICE_RATIO)
        or abs(one.of(rows) - other.of(rows)) <= _SAME_PRICE
        for rows in _PRICED_ROWS
    )


class SimulatedShapes(SimulationCache[ShapeCase, Times]):
    """The simulated times of methods, by the shape of their trees.

    Measurements that waver between two roundings, in any of a dozen numbers, would be another case
    at each request. So a case takes the numbers of an earlier one that they are near to, the same
    for all methods of a request, which are compared.
    """

    def __init__(self) -> None:
        super().__init__(simulated_times)
        # The ones used last come first; they never move, so that many small steps are a large one.
        self._circumstances: deque[_Circumstances] = deque(maxlen=_MOST_CIRCUMSTANCES)

    def of(
        self, options: Sequence[Option], measurements: Measurements, *, asked: Shape | None
    ) -> list[Option]:
        """Return the same options with the shapes that pay, once all of them were simulated.

        Until then, or where drafts come slower than verdicts, they stay what they are.

        Args:
            options: What there is to choose from.
            measurements: What is known.
            asked: The shape of trees, if it is not left open.
        """
        drafting = [option for option in options if option.method.drafts]
        if measurements.drafter_step_ns >= measurements.verification_ns:
            return list(options)
        shapes = _shapes(measurements, asked)
        known = {
            option.strategy: times
            for option in drafting
            if (times := self.get(self._steady(case_of(option, measurements, shapes=shapes))))
            is not None
        }
        if len(known) < len(drafting):
            return list(options)
        return [
            option
            if option.strategy not in known
            else _in_shape(
                option,
                known[option.strategy],
                unit_ns=_unit_ns(option, measurements, options=drafting, known=known),
                plain_ns=plain(measurements).token_ns,
                is_open=asked is None,
            )
            for option in options
        ]

    def _steady(self, case: ShapeCase) -> ShapeCase:
        """Return a case with the numbers of an earlier one, if they are near to its own."""
        own = _Circumstances(
            case.setting.drafter_step,
            case.setting.call,
            case.rejected,
            case.decays,
            case.target_prices,
            case.drafter_prices,
        )
        steady = next((it for it in self._circumstances if own.is_near(it)), own)
        if steady in self._circumstances:
            self._circumstances.remove(steady)
        self._circumstances.appendleft(steady)
        setting = replace(case.setting, drafter_step=steady.drafter_step, call=steady.call)
        return replace(
            case,
            setting=setting,
            rejected=steady.rejected,
            decays=steady.decays,
            target_prices=steady.target_prices,
            drafter_prices=steady.drafter_prices,
        )


def _shapes(measurements: Measurements, asked: Shape | None) -> tuple[Shape, ...]:
    if not measurements.knows_trees:
        return (CHAIN,)
    return OPEN_SHAPES if asked is None else tuple(dict.fromkeys((CHAIN, asked)))


def _unit_ns(
    option: Option,
    measurements: Measurements,
    *,
    options: Sequence[Option],
    known: Mapping[Strategy, Times],
) -> float:
    """Return what a part of a verification in the simulation stands for.

    A case is only near to what was measured; SI as a chain, of which the closed form is exact,
    tells how near. Where others wait for the same drafter, which is not simulated, each method's
    own forecast does.
    """
    yardstick = option
    if measurements.everybody == 1:
        yardstick = next((it for it in options if it.strategy is Strategy.SPECULATIVE), option)
    return yardstick.token_ns / known[yardstick.strategy][CHAIN]


def _in_shape(
    option: Option, times: Times, *, unit_ns: float, plain_ns: float, is_open: bool
) -> Option:
    shape = best_shape(times, plain_time=plain_ns / unit_ns) if is_open else [*times][-1]
    note = option.note
    if is_open and shape == CHAIN and len(times) > 1:
        gain = times[CHAIN] / min(time for other, time in times.items() if other != CHAIN)
        no_trees = f"{option.method.label}: trees do not pay, {gain:.2f} times as fast as chains"
        note = "; ".join(filter(None, (note, no_trees)))
    return replace(option, token_ns=round(times[shape] * unit_ns), shape=shape, note=note)


def case_of(
    option: Option, measurements: Measurements, *, shapes: tuple[Shape, ...] = OPEN_SHAPES
) -> ShapeCase:
    """Return what the times depend on where a request is decoded like this."""
    return ShapeCase(
        strategy=option.strategy,
        lookahead=_rounded_lookahead(option.lookahead),
        setting=setting_of(measurements, option.target_count),
        rejected=rounded(1 - measurements.acceptance_rate, 4),
        decays=tuple(round(10 * decay) for decay in measurements.rank_decays[: _WIDEST - 1]),
        target_prices=_rounded(measurements.target_prices),
        drafter_prices=_rounded(measurements.drafter_prices),
        targets_run_on=measurements.targets_run_on,
        drafter_runs_on=measurements.drafter_runs_on,
        tree_tokens=measurements.tree_tokens,
        tree_depth=measurements.tree_depth,
        drafts_ahead=option.drafts_ahead,
        shapes=shapes,
    )


def _rounded_lookahead(lookahead: int) -> int:
    if lookahead <= _EXACT_LOOKAHEADS:
        return lookahead
    steps = round(math.log(lookahead / _EXACT_LOOKAHEADS, _LOOKAHEAD_STEP))
    return min(round(_EXACT_LOOKAHEADS * _LOOKAHEAD_STEP**steps), MOST_LOOKAHEAD)


def best_shape(times: Times, *, plain_time: float) -> Shape:
    """Return the shape that pays: a chain where no tree is ahead of it and of plain decoding."""
    best, best_time = CHAIN, min(times[CHAIN], plain_time) / _LEAST_GAIN * _WORTHWHILE_GAIN
    for shape, time in times.items():
        if shape != CHAIN and time * _WORTHWHILE_GAIN <= best_time:
            best, best_time = shape, time
    return best


def simulated_times(case: ShapeCase, *, after_event: Callable[[], None] = let_others_run) -> Times:
    """Simulate a case with each of its shapes.

    Args:
        case: What to simulate.
        after_event: Called between events; may end it with an exception.

    Cost:
        Between 0.05 and some 3 seconds of computing.
    """
    return {shape: _token_time(case, shape, after_event=after_event) for shape in case.shapes}


def _token_time(case: ShapeCase, shape: Shape, *, after_event: Callable[[], None]) -> float:
    totals = (
        _total_time(case, shape, seed=seed, after_event=after_event) for seed in range(_REPEATS)
    )
    return sum(totals) / (_REPEATS * _TOKENS)


def _total_time(
    case: ShapeCase, shape: Shape, *, seed: int, after_event: Callable[[], None]
) -> float:
    oracle = AgreementOracle(
        1 - case.rejected / VERIFICATION,
        seed=seed,
        length=_TOKENS + 1,
        shares=shares_of([decay / 10 for decay in case.decays]),
    )
    task = DecodingTask(
        oracle.prompt(1),
        _TOKENS,
        lookahead=case.lookahead,
        width=shape.width,
        branches=shape.branches,
        tree_tokens=case.tree_tokens,
        tree_depth=case.tree_depth,
        drafts_ahead=case.drafts_ahead,
    )
    count = case.setting.target_count
    capacity = CapacityChanged(targets=tuple(range(count)), drafters=(0,))
    result = simulate(
        create_method(case.strategy, task, capacity=capacity),
        oracle,
        targets=[_target(case)] * count,
        drafters=[_drafter(case)],
        after_event=after_event,
    )
    return float(result.total_time)


def _target(case: ShapeCase) -> ServerLatency:
    """Return a target's latency; the setting's verification is one of a block of DSI."""
    call = case.setting.call
    step = (VERIFICATION - call) / case.target_prices.of(BLOCK_ROWS)
    return ServerLatency(
        step, step, call=call, price=case.target_prices.of, runs_on=case.targets_run_on
    )


def _drafter(case: ShapeCase) -> ServerLatency:
    setting, step = case.setting, case.setting.drafter_step
    return ServerLatency(
        step,
        step,
        call=setting.call,
        price=case.drafter_prices.of,
        runs_on=case.drafter_runs_on,
    )


def _rounded(prices: RowPrices) -> RowPrices:
    costs = ((rows, max(1.0, round(prices.of(rows), 1))) for rows in _PRICED_ROWS)
    return RowPrices(((1, 1.0), *costs))
