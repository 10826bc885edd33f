"""The token tree: drafted tokens, and what targets said about them.

Theory of operation, for the engineer who changes this file.

A node stands for the whole sequence that ends with it, so a fact about a node never changes. The
root is the last committed token. Each node has three parts, one for each source of information.
They come in any order:

- `Node.draft`: what drafters said. `TokenTree.draft` adds a token to a drafter's chain,
  `TokenTree.branch` adds a runner-up beside it. Equal tokens after equal sequences share one node.
- `Node.fact`: what a target said. `TokenTree.decide` takes "after this sequence the target says t".
  Only the first such fact counts: later ones repeat it under EXACT, and are void under REJECTION.
- `Node.dispatch`: what verifications do about the token. `Verification.claim` and
  `Verification.release` set it. A fact also marks the token that it decides, and the end of a
  branch needs no verification.

        committed          root
    ── the ── cat ── sat ── on ──┬── the ──┬── mat       chain of drafter 0: the main path
                                 │         └── rug       runner-up of drafter 0: a branch
                                 └── a ── chair          chain of drafter 1

The main path follows, at each node, the child that a dispatched block judges, otherwise the child
of the smallest drafter index. A branch is on no main path, and counts as no draft token, until a
fact leads to it. Then `_adopt` makes it its drafter's chain, with what that drafter said to follow.

A fact does two things at once, and these two are all the surgery there is:

    before decide(on, "a")            after
        on ──┬── the ── mat               on ─── a ── chair      on.fact.token_id is "a"
             └── a ── chair               the, mat               not alive, cut off

So a node with a fact has one child. `advance` commits by walking from the root along the facts: a
fact further down waits there until the facts above it have come.

Nodes that are over must be freed at once, though a generation is long and the garbage collector may
be off. So a node that the root has left keeps only its link to the next token, which a late verdict
may ask for. A contradicted node keeps only its link to its parent, by which `surviving` finds where
its drafter goes on. No link leads from the living tree to a node that is over, and no cycle of
links holds such a node (tests/unit/protocol/test_tree_memory.py). If you add a link to a node, say
in `cut_off` and in `leave_behind` what becomes of it.

The tree counts nothing. It tells a `DraftCounter` (draft_statistics.py) what becomes of each token.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from paceline_protocol.node import Fact, Node

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline_contract.proposal import Distribution
    from paceline_protocol.draft_statistics import DraftCounter


class CommittedToken(NamedTuple):
    """A token that the root has moved to.

    Attributes:
        token_id: The token.
        was_drafted: Whether a drafter had it in its chain.
        logprob: Its log probability, if the target said it.
    """

    token_id: int
    was_drafted: bool
    logprob: float | None


class TokenTree:
    """A tree of drafted tokens below the last committed one.

    Invariants:
        A node with a fact has one child, the fact's. A living node's ancestors live.

    Args:
        last_token: The last committed token.
        length: Tokens of the sequence that ends with it.
        counter: Is told what becomes of each token.

    Attributes:
        root: The last committed token.
    """

    def __init__(self, last_token: int, *, length: int, counter: DraftCounter) -> None:
        self.root = Node(last_token, parent=None, length=length)
        self._counter = counter

    def draft(
        self,
        tip: Node,
        token_id: int,
        *,
        drafter: int,
        distribution: Distribution | None,
        rate: float = 1.0,
    ) -> Node:
        """Add a draft token, and return its node; an equal one of another drafter is shared.

        Args:
            tip: What it follows.
            token_id: The token.
            drafter: Whose chain it is in.
            distribution: What it was drawn from.
            rate: How often a chain's token is right, in (0, 1].
        """
        is_new = token_id not in tip.children
        node = tip.child(token_id)
        draft = node.draft
        if is_new:
            draft.worth += math.log(rate)
        is_twin = draft.is_in_chain
        self._counter.drafted(is_twin=is_twin)
        is_first = not is_twin or (draft.drafter is not None and drafter < draft.drafter)
        if is_first and tip.dispatch.judged is not node:
            # What a token was drawn from is fixed once it is being judged.
            draft.drafter, draft.distribution = drafter, distribution
        draft.is_branch, draft.rank = False, 1
        tip.draft.followers.setdefault(drafter, node)
        # It may have been a branch that a target had judged already.
        if (decided := node.decided_child()) is not None and decided.draft.is_branch:
            self._adopt(decided)
        return node

    def branch(self, parent: Node, token_id: int, *, drafter: int, rank: int, rate: float) -> Node:
        """Add a token beside the drafter's chain, and return its node; an equal one is shared.

        Args:
            parent: What it follows: a living node about which nothing is decided.
            token_id: The token.
            drafter: The drafter that found it.
            rank: Its place among its siblings, from 1 on.
            rate: How often a token of this rank is right, in (0, 1].
        """
        is_new = token_id not in parent.children
        node = parent.child(token_id)
        if is_new:
            draft = node.draft
            draft.is_branch, draft.drafter, draft.rank = True, drafter, rank
            draft.worth += math.log(rate)
            self._counter.branch_drafted()
        parent.draft.followers.setdefault(drafter, node)
        return node

    def decide(self, node: Node, token_id: int, *, logprob: float | None = None) -> None:
        """Take in what the target says after a sequence. Only the first fact about it counts."""
        if not node.alive or node.fact is not None:
            return
        had_several = len(node.children) > 1
        chosen = node.child(token_id)
        if had_several and not node.draft.is_branch:
            self._counter.ranked(chosen.draft.rank)
        chosen.dispatch.assigned = True
        for other in node.children.values():
            if other is not chosen:
                self._bury(other)
        node.fact = Fact(token_id, logprob)
        node.children = {token_id: chosen}
        if chosen.draft.is_branch and not node.draft.is_branch:
            self._adopt(chosen)

    def advance(self) -> list[CommittedToken]:
        """Move the root along the facts, and return the newly committed tokens."""
        passed = []
        while (fact := self.root.fact) is not None:
            left, self.root = self.root, self.root.children[fact.token_id]
            left.leave_behind()
            draft = self.root.draft
            passed.append(CommittedToken(fact.token_id, draft.is_in_chain, fact.logprob))
            self._counter.committed(rank=draft.rank, was_branch=self.root.dispatch.was_branch)
        return passed

    def main_path(self) -> list[Node]:
        """Return the main path, the root first."""
        path = [self.root]
        while (node := path[-1].main_child()) is not None:
            path.append(node)
        return path

    def path_to(self, node: Node) -> list[Node]:
        """Return the path to a living node below the root, the root first."""
        path = [node]
        while path[-1] is not self.root:
            path.append(_parent(path[-1]))
        return path[::-1]

    def token_ids_to(self, node: Node) -> tuple[int, ...]:
        """Return the tokens on the path to a living node below the root, the root's left out."""
        return tuple(passed.token_id for passed in self.path_to(node)[1:])

    def surviving(self, node: Node) -> Node:
        """Return where to go on from a node: its last living ancestor, then along the facts."""
        while not node.alive and node.parent is not None:
            node = node.parent
        if node.length < self.root.length:
            node = self.root
        while (decided := node.decided_child()) is not None:
            node = decided
        return node

    def end_of_chain(self, node: Node, *, drafter: int) -> Node:
        """Return where a drafter continues from a node: after what it has drafted there already."""
        while True:
            if (decided := node.decided_child()) is not None:
                node = decided
            elif drafter in node.draft.followers:
                node = node.draft.followers[drafter]
                if node.draft.is_branch:
                    self._adopt(node)
            else:
                return node

    def last_common(self, node: Node, other: Node) -> Node:
        """Return the end of what two sequences share; the other one is a living node."""
        while not node.alive and node.parent is not None:
            node = node.parent
        if node.length <= self.root.length:
            return node
        while node is not other:
            if node.length > other.length:
                node = _parent(node)
            else:
                other = _parent(other)
        return node

    def discard(self) -> None:
        """Report what is left in the tree as discarded: the end has come."""
        for node in _subtree(self.root):
            if node is not self.root and node.draft.is_in_chain:
                self._counter.discarded()

    def _adopt(self, branch: Node) -> None:
        """Make a branch, and what was said to follow it, its drafter's chain."""
        drafter: int | None = None
        node: Node | None = branch
        while node is not None and node.draft.is_branch:
            node.draft.is_branch = False
            if node.draft.drafter is not None:
                drafter = node.draft.drafter
                self._counter.adopted()
            follower = None if drafter is None else node.draft.followers.get(drafter)
            decided = node.decided_child()
            if decided is not None and follower not in (None, decided):
                self._counter.adopted_too_late()
            node = decided or follower

    def _bury(self, rejected: Node) -> None:
        """Mark a subtree as contradicted, because of its first token."""
        for node in [*_subtree(rejected)]:
            node.alive = False
            node.cut_off()
            if not node.draft.is_in_chain:
                continue
            if node is rejected:
                self._counter.rejected()
            else:
                self._counter.discarded()


def _parent(node: Node) -> Node:
    assert node.parent is not None, "below the root every node has a parent"
    return node.parent


def _subtree(top: Node) -> Iterator[Node]:
    waiting = [top]
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(node.children.values())
