import random

import pytest

from paceline_bench.pair.acceptance import (
    Block,
    accepted_shares,
    common_run,
    run_rate,
    verdict_rate,
)


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [([], [], 0), ([1, 2], [1, 2], 2), ([1, 2, 3], [1, 9, 3], 1), ([1], [1, 2], 1), ([4], [5], 0)],
)
def test_a_common_run_ends_at_the_first_difference(left, right, expected):
    assert common_run(left, right) == expected


def test_the_papers_estimator_fits_a_geometric_distribution():
    assert run_rate([0, 0]) == 0
    assert run_rate([2, 4]) == 0.75
    assert run_rate([9]) == pytest.approx(0.9)


def test_the_papers_estimator_finds_the_rate_that_made_the_runs():
    # n = 4000 runs at rate 0.8: mean 4, standard deviation 4.47, so 0.071 of their mean. The
    # estimate is off by 0.02 where the mean is off by 0.45, 6.4 standard errors: p < 2e-10.
    coins = random.Random(5)

    def run():
        length = 0
        while coins.random() < 0.8:
            length += 1
        return length

    assert run_rate([run() for _ in range(4000)]) == pytest.approx(0.8, abs=0.02)


def test_verdicts_count_what_was_decided_and_no_more():
    # Of four all right, of four one right and one wrong, of two the first wrong.
    assert verdict_rate([Block(4, 4), Block(4, 1), Block(2, 0)]) == 5 / 7
    assert verdict_rate([]) == 0
    assert verdict_rate([Block(0, 0)]) == 0


def test_shares_by_position_are_of_the_blocks_that_are_long_enough():
    blocks = [Block(3, 3), Block(3, 1), Block(3, 0), Block(1, 1)]
    assert accepted_shares(blocks) == [3 / 4, 1 / 3, 1 / 3]
    assert accepted_shares([]) == []
