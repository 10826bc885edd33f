"""The DSI paper's offline experiment (Figures 2 and 7): who is faster where, over a grid.

What is charged: forwards, one after the other or at the same time as the protocol has it, and
nothing else. A forward of a model takes the same time whatever it works on, the prompt included;
messages, cancelling and the orchestrator take none; each model has hardware of its own; each draft
token is right with the acceptance rate, independently. Times are in target forwards.

Each cell has a few generations with drawn agreements, as in the paper, the same for SI and DSI, and
the exact expectation over all draws. Both rest on `recurrences`, hence on the protocol itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline_bench.protocol_runs import Setup, draw_agreements, mean_and_error
from paceline_bench.recurrences import (
    distributed_time,
    expected_distributed_times,
    expected_speculative_forwards,
    run_lengths,
    scheduled_stretches,
    speculative_time,
    stretches,
)
from paceline_orchestrator.planning.equation import smallest_lookahead
from paceline_protocol.laboratory.simulation import ServerLatency
from paceline_protocol.methods import Strategy
from paceline_protocol.task import DispatchPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from paceline_bench.recurrences import Stretches

_TARGET = 100  # a target forward, so that a per cent of it is an integer
_MAX_LOOKAHEAD = 200
_ROUNDING = 1e-9  # of expectations


@dataclass(frozen=True, slots=True)
class Grid:
    """The cells, in per cent.

    Attributes:
        drafter_percents: The drafter's latency relative to the target's, in (0, 100].
        acceptance_percents: The acceptance rate, in [0, 100].
    """

    drafter_percents: tuple[int, ...]
    acceptance_percents: tuple[int, ...]

    @classmethod
    def coarse(cls) -> Grid:
        """Every five per cent: 21 x 21 cells."""
        return cls((1, *range(5, 101, 5)), tuple(range(0, 101, 5)))

    @classmethod
    def full(cls) -> Grid:
        """The paper's, every per cent: 100 x 101 cells."""
        return cls(tuple(range(1, 101)), tuple(range(101)))


@dataclass(frozen=True, slots=True)
class Experiment:
    """What is done in every cell.

    Attributes:
        token_count: Tokens of a generation.
        repeats: Generations.
        target_count: Targets of DSI: the SP degree.
        lookahead: Of SI and DSI; None for the best of each, in every cell.
        dispatch: When DSI's draft tokens go to a target. BLOCKS is the paper's, with the lookaheads
            that Equation 1 allows. The smallest is the best nearly everywhere, but not where
            almost every draft token is right: a text whose last block is short then waits for a
            target. WORK_CONSERVING is what Paceline serves; Equation 1 does not bind it.
    """

    token_count: int = 100
    repeats: int = 5
    target_count: int = 7
    lookahead: int | None = None
    dispatch: DispatchPolicy = DispatchPolicy.BLOCKS

    def speculative_lookaheads(self) -> tuple[int, ...]:
        """Return the lookaheads that SI may choose from."""
        return self._lookaheads(smallest=1)

    def distributed_lookaheads(self, drafter_percent: int) -> tuple[int, ...]:
        """Return the lookaheads that DSI may choose from; none if its own is not feasible."""
        feasible = smallest_lookahead(_TARGET, drafter_percent, target_count=self.target_count)
        if self.lookahead is not None and self.lookahead < feasible:
            return ()
        in_blocks = self.dispatch is DispatchPolicy.BLOCKS
        return self._lookaheads(smallest=feasible if in_blocks else 1)

    def _lookaheads(self, *, smallest: int) -> tuple[int, ...]:
        """Return all from the smallest on; beyond the text's drafts they are all the same."""
        if self.lookahead is not None:
            return (self.lookahead,)
        end = min(_MAX_LOOKAHEAD + 1, self.token_count)
        return tuple(range(smallest, max(smallest + 1, end)))


@dataclass(frozen=True, slots=True)
class Timing:
    """How long generations take, in target forwards.

    Attributes:
        lookahead: With which lookahead.
        mean: Of the repeats.
        error: The mean's standard error; 0 for a single repeat.
        expected: The exact expectation over all draws.
    """

    lookahead: int
    mean: float
    error: float
    expected: float


@dataclass(frozen=True, slots=True)
class Cell:
    """What one cell of the grid came to.

    Attributes:
        drafter_percent: See Grid.
        acceptance_percent: See Grid.
        non_si: Plain decoding's time, in target forwards: one for each token.
        si: SI's.
        dsi: DSI's.
        gain: How much DSI is ahead of the better of the two, generation by generation: the mean.
        gain_error: Its standard error.
    """

    drafter_percent: int
    acceptance_percent: int
    non_si: float
    si: Timing
    dsi: Timing
    gain: float
    gain_error: float

    @property
    def means(self) -> tuple[float, float, float]:
        """The repeats' mean times of non-SI, SI and DSI."""
        return self.non_si, self.si.mean, self.dsi.mean

    @property
    def expected(self) -> tuple[float, float, float]:
        """The expected times of non-SI, SI and DSI."""
        return self.non_si, self.si.expected, self.dsi.expected


@dataclass(frozen=True, slots=True)
class GridColumn:
    """The cells of one drafter latency, to be computed in one go.

    Attributes:
        experiment: What to do.
        drafter_percent: See Grid.
        acceptance_percents: See Grid.
        si_lookaheads: SI's lookahead in each cell.
        si_expected: SI's exact expectation there, in target forwards.
    """

    experiment: Experiment
    drafter_percent: int
    acceptance_percents: tuple[int, ...]
    si_lookaheads: tuple[int, ...]
    si_expected: tuple[float, ...]


def columns(experiment: Experiment, grid: Grid) -> list[GridColumn]:
    """Prepare the columns in which DSI is feasible; SI has the lookahead best in expectation."""
    rates = np.array(grid.acceptance_percents) / 100
    lookaheads = experiment.speculative_lookaheads()
    forwards = [
        expected_speculative_forwards(rates, lookahead=each, max_tokens=experiment.token_count)
        for each in lookaheads
    ]
    drafter = np.array([drafts for drafts, _ in forwards])
    target = np.array([rounds for _, rounds in forwards])
    prepared = []
    for percent in grid.drafter_percents:
        if not experiment.distributed_lookaheads(percent):
            continue
        times = drafter * percent / _TARGET + target
        prepared.append(
            GridColumn(
                experiment,
                percent,
                grid.acceptance_percents,
                si_lookaheads=tuple(lookaheads[index] for index in times.argmin(axis=0)),
                si_expected=tuple(map(float, times.min(axis=0))),
            )
        )
    return prepared


def fill_column(column: GridColumn) -> list[Cell]:
    """Compute the cells of a column, each with DSI's lookahead best in expectation: seconds.

    The lookaheads are compared by their schedules; what is said of the best is the protocol's.
    """
    rates = np.array(column.acceptance_percents) / 100
    best = _best_lookaheads(column, rates)
    tables = {
        lookahead: stretches(_setup(column, lookahead), max_tokens=column.experiment.token_count)
        for lookahead in sorted(set(best))
    }
    expected = {
        lookahead: expected_distributed_times(rates, table) / _TARGET
        for lookahead, table in tables.items()
    }
    return [
        _cell(
            column,
            index,
            dsi=_Option(lookahead, float(expected[lookahead][index])),
            stretches=tables[lookahead],
        )
        for index, lookahead in enumerate(best)
    ]


def _best_lookaheads(column: GridColumn, rates: NDArray[np.float64]) -> list[int]:
    """Choose DSI's lookahead for each rate: the smallest of those that are equally good."""
    experiment = column.experiment
    lookaheads = experiment.distributed_lookaheads(column.drafter_percent)
    expected = np.array(
        [
            expected_distributed_times(
                rates,
                scheduled_stretches(_setup(column, each), max_tokens=experiment.token_count),
            )
            for each in lookaheads
        ]
    )
    is_best = expected <= expected.min(axis=0) * (1 + _ROUNDING)
    return [lookaheads[index] for index in is_best.argmax(axis=0)]


@dataclass(frozen=True, slots=True)
class _Option:
    """A lookahead, and the time expected with it in target forwards."""

    lookahead: int
    expected: float

    def timing(self, times: Sequence[float]) -> Timing:
        return Timing(self.lookahead, *mean_and_error(times), self.expected)


def _setup(column: GridColumn, lookahead: int) -> Setup:
    return Setup(
        Strategy.DISTRIBUTED,
        ServerLatency(_TARGET, _TARGET),
        ServerLatency(column.drafter_percent, column.drafter_percent),
        lookahead=lookahead,
        target_count=column.experiment.target_count,
        dispatch=column.experiment.dispatch,
    )


def _cell(column: GridColumn, index: int, *, dsi: _Option, stretches: Stretches) -> Cell:
    draws = _draws(column, index)
    non_si = float(column.experiment.token_count)
    si = _Option(column.si_lookaheads[index], column.si_expected[index])
    si_times = [_speculative_time(runs, si.lookahead, column.drafter_percent) for runs in draws]
    dsi_times = [distributed_time(runs, stretches) / _TARGET for runs in draws]
    rivals = si_times if si.expected < non_si else [non_si] * len(draws)
    gain, gain_error = mean_and_error(
        [rival - own for rival, own in zip(rivals, dsi_times, strict=True)]
    )
    return Cell(
        column.drafter_percent,
        column.acceptance_percents[index],
        non_si=non_si,
        si=si.timing(si_times),
        dsi=dsi.timing(dsi_times),
        gain=gain,
        gain_error=gain_error,
    )


def _draws(column: GridColumn, index: int) -> list[list[int]]:
    """Draw the run lengths of each repeat; no two cells share a seed."""
    experiment, percent = column.experiment, column.acceptance_percents[index]
    first_seed = (column.drafter_percent * 101 + percent) * experiment.repeats
    return [
        run_lengths(draw_agreements(percent / 100, max_tokens=experiment.token_count, seed=seed))
        for seed in range(first_seed, first_seed + experiment.repeats)
    ]


def _speculative_time(runs: Sequence[int], lookahead: int, drafter_percent: int) -> float:
    time = speculative_time(
        runs, lookahead=lookahead, target_step=_TARGET, drafter_step=drafter_percent
    )
    return time / _TARGET
