import pytest

from paceline_bench.table2.grid import GridCell, describe_cell, grid_cells
from paceline_bench.table2.ideal import Plan
from paceline_bench.table2.online import Run
from paceline_protocol.methods import Strategy


def run(ms, *, lookahead=2, token_ids=(1, 2), quiet=True):
    return Run(
        prompt=(5,),
        token_ids=token_ids,
        plan=Plan(strategy=Strategy.SPECULATIVE, lookahead=lookahead, target_count=2),
        elapsed_ns=round(ms * 1e6),
        cpu_seconds=0.0,
        drafted_count=0,
        accepted_count=0,
        began_quietly=quiet,
    )


def result(cell, *, speculative=(20.0, 24.0), planned=(10.0, 24.0), **of_dsi):
    return describe_cell(
        cell,
        [run(30.0), run(32.0)],
        [run(ms) for ms in speculative],
        [run(ms, lookahead=3 - index, **of_dsi) for index, ms in enumerate(planned)],
    )


def rows_of(cells):
    return [row for cell in cells for row in result(cell)]


def over_better(rows):
    return rows[2]["over_better"]


def test_a_grid_goes_from_fast_drafters_to_one_as_slow_as_the_target():
    cells = grid_cells(5)

    assert len(set(cells)) == 25
    assert sorted({cell.drafter for cell in cells}) == [0.05, 0.106, 0.224, 0.473, 1.0]
    assert sorted({cell.acceptance_rate for cell in cells}) == [0, 0.25, 0.5, 0.75, 1]
    servers = GridCell(0.5, 0.75).servers(target_count=3)
    assert servers.drafter.step * 2 == servers.target.step == servers.target.first
    assert (servers.target_count, servers.acceptance_rate) == (3, 0.75)


@pytest.mark.parametrize(
    ("drafter", "acceptance_rate", "lookahead"), [(0.5, 0.0, 1), (0.05, 1.0, 20), (0.1, 0.8, 6)]
)
def test_si_gets_the_lookahead_that_is_best_in_expectation(drafter, acceptance_rate, lookahead):
    assert GridCell(drafter, acceptance_rate).variants[1].lookahead == lookahead


def test_dsi_is_compared_with_the_better_of_the_others():
    assert over_better(result(GridCell(0.1, 0.5))) == pytest.approx((0.5 + 1.0) / 2)
    slow_si = result(GridCell(0.1, 0.5), speculative=(60.0, 60.0))
    assert over_better(slow_si) == pytest.approx((10 / 30 + 24 / 32) / 2)


def test_a_cell_with_another_output_has_no_number():
    cells = grid_cells(2)
    rows = [*rows_of(cells[:3]), *result(cells[3], token_ids=(1, 3))]

    assert ["over_better" in row for row in rows] == [*(3 * [False, False, True]), *(3 * [False])]
    assert rows[2]["lookaheads"] == (2, 3)


def test_runs_that_began_on_a_busy_orchestrator_are_told():
    cells = grid_cells(2)
    rows = [*result(cells[0], quiet=False), *rows_of(cells[1:])]

    assert rows[0]["restless_runs"] == 2
