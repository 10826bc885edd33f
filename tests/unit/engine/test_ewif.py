from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_engine.stack_backend.ewif import (
    best_rate,
    chain_factor,
    choose_matrix,
    repeated_factor,
    vertical_factor,
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
def test_one_drafter_has_a_closed_form(acceptance, cost, count):
    closed = repeated_factor(acceptance, token_count=count, cost=cost)
    assert closed == pytest.approx(factor([(acceptance, cost, count)]))


def test_the_closed_form_gives_leviathans_number():
    assert repeated_factor(0.73, token_count=5, cost=0.04) == pytest.approx(2.619, abs=5e-4)
    assert repeated_factor(1, token_count=4, cost=0.25) == 2.5


@given(shares, shares, costs, costs, st.floats(0, 1))
def test_a_mixture_of_two_drafters_is_never_better_than_both(one, other, cost, dear, part):
    """Lemma B.1, for one token."""
    mixed = chain_factor([part * one + (1 - part) * other], costs=[part * cost + (1 - part) * dear])
    best = max(chain_factor([one], costs=[cost]), chain_factor([other], costs=[dear]))
    assert mixed <= best + 1e-9


@pytest.mark.parametrize(
    ("acceptance", "inner", "count", "reviews", "cost", "inner_cost", "expected"),
    [
        (0.73, 0.6, 10, 5, 0.04, 0, 3.0011),
        (0.65, 0.6, 10, 8, 0.02, 0, 2.4613),
        (0.8, 0.3, 4, 3, 0.04, 0.01, 2.7406),
    ],
)
def test_the_vertical_formula_gives_known_values(
    acceptance, inner, count, reviews, cost, inner_cost, expected
):
    assert vertical_factor(
        acceptance,
        inner_acceptance=inner,
        inner_count=count,
        review_count=reviews,
        cost=cost,
        inner_cost=inner_cost,
    ) == pytest.approx(expected, abs=5e-5)


def test_the_vertical_formula_is_what_a_simulation_gives():
    """20,000 runs: the mean's deviation is below 0.02, so 0.1 misses once in a million times."""
    chance = random.Random(1)
    acceptance, inner, count, reviews, cost = 0.8, 0.5, 6, 3, 0.05
    total = 0
    for _ in range(20_000):
        drafted = sum(1 + run_length(chance, inner, most=count) for _ in range(reviews))
        total += 1 + run_length(chance, acceptance, most=drafted)
    simulated = total / 20_000 / (1 + reviews * cost)
    formula = vertical_factor(
        acceptance,
        inner_acceptance=inner,
        inner_count=count,
        review_count=reviews,
        cost=cost,
        inner_cost=0,
    )
    assert formula == pytest.approx(simulated, abs=0.1)


def run_length(chance: random.Random, share: float, *, most: int) -> int:
    length = 0
    while length < most and chance.random() < share:
        length += 1
    return length


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
