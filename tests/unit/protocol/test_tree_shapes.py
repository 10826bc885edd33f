"""What trees are worth by formulas, and that the greedy tree is the best there is."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline_protocol.laboratory.tree_shapes import (
    best_tree,
    branching_speed,
    distributed_speed,
    drafted_worths,
    leaves_speed,
    path_worth,
    speculative_speed,
)
from paceline_protocol.ranks import LLAMA_SHARES, hit_rates, hit_share, runner_up_shares

SHARES = runner_up_shares(0.4)


def best_worth(rates, *, node_count, depth):
    """Sequoia's dynamic programme: how the tokens below a place are best given to its children.

    A child of rank r with n tokens in its subtree is worth rates[r] (1 + what is best below it with
    n - 1 tokens and one level less).
    """

    @cache
    def below(count, levels, rank):
        if not count or not levels or rank == len(rates):
            return 0.0
        return max(
            (rates[rank] * (1 + below(own - 1, levels - 1, 0)) if own else 0.0)
            + below(count - own, levels, rank + 1)
            for own in range(count + 1)
        )

    return below(node_count, depth, 0)


@settings(max_examples=80, deadline=None)
@given(
    weights=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    node_count=st.integers(0, 14),
    depth=st.integers(1, 5),
)
def test_the_greedy_tree_is_as_good_as_that_of_the_dynamic_programme(weights, node_count, depth):
    rates = tuple(sorted((each / (sum(weights) + 1) for each in weights), reverse=True))
    tree = best_tree(rates, node_count=node_count, depth=depth)
    assert len(set(tree)) == len(tree) <= node_count
    assert all(len(path) <= depth for path in tree)
    assert all(not path[:-1] or path[:-1] in tree for path in tree)
    worth = sum(path_worth(path, rates) for path in tree)
    assert worth == pytest.approx(best_worth(rates, node_count=node_count, depth=depth))


@pytest.mark.parametrize("shares", [SHARES, LLAMA_SHARES])
def test_no_draft_tree_is_better_than_the_best_tree_of_its_size(shares):
    """It follows the chain in each forward, whatever else is likelier: that costs little here."""
    rates = hit_rates(0.63, shares=shares, width=4)
    for forwards, worth in enumerate(drafted_worths(rates, branch_count=3, forward_count=6), 1):
        size = 4 * (1 + 4 * (forwards - 1))
        best = best_worth(rates, node_count=size, depth=forwards)
        assert 0.85 * best < worth <= best + 1e-9


def test_a_chain_is_worth_the_sum_of_the_powers_of_the_acceptance_rate():
    assert drafted_worths((0.6,), branch_count=0, forward_count=3) == pytest.approx(
        [0.6, 0.6 + 0.36, 0.6 + 0.36 + 0.216]
    )
    # Alternatives as leaves: each place that the chain reaches has its runners-up.
    assert drafted_worths((0.6, 0.2), branch_count=0, forward_count=2) == pytest.approx(
        [0.8, 0.8 + 0.6 * 0.8]
    )


@pytest.mark.parametrize(
    ("drafter", "rate", "si", "dsi", "tree"),
    [
        pytest.param(0.07, 0.63, 1.92, 2.43, (3.25, 4.18, 5.34), id="vicuna-13b"),
        pytest.param(0.33, 0.93, 1.91, 2.65, (2.76, 2.83, 2.89), id="starcoder"),
        pytest.param(0.65, 0.95, 1.25, 1.49, (1.50, 1.51, 1.52), id="phi3"),
    ],
)
def test_known_speeds(drafter, rate, si, dsi, tree):
    """Worked out by hand from rounded latencies, hence within 4 %; h is 0.3, 0.5 and 0.65."""
    assert speculative_speed(drafter, (rate,))[0] == pytest.approx(si, rel=0.04)
    assert distributed_speed(drafter, rate) == pytest.approx(dsi, rel=0.04)
    bounds = [branching_speed(drafter, rate, hit_share=h) for h in (0.3, 0.5, 0.65)]
    assert bounds == pytest.approx(tree, rel=0.04)


def test_leaves_bring_a_token_for_each_hit_and_branches_more():
    """With h = 0.784, a hit is 0.29 of a token for each rejection at an acceptance of 0.63."""
    h = hit_share(SHARES, 5)
    plain = distributed_speed(0.066, 0.63)
    leaves = leaves_speed(0.066, 0.63, hit_share=h)
    assert leaves / plain == pytest.approx(1 + 0.37 * (1 - 0.6**4))
    assert branching_speed(0.066, 0.63, hit_share=h) > leaves
    assert leaves_speed(0.066, 0.63, hit_share=0) == plain
