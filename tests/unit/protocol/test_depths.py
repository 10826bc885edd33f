"""How urgent verifications are, and that many targets do not make it dear to know."""

from __future__ import annotations

from paceline_protocol.depths import Depths
from paceline_protocol.draft_statistics import DraftCounter, DraftStatistics
from paceline_protocol.messages import CapacityChanged
from paceline_protocol.node import Node
from paceline_protocol.target_schedule import TargetSchedule
from paceline_protocol.task import DecodingTask
from paceline_protocol.tree import TokenTree
from paceline_protocol.verification import Verification

_TARGETS = 50
_TASK = DecodingTask((1,), 999, lookahead=1)


class CountedNode(Node):
    """A node that counts how often somebody asked for its parent."""

    asked = 0

    @property
    def parent(self):
        self.asked += 1
        return self._parent

    @parent.setter
    def parent(self, parent):
        self._parent = parent


def chain(length, make=Node):
    nodes = [make(0, parent=None, length=1)]
    for token_id in range(1, length + 1):
        nodes.append(make(token_id, parent=nodes[-1], length=nodes[-1].length + 1))
    return nodes


def test_a_depth_counts_the_ends_before_a_node_down_from_the_root():
    nodes = chain(6)
    depths = Depths({nodes[0], nodes[2], nodes[4]}, root_length=1)
    assert [depths.of(node) for node in reversed(nodes)] == [3, 3, 2, 2, 1, 1, 0]
    later_root = Depths({nodes[0], nodes[2], nodes[4]}, root_length=3)
    assert [later_root.of(node) for node in nodes[2:]] == [0, 1, 1, 2, 2]


def test_a_branch_comes_after_its_siblings():
    root, chained = chain(1)
    branch = Node(9, parent=root, length=2)
    branch.draft.is_branch = True
    depths = Depths({root}, root_length=1)
    assert (depths.of(chained), depths.of(branch)) == (1, 2)


def test_no_node_is_passed_twice_however_many_are_asked_about():
    nodes = chain(_TARGETS, CountedNode)
    depths = Depths(set(nodes), root_length=1)
    asked_before = sum(node.asked for node in nodes)
    assert [depths.of(node) for node in nodes] == list(range(_TARGETS + 1))
    assert sum(node.asked for node in nodes) - asked_before <= 2 * len(nodes)


def test_an_event_looks_at_each_verification_once_or_twice(monkeypatch):
    looks = []
    end = Verification.end.fget
    monkeypatch.setattr(Verification, "end", property(lambda it: looks.append(it) or end(it)))
    verifications = _verifications_on_a_chain()
    looks.clear()
    assert verifications.promote() == []
    assert len(looks) <= 2 * _TARGETS


def _verifications_on_a_chain():
    statistics = DraftStatistics()
    tree = TokenTree(0, length=1, counter=DraftCounter(statistics))
    capacity = CapacityChanged(targets=tuple(range(_TARGETS)), drafters=(0,))
    verifications = TargetSchedule(tree, counter=DraftCounter(statistics), capacity=capacity)
    tip = tree.root
    for token_id in range(_TARGETS):
        before, tip = tip, tree.draft(tip, token_id, drafter=0, distribution=None)
        verifications.start((before, tip), prefix=(), task=_TASK)
    return verifications
