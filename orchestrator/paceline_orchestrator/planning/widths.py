"""Whether token trees pay, and of which shape: what the virtual clock says, with rows at a price.

A tree saves a forward where a rejected token's correction is in it, and costs rows in every one,
at targets and at drafters. Which counts for more depends on how often runners-up are right and on
what the servers measured of their rows, so the method itself is simulated with both: as a chain,
and with trees of some shapes, on the same draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline_orchestrator.fleet.row_prices import RowPrices
from paceline_orchestrator.planning.estimates import BLOCK_ROWS
from paceline_orchestrator.planning.rehearsal import VERIFICATION, let_others_run, setting_of
from paceline_orchestrator.planning.simulated import Simulated
from paceline_protocol.messages import CapacityChanged
from paceline_protocol.methods import create_method
from paceline_protocol.oracles import AgreementOracle
from paceline_protocol.ranks import shares_of
from paceline_protocol.simulation import ServerLatency, simulate
from paceline_protocol.task import DecodingTask
from paceline_protocol.tree_shapes import CHAIN, Shape

if TYPE_CHECKING:
    from paceline_orchestrator.planning.estimates import Measurements, Option
    from paceline_orchestrator.planning.rehearsal import Setting
    from paceline_protocol.methods import Strategy

__all__ = ["NOT_YET", "TreeCase", "Trees", "Widths", "best_trees", "case_of"]

_SHAPES = (Shape(2), Shape(4), Shape(4, 3))
# What a larger tree has to gain over a smaller one; a tree over a chain more, since what is around
# forwards (messages, this process's own work) grows with them, too, and is not simulated.
_WORTHWHILE_GAIN = 1.02
_LEAST_GAIN = 1.05
# Few are enough where all shapes meet the same draws.
_TOKENS = 60
_REPEATS = 4
# Rows whose price is told apart.
_PRICED_ROWS = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class TreeCase:
    """What the worth of trees depends on, rounded so that similar measurements share it.

    Attributes:
        strategy: The method.
        lookahead: Draft tokens in a verification.
        setting: The servers.
        acceptance_percent: How many of 100 draft tokens the target accepts.
        decays: In tenths, how often each runner-up is right where all before it are wrong.
        target_prices: Of a target's rows.
        drafter_prices: Of the drafter's.
        tree_tokens: See DecodingTask; tree_depth and drafts_ahead likewise.
    """

    strategy: Strategy
    lookahead: int
    setting: Setting
    acceptance_percent: int
    decays: tuple[int, ...]
    target_prices: RowPrices
    drafter_prices: RowPrices
    tree_tokens: int
    tree_depth: int
    drafts_ahead: bool = False


@dataclass(frozen=True, slots=True)
class Trees:
    """What trees are worth.

    Attributes:
        shape: The best that was tried; a chain where none pays, or nothing was simulated yet.
        gain: How many times as fast as a chain the best tree is, if that was simulated.
    """

    shape: Shape
    gain: float | None


NOT_YET = Trees(CHAIN, None)


class Widths(Simulated[TreeCase, Trees]):
    """What is known of trees."""

    def __init__(self) -> None:
        super().__init__(best_trees)

    def trees(self, case: TreeCase) -> Trees:
        """Return what is known of a case; what is not will be simulated."""
        return self.get(case) or NOT_YET


def case_of(option: Option, measurements: Measurements) -> TreeCase:
    """Return what the worth of trees depends on where a request is decoded like this."""
    widest = max(shape.width for shape in _SHAPES)
    return TreeCase(
        strategy=option.strategy,
        lookahead=option.lookahead,
        setting=setting_of(measurements, option.target_count),
        acceptance_percent=5 * round(20 * measurements.acceptance_rate),
        decays=tuple(round(10 * decay) for decay in measurements.rank_decays[: widest - 1]),
        target_prices=_rounded(measurements.target_prices),
        drafter_prices=_rounded(measurements.drafter_prices),
        tree_tokens=measurements.tree_tokens,
        tree_depth=measurements.tree_depth,
        drafts_ahead=option.drafts_ahead,
    )


def best_trees(case: TreeCase) -> Trees:
    """Simulate a case as a chain and with each shape, and return what pays.

    Cost:
        Between 0.2 and some 3 seconds of computing.
    """
    chain_time = _total_time(case, CHAIN)
    best, best_time = CHAIN, chain_time / _LEAST_GAIN * _WORTHWHILE_GAIN
    least = float("inf")
    for shape in _SHAPES:
        tree_time = _total_time(case, shape)
        least = min(least, tree_time)
        if tree_time * _WORTHWHILE_GAIN <= best_time:
            best, best_time = shape, tree_time
    return Trees(best, chain_time / (least if best is CHAIN else best_time))


def _total_time(case: TreeCase, shape: Shape) -> float:
    return sum(_time(case, shape, seed=seed) for seed in range(_REPEATS))


def _time(case: TreeCase, shape: Shape, *, seed: int) -> float:
    oracle = AgreementOracle(
        case.acceptance_percent / 100,
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
        after_event=let_others_run,
    )
    return float(result.total_time)


def _target(case: TreeCase) -> ServerLatency:
    """Return a target's latency; the setting's verification is one of a block of DSI."""
    call = case.setting.call
    step = (VERIFICATION - call) / case.target_prices.of(BLOCK_ROWS)
    return ServerLatency(step, step, call=call, price=case.target_prices.of)


def _drafter(case: TreeCase) -> ServerLatency:
    step = case.setting.drafter_step
    return ServerLatency(step, step, call=case.setting.call, price=case.drafter_prices.of)


def _rounded(prices: RowPrices) -> RowPrices:
    costs = ((rows, max(1.0, round(prices.of(rows), 1))) for rows in _PRICED_ROWS)
    return RowPrices(((1, 1.0), *costs))
