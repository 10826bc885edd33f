"""How a draft's tree grows: by worth, the chain first, nothing twice."""

from __future__ import annotations

import random

import pytest

from paceline_engine.terms.draft_tree import DraftTree


def test_runners_up_are_leaves_where_no_branch_is_followed():
    first = DraftTree().grown([[(7, 0.6), (8, 0.3)]])
    assert (first.found.token_ids, first.found.parents, first.due) == ((7, 8), (0, 0), (0,))
    second = first.grown([[(9, 0.5), (7, 0.4)]])
    assert second.news_since(first).token_ids == (9, 7)
    assert second.news_since(first).parents == (1, 1)
    assert (second.due, second.path_probabilities) == ((2,), pytest.approx((0.6, 0.3, 0.3, 0.24)))


def test_what_is_found_comes_in_the_order_of_worth_and_the_best_is_followed():
    first = DraftTree(branch_count=1).grown([[(1, 0.5), (2, 0.4), (3, 0.1)]])
    assert first.due == (0, 1)
    # The chain is unsure, so what follows on the runner-up is worth more than what is beside it.
    second = first.grown([[(4, 0.4), (5, 0.3)], [(6, 0.9), (7, 0.05)]])
    assert second.found.token_ids[3:] == (6, 4, 5, 7)
    assert second.found.parents[3:] == (2, 1, 1, 2)
    # The chain goes on with 4, and the most worth beside it has 6, below the runner-up.
    assert (second.followed, second.due) == ((0, 1), (4, 3))
    assert (second.rows.token_ids, second.rows.parents) == ((1, 2, 4, 6), (0, 0, 1, 2))


def test_what_cannot_be_is_not_followed():
    grown = DraftTree(branch_count=3).grown([[(1, 1.0), (2, 0.0), (3, 0.0)]])
    assert grown.due == (0,)


@pytest.mark.parametrize("seed", range(5))
def test_each_forward_follows_the_chain_and_the_worthiest_that_none_has_followed(seed):
    chance = random.Random(seed)
    branch_count, width = chance.randint(0, 5), chance.randint(2, 5)
    draft_tree, chain = DraftTree(branch_count), []
    for _ in range(12):
        ranked = []
        for _ in draft_tree.due or [None]:
            shares = sorted((chance.random() for _ in range(width)), reverse=True)
            tokens = chance.sample(range(100), width)
            ranked.append([(t, s / sum(shares)) for t, s in zip(tokens, shares, strict=True)])
        older, draft_tree = draft_tree, draft_tree.grown(ranked)
        chain.append(ranked[0][0][0])
        found = draft_tree.found
        assert all(parent <= place for place, parent in enumerate(found.parents))
        news = draft_tree.path_probabilities[len(older.path_probabilities) :]
        assert list(news) == sorted(news, reverse=True)
        tip, *others = draft_tree.due
        assert found.along(tuple(found.ancestors(tip))[::-1]) == tuple(chain)
        assert found.parents.index(found.parents[tip]) == tip
        open_ones = set(range(len(found))) - {*draft_tree.followed, tip}
        best = sorted(open_ones, key=lambda each: -draft_tree.path_probabilities[each])[
            :branch_count
        ]
        assert others == best
        assert len({*draft_tree.followed, *draft_tree.due}) == len(draft_tree.followed) + len(
            draft_tree.due
        )
        rows = draft_tree.rows
        for row, index in enumerate((*draft_tree.followed, *draft_tree.due)):
            own, all_of_it = (
                tree.along(tuple(tree.ancestors(place)))
                for tree, place in ((rows, row), (found, index))
            )
            assert own == all_of_it
