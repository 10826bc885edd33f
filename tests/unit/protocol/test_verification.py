"""Which block is due, and who decides a position."""

from __future__ import annotations

import pytest

from paceline_contract.calls import VerificationRule
from paceline_protocol.draft_statistics import DraftCounter, DraftStatistics
from paceline_protocol.node import Fact
from paceline_protocol.task import DecodingTask, DispatchPolicy
from paceline_protocol.tree import TokenTree
from paceline_protocol.verification import Verification, due_nodes, frontier_nodes

WORK_CONSERVING = DecodingTask((1,), 99, lookahead=3)
BLOCKS = DecodingTask((1,), 99, lookahead=3, dispatch=DispatchPolicy.BLOCKS)


def path_of(length: int, *, assigned: tuple[int, ...] = ()):
    """Make a drafted path: the root, then tokens 1 to length."""
    tree = TokenTree(0, length=1, counter=DraftCounter(DraftStatistics()))
    tip = tree.root
    for token_id in range(1, length + 1):
        tip = tree.draft(tip, token_id, drafter=0, distribution=None)
        tip.dispatch.assigned = token_id in assigned
    return tree.main_path()


def tokens(nodes):
    return [node.token_id for node in nodes]


def verification(nodes):
    return Verification(1, 0, tuple(nodes), kept=None, depth=0, warms_up=False)


@pytest.mark.parametrize("task", [WORK_CONSERVING, BLOCKS])
def test_fewer_than_lookahead_tokens_wait_while_the_draft_grows(task):
    assert tokens(due_nodes(path_of(2), task=task, growing=True)) == []
    assert tokens(due_nodes(path_of(2), task=task, growing=False)) == [0, 1, 2]
    assert tokens(due_nodes(path_of(3), task=task, growing=True)) == [0, 1, 2, 3]
    assert tokens(due_nodes(path_of(0), task=task, growing=False)) == []


def test_a_block_has_all_that_waits_or_exactly_lookahead():
    path = path_of(5, assigned=(1,))
    assert tokens(due_nodes(path, task=WORK_CONSERVING, growing=True)) == [1, 2, 3, 4, 5]
    assert tokens(due_nodes(path, task=BLOCKS, growing=True)) == [1, 2, 3, 4]


def test_a_gap_that_a_failure_left_cannot_grow_and_is_due():
    path = path_of(5, assigned=(1, 3, 4, 5))
    assert tokens(due_nodes(path, task=WORK_CONSERVING, growing=True)) == [1, 2]


def test_after_a_plain_forward_the_first_token_is_assumed_and_does_not_count():
    path = path_of(3)
    path[0].dispatch.plain = True
    assert tokens(due_nodes(path, task=WORK_CONSERVING, growing=True)) == []
    assert tokens(due_nodes(path, task=WORK_CONSERVING, growing=False)) == [1, 2, 3]


def test_a_block_ends_before_a_token_which_something_else_decides():
    """Else a position would be decided twice, by different coins: see can_judge."""
    path = path_of(4)
    path[2].dispatch.judged = path[2].child(77)
    assert tokens(due_nodes(path, task=WORK_CONSERVING, growing=True)) == [0, 1, 2]
    path[2].dispatch.judged, path[2].dispatch.plain = None, True
    assert tokens(due_nodes(path, task=WORK_CONSERVING, growing=True)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("task", "expected"), [(WORK_CONSERVING, [0, 1, 2]), (BLOCKS, [0])], ids=["all", "blocks"]
)
def test_the_frontier_does_not_wait(task, expected):
    assert tokens(frontier_nodes(path_of(2), task=task, growing=True)) == expected


def test_a_position_given_to_a_block_stays_with_it_at_the_frontier():
    path = path_of(1)
    path[0].dispatch.judged = path[1]
    assert tokens(frontier_nodes(path, task=BLOCKS, growing=True)) == [0, 1]


def test_a_position_given_to_a_plain_forward_stays_with_it_at_the_frontier():
    path = path_of(4)
    path[0].dispatch.plain = True
    assert tokens(frontier_nodes(path, task=WORK_CONSERVING, growing=True)) == [0]


def test_a_verification_decides_what_follows_its_nodes_unless_another_owns_it():
    path = path_of(3)
    first = verification(path[:3])
    assert [first.decides(node) for node in path] == [True, True, True, False]
    second = verification(path[2:])
    second.claim(rule=VerificationRule.REJECTION)
    assert [first.decides(node) for node in path] == [True, True, False, False]
    assert [second.decides(node) for node in path] == [False, False, True, True]


def test_a_released_block_waits_again_except_for_what_is_decided():
    path = path_of(3, assigned=(1, 2, 3))
    path[1].fact = Fact(2, None)
    verification(path).release()
    assert [node.dispatch.assigned for node in path[1:]] == [False, True, False]
