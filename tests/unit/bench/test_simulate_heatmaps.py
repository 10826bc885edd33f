"""The DSI paper's offline experiment: known cells, and what its claims and files say."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from paceline_bench.protocol_runs import Batch, Setup, time_batch
from paceline_bench.recurrences import expected_distributed_times, scheduled_stretches
from paceline_bench.simulate.claims import RATIOS, write_cells
from paceline_bench.simulate.heatmaps import Cell, Experiment, Grid, Timing, columns, fill_column
from paceline_protocol.laboratory.simulation import ServerLatency
from paceline_protocol.methods import Strategy
from paceline_protocol.task import DispatchPolicy

SMALL = Experiment(token_count=12, repeats=3)
SERVED = replace(SMALL, dispatch=DispatchPolicy.WORK_CONSERVING)


@cache
def cells_of(experiment: Experiment, grid: Grid) -> dict[tuple[int, int], Cell]:
    return {
        (cell.drafter_percent, cell.acceptance_percent): cell
        for column in columns(experiment, grid)
        for cell in fill_column(column)
    }


def cell(*, drafter: int, acceptance: int, si: float, dsi: float, gain_error: float = 0) -> Cell:
    return Cell(
        drafter,
        acceptance,
        non_si=100.0,
        si=Timing(2, si, 0.5, si),
        dsi=Timing(4, dsi, 0.5, dsi),
        gain=min(si, 100.0) - dsi,
        gain_error=gain_error,
    )


# --- known cells ------------------------------------------------------------------------------


def test_the_grids_are_those_of_the_paper_and_every_fifth_of_it():
    full, coarse = Grid.full(), Grid.coarse()
    assert (len(full.drafter_percents), len(full.acceptance_percents)) == (100, 101)
    assert set(coarse.drafter_percents) <= set(full.drafter_percents)
    assert (coarse.drafter_percents[0], coarse.drafter_percents[-1]) == (1, 100)
    assert (coarse.acceptance_percents[0], coarse.acceptance_percents[-1]) == (0, 100)


@pytest.mark.parametrize(
    ("drafter", "acceptance", "panel", "ratio"),
    [
        pytest.param(100, 0, "non-SI / SI", 100 / 199, id="the-drafter-doubles-a-round"),
        pytest.param(100, 0, "non-SI / DSI", 1, id="DSI-is-plain-decoding"),
        pytest.param(15, 90, "min(SI, non-SI) / DSI", 1.493, id="the-largest-gain"),
        pytest.param(1, 40, "SI / DSI", 0.9943, id="where-Equation-1-asks-for-15"),
    ],
)
def test_cells_have_the_ratios_of_an_independent_calculation(drafter, acceptance, panel, ratio):
    """100 tokens, exact expectations; the last two are from another code of these semantics."""
    grid = Grid((drafter,), (acceptance,))
    expected = cells_of(Experiment(), grid)[drafter, acceptance].expected
    assert RATIOS[panel](expected) == pytest.approx(ratio, abs=5e-4)


def test_a_cell_has_the_times_of_the_protocol_itself():
    """The draws of a cell are those of the seeds from (101 drafter + acceptance) repeats on."""
    found = cells_of(SMALL, Grid((8,), (70,)))[8, 70]
    seeds = range((101 * 8 + 70) * 3, (101 * 8 + 70) * 3 + 3)

    def mean(strategy: Strategy, lookahead: int) -> float:
        setup = Setup(
            strategy,
            ServerLatency(100, 100),
            ServerLatency(8, 8),
            lookahead=lookahead,
            target_count=7,
            dispatch=DispatchPolicy.BLOCKS,
        )
        return sum(time_batch(Batch(setup, 0.7, 12, seeds)).times) / 300

    assert found.dsi.lookahead == 2  # ceil(100 / (7 * 8))
    assert found.dsi.mean == pytest.approx(mean(Strategy.DISTRIBUTED, 2))
    assert found.si.mean == pytest.approx(mean(Strategy.SPECULATIVE, found.si.lookahead))
    assert found.non_si == 12
    assert found.gain == pytest.approx(found.si.mean - found.dsi.mean)
    assert found.si.error > 0


def test_si_has_the_lookahead_that_is_best_in_expectation():
    grid = Grid((10,), (80,))
    best = cells_of(SMALL, grid)[10, 80].si
    others = [cells_of(replace(SMALL, lookahead=each), grid)[10, 80].si for each in range(2, 12)]
    assert best.expected == pytest.approx(min(other.expected for other in others))


@pytest.mark.parametrize("dispatch", DispatchPolicy)
@pytest.mark.parametrize(
    ("drafter", "target_count", "token_count"),
    [pytest.param(1, 7, 100, marks=pytest.mark.long), (12, 2, 60), (40, 7, 30)],
)
def test_no_lookahead_is_better_than_the_one_dsi_has(drafter, target_count, token_count, dispatch):
    """All that there are: from Equation 1's smallest, or from 1, to all the text's drafts."""
    rates = (0, 40, 90, 99, 100)
    grid = Grid((drafter,), rates)
    experiment = Experiment(
        token_count=token_count, repeats=1, target_count=target_count, dispatch=dispatch
    )
    in_blocks = dispatch is DispatchPolicy.BLOCKS
    smallest = math.ceil(100 / (target_count * drafter)) if in_blocks else 1
    tables = [
        scheduled_stretches(
            Setup(
                Strategy.DISTRIBUTED,
                ServerLatency(100, 100),
                ServerLatency(drafter, drafter),
                lookahead=lookahead,
                target_count=target_count,
                dispatch=dispatch,
            ),
            max_tokens=token_count,
        )
        for lookahead in range(smallest, 201)
    ]
    expected = [expected_distributed_times(np.array(rates) / 100, each) for each in tables]
    found = [cells_of(experiment, grid)[drafter, rate].dsi for rate in rates]
    best = np.min(expected, axis=0) / 100
    assert [dsi.expected for dsi in found] == pytest.approx(best.tolist())


def test_the_smallest_feasible_lookahead_is_not_always_the_best():
    """99 drafts in blocks of 15: the last block, of 9, waits for the target of the first one."""
    in_blocks = cells_of(Experiment(), Grid((1,), (90, 100)))
    assert in_blocks[1, 90].dsi.lookahead == 15
    assert in_blocks[1, 100].dsi.lookahead > 15
    assert in_blocks[1, 100].dsi.expected == pytest.approx(in_blocks[1, 100].si.expected)


def test_columns_in_which_the_lookahead_is_not_feasible_are_left_out():
    """With lookahead 5 and 7 targets Equation 1 needs a drafter at 1 / 35 or more."""
    grid = Grid((1, 2, 3, 50), (0,))
    found = columns(replace(SMALL, lookahead=5), grid)
    assert [column.drafter_percent for column in found] == [3, 50]
    assert [column.drafter_percent for column in columns(SMALL, grid)] == [1, 2, 3, 50]


def test_as_served_dsi_may_have_a_shorter_lookahead_than_equation_1_allows():
    grid = Grid((1,), (40,))
    in_blocks, served = (cells_of(each, grid)[1, 40].dsi for each in (SMALL, SERVED))
    assert in_blocks.lookahead == 15
    assert served.lookahead < 15
    assert served.expected < in_blocks.expected


@pytest.mark.parametrize("experiment", [SMALL, SERVED], ids=["in-blocks", "as-served"])
def test_dsi_is_never_slower_than_plain_decoding_in_any_cell(experiment):
    found = cells_of(experiment, Grid((2, 30, 100), (0, 50, 95, 100)))
    assert all(each.dsi.expected <= each.non_si + 1e-9 for each in found.values())
    assert all(each.dsi.mean <= each.non_si + 1e-9 for each in found.values())


def test_si_is_slower_than_plain_decoding_just_where_it_is_right_too_seldom():
    found = cells_of(SMALL, Grid((20, 60), (0, 19, 21, 59, 61, 90)))
    slower = {place for place, each in found.items() if each.si.expected > each.non_si + 1e-9}
    assert slower == {(drafter, rate) for drafter, rate in found if rate < drafter}


# --- what is said of them ---------------------------------------------------------------------


def test_the_file_has_a_line_for_each_cell(tmp_path):
    path = tmp_path / "new" / "cells.csv"
    write_cells(path, [cell(drafter=1, acceptance=40, si=50.125, dsi=51)])
    with path.open() as file:
        (row,) = csv.DictReader(file)
    assert row["drafter_latency"] == "0.01"
    assert row["acceptance_rate"] == "0.40"
    assert (row["si_lookahead"], row["dsi_lookahead"]) == ("2", "4")
    assert (row["non_si"], row["si"], row["dsi_expected"]) == ("100", "50.125", "51")


# --- pictures ---------------------------------------------------------------------------------
