"""Whether token trees pay: by simulation, with rows at their price."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline_orchestrator.fleet.row_prices import RowPrices
from paceline_orchestrator.planning import widths
from paceline_orchestrator.planning.estimates import Measurements, Option
from paceline_orchestrator.planning.widths import NOT_YET, Trees, Widths, best_trees, case_of
from paceline_protocol.methods import Strategy
from paceline_protocol.tree_shapes import CHAIN, Shape

VICUNA = Measurements(
    target_step_ns=37_700_000,
    target_first_ns=37_700_000,
    drafter_step_ns=2_500_000,
    acceptance_rate=0.63,
    target_count=1,
    rank_decays=(0.4,) * 15,
    tree_tokens=64,
    tree_depth=64,
)
DEAR = RowPrices(((1, 1.0), (33, 2.9)))


def a_case(**changes):
    return case_of(Option(Strategy.SPECULATIVE, 4, 1, 1), replace(VICUNA, **changes))


def test_where_rows_are_free_the_widest_trees_gain_most():
    trees = best_trees(a_case())
    assert trees.shape == Shape(4, 3)
    assert trees.gain == pytest.approx(1.4, abs=0.15)


@pytest.mark.parametrize(
    "changes",
    [
        {"target_prices": DEAR},
        {"rank_decays": (0.0,) * 15},
        {"acceptance_rate": 0.98},
    ],
    ids=["dear rows", "no hits", "nothing to correct"],
)
def test_where_trees_do_not_pay_a_chain_is_the_best(changes):
    trees = best_trees(a_case(**changes))
    assert trees.shape == CHAIN
    assert trees.gain < 1.05


def test_rows_at_a_price_make_trees_narrower_before_they_make_them_chains():
    mostly_second = {"rank_decays": (0.9, *(0.1,) * 14), "acceptance_rate": 0.5}
    assert best_trees(a_case(target_prices=DEAR, **mostly_second)).shape == Shape(2)


def test_branches_that_are_dear_to_the_drafter_are_left_out():
    dear_branches = RowPrices(((1, 1.0), (4, 9.0)))
    assert best_trees(a_case(drafter_prices=dear_branches)).shape == Shape(4)


def test_similar_measurements_share_a_case():
    near = a_case(acceptance_rate=0.64, rank_decays=(0.41,) * 15, drafter_step_ns=2_550_000)
    assert a_case() == near
    assert a_case() != a_case(acceptance_rate=0.5)
    assert a_case() != a_case(rank_decays=(0.6,) * 15)
    assert a_case() != a_case(target_prices=DEAR)


def test_a_case_is_simulated_once_and_nothing_is_claimed_before(monkeypatch):
    simulated = []
    monkeypatch.setattr(
        widths, "best_trees", lambda it: simulated.append(it) or Trees(Shape(2), 1.2)
    )
    known = Widths()
    for _ in range(3):
        assert known.trees(a_case()) == NOT_YET
    for _ in range(2):
        known.simulate_missing()
        assert known.trees(a_case()) == Trees(Shape(2), 1.2)
    assert simulated == [a_case()]
