"""The token tree: facts about texts, in any order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from paceline_protocol.draft_statistics import DraftCounter, DraftStatistics
from paceline_protocol.tree import TokenTree

if TYPE_CHECKING:
    from paceline_protocol.node import Node


@pytest.fixture
def tree():
    return TokenTree(5, length=3, counter=DraftCounter(DraftStatistics()))


def grow(tree: TokenTree, tip: Node, *token_ids: int, drafter: int = 0) -> list[Node]:
    nodes = []
    for token_id in token_ids:
        tip = tree.draft(tip, token_id, drafter=drafter, distribution=None)
        nodes.append(tip)
    return nodes


def tokens(nodes: list[Node]) -> list[int]:
    return [node.token_id for node in nodes]


def test_facts_are_committed_in_order_whatever_the_order_they_came_in(tree):
    a, b = grow(tree, tree.root, 10, 11)
    tree.decide(b, 12)
    tree.decide(a, 11)
    assert tree.advance() == []
    tree.decide(tree.root, 10)
    assert tokens(tree.advance()) == [10, 11, 12]
    assert tree.root.length == 6


def test_a_fact_buries_every_text_that_contradicts_it(tree):
    a, b, c = grow(tree, tree.root, 10, 11, 12)
    (rival,) = grow(tree, tree.root, 20, drafter=1)
    tree.decide(tree.root, 20)
    assert [node.alive for node in (a, b, c, rival)] == [False, False, False, True]
    assert tree.root.children == {20: rival}


def test_only_the_first_word_on_a_text_counts(tree):
    tree.decide(tree.root, 10)
    tree.decide(tree.root, 11)
    assert tokens(tree.advance()) == [10]


def test_facts_about_dead_texts_are_dropped(tree):
    (wrong,) = grow(tree, tree.root, 10)
    tree.decide(tree.root, 11)
    tree.decide(wrong, 12)
    assert wrong.children == {}


def test_the_main_path_follows_the_smallest_drafter(tree):
    grow(tree, tree.root, 20, 21, drafter=1)
    assert tokens(tree.main_path()) == [5, 20, 21]
    grow(tree, tree.root, 10, drafter=0)
    assert tokens(tree.main_path()) == [5, 10]


def test_the_main_path_follows_a_judged_token_whoever_drafted_it(tree):
    (judged,) = grow(tree, tree.root, 20, drafter=1)
    tree.root.dispatch.judged = judged
    grow(tree, tree.root, 10, drafter=0)
    assert tokens(tree.main_path()) == [5, 20]


def test_equal_tokens_share_a_node_that_belongs_to_the_smallest_drafter(tree):
    later = tree.draft(tree.root, 10, drafter=1, distribution="q")
    assert tree.draft(tree.root, 10, drafter=0, distribution="p") is later
    assert (later.draft.drafter, later.draft.distribution) == (0, "p")


def test_what_a_judged_token_was_drawn_from_is_fixed(tree):
    node = tree.draft(tree.root, 10, drafter=1, distribution="q")
    tree.root.dispatch.judged = node
    tree.draft(tree.root, 10, drafter=0, distribution="p")
    assert (node.draft.drafter, node.draft.distribution) == (1, "q")


def test_a_pruned_drafter_goes_on_where_its_chain_survives(tree):
    a, _, c = grow(tree, tree.root, 10, 11, 12)
    tree.decide(a, 99)
    assert tokens(tree.path_to(tree.surviving(c))) == [5, 10, 99]
    tree.decide(tree.root, 98)
    tree.advance()
    assert tree.surviving(c) is tree.root


def test_what_two_texts_share_ends_at_their_last_common_node(tree):
    a, b = grow(tree, tree.root, 10, 11)
    (c,) = grow(tree, a, 20, drafter=1)
    before = tree.root
    assert tree.last_common(b, c) is a
    assert tree.last_common(c, c) is c
    tree.decide(tree.root, 30)
    tree.advance()
    assert tree.last_common(b, tree.root) is before
    assert tree.last_common(tree.root, tree.root) is tree.root


def test_what_is_left_at_the_end_counts_as_discarded():
    counts = DraftStatistics()
    tree = TokenTree(5, length=1, counter=DraftCounter(counts))
    grow(tree, tree.root, 10, 11, 12)
    grow(tree, tree.root, 10, 20, drafter=1)
    tree.decide(tree.root, 10)
    tree.advance()
    tree.discard()
    assert counts.drafted == 5
    assert counts.discarded == 4  # a twin, and three that nobody judged


def test_a_branch_that_a_chain_meets_takes_its_decided_token_along(tree):
    """Otherwise the main path would end before it, and the text be asked there again and again."""
    tip, _ = grow(tree, tree.root, 10, 11)
    branch = tree.branch(tree.root, 20, drafter=0, rank=2, rate=0.5)
    beyond = tree.branch(branch, 21, drafter=0, rank=2, rate=0.5)
    tree.decide(branch, 21)
    assert beyond.draft.is_branch
    grow(tree, tree.root, 20, drafter=1)
    assert not beyond.draft.is_branch
    tree.decide(tree.root, 20)
    assert tokens(tree.main_path()) == [5, 20, 21]
    assert not tip.alive
