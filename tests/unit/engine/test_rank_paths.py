from __future__ import annotations

from itertools import product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paceline_contract.proposal import Proposal
from paceline_engine.terms.rank_paths import (
    cartesian_tree,
    check_tree,
    likeliest_tree,
    propose,
    prune_by_threshold,
)

RATES = st.lists(
    st.lists(st.floats(0, 1, allow_subnormal=False), min_size=1, max_size=3), min_size=1, max_size=3
)


@st.composite
def parents_and_probabilities(draw):
    count = draw(st.integers(0, 12))
    parents = [draw(st.integers(0, index)) for index in range(count)]
    return parents, [draw(st.floats(0, 1)) for _ in range(count)]


@pytest.mark.parametrize(
    ("reach", "width", "nodes"), [(4, 1, 5), (3, 2, 15), (3, 3, 40), (3, 4, 85), (4, 3, 121)]
)
def test_the_full_tree_has_as_many_nodes_as_the_paper_says(reach, width, nodes):
    paths = cartesian_tree((width,) * reach)
    assert len(paths) + 1 == nodes  # the root is decided already
    check_tree(paths, reach=reach, most_ranks=width)


def test_widths_may_differ_by_depth():
    assert cartesian_tree((2, 1)) == ((0,), (1,), (0, 0), (1, 0))


@given(RATES, st.integers(0, 20))
@example([[0.5, 0.4], [0.45]], 2)
def test_the_likeliest_tree_is_one_and_no_other_of_its_size_is_likelier(rates, node_count):
    def worth(path):
        total = 1.0
        for depth, rank in enumerate(path):
            total *= rates[depth][rank]
        return total

    paths = likeliest_tree(rates, node_count=node_count)
    check_tree(paths, reach=len(rates), most_ranks=3)
    # A child is never likelier than its parent, so the largest worths of all make a tree.
    possible = [
        worth(path)
        for depth in range(1, len(rates) + 1)
        for path in product(*(range(len(each)) for each in rates[:depth]))
    ]
    best = sorted(filter(None, possible), reverse=True)[:node_count]
    assert sum(map(worth, paths)) == pytest.approx(sum(best))
    assert len(paths) <= node_count


@pytest.mark.parametrize(
    ("paths", "complaint"),
    [
        ([(0, 0)], "before its parent"),
        ([(0,), (0,)], "twice"),
        ([()], "not up to 2"),
        ([(0,), (0, 0), (0, 0, 0)], "not up to 2"),
        ([(3,)], r"in \[0, 3\)"),
        ([(-1,)], r"in \[0, 3\)"),
    ],
)
def test_what_is_no_tree_is_refused(paths, complaint):
    with pytest.raises(ValueError, match=complaint):
        check_tree(paths, reach=2, most_ranks=3)


def test_a_proposal_has_the_same_guesses_under_every_parent():
    proposal = propose(cartesian_tree((2, 2)), [[7, 8], [5, 6]])
    assert proposal == Proposal((7, 8, 5, 6, 5, 6), (0, 0, 1, 1, 2, 2))


def test_nodes_without_a_guess_are_left_out_with_what_hangs_on_them():
    paths = ((0,), (1,), (0, 0), (1, 0), (0, 0, 0))
    assert propose(paths, [[7], [5, 6]]) == Proposal((7, 5), (0, 1))


@given(parents_and_probabilities(), st.floats(0, 1.5))
def test_pruning_keeps_only_nodes_whose_parents_it_keeps(tree, threshold):
    parents, probabilities = tree
    kept = prune_by_threshold(parents, probabilities, threshold=threshold)
    assert list(kept) == sorted(set(kept))
    for index in range(len(parents)):
        above = parents[index] == 0 or parents[index] - 1 in kept
        assert (index in kept) == (above and probabilities[index] >= threshold)
