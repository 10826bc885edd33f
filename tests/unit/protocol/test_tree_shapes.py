"""What trees are worth to SI by formulas."""

from __future__ import annotations

from functools import cache

import pytest

from paceline_protocol.laboratory.tree_shapes import drafted_worths, speculative_speed
from paceline_protocol.ranks import LLAMA_SHARES, hit_rates, runner_up_shares

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
    ("drafter", "rate", "speed"),
    [
        pytest.param(0.07, 0.63, 1.92, id="vicuna-13b"),
        pytest.param(0.33, 0.93, 1.91, id="starcoder"),
        pytest.param(0.65, 0.95, 1.25, id="phi3"),
    ],
)
def test_known_speeds(drafter, rate, speed):
    """Worked out by hand from rounded latencies, hence within 4 %."""
    assert speculative_speed(drafter, (rate,))[0] == pytest.approx(speed, rel=0.04)
