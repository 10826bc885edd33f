"""Which branches are worth a target's rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline_protocol.branches import BranchQueue, branches_beside
from paceline_protocol.commitment import Commitment
from paceline_protocol.draft_statistics import DraftCounter, DraftStatistics
from paceline_protocol.task import DecodingTask
from paceline_protocol.tree import TokenTree

TASK = DecodingTask((1,), 99, width=3)


def rate(rank, ranks=()):
    commitment = Commitment(TASK)
    commitment.statistics.ranks.update(dict(ranks))
    return commitment.hit_rate(rank)


@pytest.fixture
def tree():
    """A chain of 10 11, with 20 30 beside 10, 21 beside 11, and 25 after 20."""
    tree = TokenTree(5, length=1, counter=DraftCounter(DraftStatistics()))
    ten = tree.draft(tree.root, 10, drafter=0, distribution=None, rate=rate(1))
    twenty = branch(tree, tree.root, 20, rank=2)
    branch(tree, tree.root, 30, rank=3)
    tree.draft(ten, 11, drafter=0, distribution=None, rate=rate(1))
    branch(tree, ten, 21, rank=2)
    branch(tree, twenty, 25, rank=1)
    return tree


def branch(tree, parent, token_id, *, rank):
    return tree.branch(parent, token_id, drafter=0, rank=rank, rate=rate(rank))


def tokens(nodes):
    return [node.token_id for node in nodes]


def test_rates_fall_with_the_rank_and_follow_what_was_seen():
    assert rate(1) > rate(2) > rate(3)
    assert rate(2, {2: 80, 1: 20}) > rate(1, {2: 80, 1: 20}) > rate(3, {2: 80, 1: 20})
    assert sum(map(rate, range(1, 17))) < 1


def test_a_tree_begins_with_the_rates_that_are_known_and_nothing_is_hopeless():
    known = (0.1, 0.8, 0.0)
    commitment = Commitment(replace(TASK, hit_rates=known))
    assert commitment.hit_rate(2) == pytest.approx(0.8)
    assert commitment.hit_rate(3) > 0  # its worth is a logarithm
    commitment.statistics.ranks.update({1: 80})
    assert commitment.hit_rate(1) > 0.8 > 0.2 > commitment.hit_rate(2)


def test_a_tree_has_the_branches_of_the_largest_worth_each_after_its_parent(tree):
    # 20 has .12, 25 after it and 21 beside the second .7 * .12, and 30 has .072.
    chosen = branches_beside(tree.main_path(), task=TASK)
    assert tokens(chosen) in ([20, 21, 25, 30], [20, 25, 21, 30])
    few = branches_beside(tree.main_path(), task=replace(TASK, tree_tokens=3))
    assert tokens(few) == [20]


def test_a_tree_is_no_deeper_than_its_limit_and_a_longer_chain_stays_alone(tree):
    assert tokens(branches_beside(tree.main_path()[:2], task=replace(TASK, tree_depth=1))) == [
        20,
        30,
    ]
    assert branches_beside(tree.main_path(), task=replace(TASK, tree_depth=1)) == ()


def test_what_is_assigned_decided_or_dead_waits_no_longer(tree):
    queue = BranchQueue()
    nodes = {node.token_id: node for node in branches_beside(tree.main_path(), task=TASK)}
    queue.extend(nodes.values())
    nodes[20].dispatch.assigned = True
    tree.decide(nodes[25], 77)
    tree.decide(tree.main_path()[1], 11)  # 21 is dead
    assert tokens(iter(queue.pop, None)) == [30]


def test_what_is_over_is_forgotten_in_time(tree):
    queue = BranchQueue()
    for token_id in range(100, 500):
        branch(tree, tree.root, token_id, rank=2).dispatch.assigned = token_id < 490
        queue.extend([tree.root.children[token_id]])
    queue.forget_what_is_over()
    assert len(tokens(iter(queue.pop, None))) == 10


def test_a_rank_is_judged_where_it_is_known_that_the_text_comes_so_far():
    statistics = DraftStatistics()
    tree = TokenTree(5, length=1, counter=DraftCounter(statistics))
    tree.draft(tree.root, 10, drafter=0, distribution=None, rate=rate(1))
    twenty = branch(tree, tree.root, 20, rank=2)
    for rank, token_id in enumerate((25, 26, 27), 1):
        branch(tree, twenty, token_id, rank=rank)
    tree.decide(twenty, 26)
    assert not statistics.ranks, "the text may go on with 10"
    tree.decide(tree.root, 20)
    assert statistics.ranks == {2: 1}
