from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_engine.stack_backend.ewif import (
    best_rate,
    chain_factor,
    choose_matrix,
)

SMALL, BASE = 0.0069, 0.022
shares = st.floats(0, 0.99)
costs = st.floats(0, 1)

# Table 1 of the paper; the acceptances are Leviathan's at temperature 0.
TABLE_1 = [
    ([(0.65, SMALL, 9)], 2.65),
    ([(0.73, BASE, 8)], 2.96),
    ([(0.73, BASE, 5), (0.65, SMALL, 3)], 3.03),
    ([(0.75, SMALL, 12)], 3.61),
    ([(0.80, BASE, 11)], 3.75),
    ([(0.80, BASE, 5), (0.75, SMALL, 8)], 3.93),
]


def factor(drafts):
    return chain_factor(
        [a for a, _, count in drafts for _ in range(count)],
        costs=[c for _, c, count in drafts for _ in range(count)],
    )


@pytest.mark.parametrize(("drafts", "published"), TABLE_1)
def test_the_papers_table_1_comes_out(drafts, published):
    assert f"{factor(drafts):.2f}" == f"{published:.2f}"


def test_the_better_drafter_comes_first():
    assert factor([(0.65, SMALL, 3), (0.73, BASE, 5)]) == pytest.approx(2.596, abs=5e-4)
    assert factor([(0.75, SMALL, 8), (0.80, BASE, 5)]) == pytest.approx(3.406, abs=5e-4)


@given(shares, costs, st.integers(0, 20))
def test_one_drafter_has_leviathans_closed_form(acceptance, cost, count):
    accepted = (1 - acceptance ** (count + 1)) / (1 - acceptance)
    expected = pytest.approx(accepted / (count * cost + 1))
    assert factor([(acceptance, cost, count)]) == expected


@dataclass
class Numbers:
    costs: list[float]
    acceptances: dict[tuple[int, int], float]
    row_cost: float = 0.0
    stage_count: int = 2

    @property
    def model_count(self):
        return len(self.costs)

    def cost_ns(self, stage, row_count):
        return self.costs[stage] * (1 + self.row_cost * (row_count - 1))

    def acceptance(self, reviewer, drafter):
        return self.acceptances[reviewer, drafter]


def test_what_costs_nothing_is_asked_for_as_much_as_can_be():
    numbers = Numbers([100.0], {(0, 1): 0.5})
    assert choose_matrix(numbers) == ((1, 0), (0, 16))
    # Two tokens in each forward of 100 ns.
    assert best_rate(numbers) == pytest.approx(0.02, abs=1e-5)
    assert best_rate(Numbers([100.0], {(0, 1): 0.0})) == 0.01


def test_what_is_never_right_is_not_asked():
    numbers = Numbers([100.0], {(0, 1): 0.0}, row_cost=0.05)
    assert choose_matrix(numbers) == ((1, 0), (0, 0))


def test_rows_that_cost_more_than_they_bring_are_left_out():
    few = choose_matrix(Numbers([100.0], {(0, 1): 0.5}, row_cost=0.2))[1][1]
    many = choose_matrix(Numbers([100.0], {(0, 1): 0.9}, row_cost=0.2))[1][1]
    assert 0 < few < many


def test_a_model_as_slow_as_the_one_above_drafts_nothing_for_it():
    acceptances = {(0, 1): 0.7, (0, 2): 0.0, (1, 2): 0.0}
    matrix = choose_matrix(Numbers([100.0, 100.0], acceptances, row_cost=0.01, stage_count=3))
    assert matrix == ((1, 0, 0), (0, 0, 0), (0, 0, 0))
    quick = choose_matrix(Numbers([100.0, 10.0], acceptances, row_cost=0.01, stage_count=3))
    assert quick[1][1] > 0


def test_a_single_model_has_a_matrix_too():
    assert choose_matrix(Numbers([100.0], {}, stage_count=1)) == ((1,),)
