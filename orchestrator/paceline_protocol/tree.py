"""The token tree of distributed speculative inference: what is drafted, and what is known of it.

Theory of operation, for whoever changes this file.

A node stands for the whole sequence that ends with it, so a fact about a node never changes. The
root is the last committed token. Three kinds of fact hang on a node, and come in any order:

- What drafters said. `TokenTree.draft` adds a token to a drafter's chain, `TokenTree.branch` a
  runner-up beside it. Equal tokens after equal sequences share one node, whoever found them.
- What a target said. `TokenTree.decide` takes "after this sequence the target says t". Only the
  first such fact counts: later ones repeat it under EXACT, and are void under REJECTION.
- What was dispatched. `Verification.claim` and `Verification.release` mark which nodes a target
  has. A fact also marks the token that it decides, and the end of a branch needs no verification.

        committed          root
    ── the ── cat ── sat ── on ──┬── the ──┬── mat       chain of drafter 0: the main path
                                 │         └── rug       runner-up of drafter 0: a branch
                                 └── a ── chair          chain of drafter 1

The main path follows, at each node, the child that a dispatched block judges, else the child of the
smallest drafter index. A branch is on no main path, and counts as no draft token, until a fact
leads to it. Then `_adopt` makes it its drafter's chain, with what that drafter said to follow it.

A fact does two things at once, and this is all the surgery there is:

    before decide(on, "a")            after
        on ──┬── the ── mat               on ─── a ── chair      on.next_token is "a"
             └── a ── chair               the, mat               not alive, cut off

So a node with a fact has one child. `advance` commits by walking from the root along the facts: a
fact that lies further down waits there until those above it have come.

What is over must be freed at once, though a generation is long and the garbage collector may be
off. So a node that the root has left keeps only its link to the next token, which a late verdict
may ask for; and a contradicted node keeps only its link to its parent, by which `surviving` finds
where its drafter goes on. Nothing leads from the living tree to what is over, and no cycle of links
holds it (tests/unit/protocol/test_tree_memory.py). Whoever adds a link to a node says in `cut_off`
and in `leave_behind` what becomes of it.

Counting goes with surgery, since only surgery knows what a token was: each drafted token ends as
accepted, rejected or discarded, once (tests/unit/protocol/test_invariants.py, CLEAN_END). A
rejected subtree has one rejected token, its first; all below it were never judged.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from paceline_contract.proposal import NOTHING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline_contract.proposal import Distribution
    from paceline_protocol.commitment import DraftStatistics


class Node:
    """A token after a sequence, and three kinds of fact about the two; see the head of this file.

    Attributes:
        token_id: The token.
        parent: The sequence before it; None for the first root, and once the root has moved on.
        length: Tokens of the whole sequence, this one included.
        children: What may follow, by token.

    Attributes that `TokenTree.draft` and `TokenTree.branch` set:
        drafter: The smallest index of the drafters that have it in their chain; None if none has.
        finder: Of a branch, the drafter that found it first.
        rank: The place that a drafter gave it: 1 in a chain, 2 or more as a runner-up of its
            siblings; 0 if none found it.
        worth: The logarithm of the probability that was expected of the sequence.
        is_branch: Whether it stands, or follows, beside all chains, and no fact led to it.
        followers: By drafter: the token that the drafter holds likeliest to follow.
        distribution: What it was drawn from, opaque; None unless under rejection sampling.

    Attributes that verdicts set, by `TokenTree.decide`:
        next_token: What the target says follows: the fact. None if unknown.
        logprob: Of this token, if the target said so.
        alive: Whether nothing known contradicts the sequence.
        guessed: What the target guesses to follow, where it said so with the fact that led here;
            the method sets it, and the verification that takes it along resets it.

    Attributes that `Verification.claim` and `Verification.release` set:
        assigned: Whether this token needs no (further) verification: one has it in its block or
            assumes it, or a fact decides it, or nothing can follow it.
        rides: Whether a verification had it as a branch.
        judged: Under rejection sampling, the child whose fate decides what follows.
        plain: Under rejection sampling, whether the target alone decides what follows.
    """

    __slots__ = (
        "alive",
        "assigned",
        "children",
        "distribution",
        "drafter",
        "finder",
        "followers",
        "guessed",
        "is_branch",
        "judged",
        "length",
        "logprob",
        "next_token",
        "parent",
        "plain",
        "rank",
        "rides",
        "token_id",
        "worth",
    )

    def __init__(self, token_id: int, *, parent: Node | None, length: int) -> None:
        self.token_id = token_id
        self.parent = parent
        self.length = length
        self.children: dict[int, Node] = {}
        # What drafters said.
        self.drafter: int | None = None
        self.finder: int | None = None
        self.rank = 0
        self.worth: float = parent.worth if parent is not None else 0.0
        self.is_branch: bool = parent is not None and parent.is_branch
        self.followers: dict[int, Node] = {}
        self.distribution: Distribution | None = None
        # What a target said.
        self.next_token: int | None = None
        self.logprob: float | None = None
        self.alive = True
        self.guessed = NOTHING
        # What was dispatched.
        self.assigned = False
        self.rides = False
        self.judged: Node | None = None
        self.plain = False

    def cut_off(self) -> None:
        """Forget what was to follow, and what was drafted to follow, and judged."""
        self.children, self.followers, self.judged = {}, {}, None

    def leave_behind(self) -> None:
        """Forget all but the text's next token, which a late verdict may still ask for."""
        self.parent, self.followers, self.judged = None, {}, None

    def main_child(self) -> Node | None:
        """Return the child on the main path: the judged one, else the smallest drafter's."""
        if len(self.children) < 2:
            only = next(iter(self.children.values()), None)
            return None if only is not None and only.is_branch else only
        chains = (child for child in self.children.values() if not child.is_branch)
        return self.judged or min(chains, key=_drafter_order, default=None)

    def can_judge(self, child: Node) -> bool:
        """Whether a child's fate may decide what follows: nothing else does already."""
        return not self.plain and self.judged in (None, child)

    def child(self, token_id: int) -> Node:
        """Return the child with this token; make it if there is none."""
        found = self.children.get(token_id)
        if found is None:
            found = Node(token_id, parent=self, length=self.length + 1)
            self.children[token_id] = found
        return found


class TokenTree:
    """A tree of drafted tokens below the last committed one.

    Invariants:
        A node with a fact has one child, the fact's. A living node's ancestors live.

    Attributes:
        root: The last committed token.
    """

    def __init__(self, last_token: int, *, length: int, statistics: DraftStatistics) -> None:
        self.root = Node(last_token, parent=None, length=length)
        self._statistics = statistics

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
            drafter: Whose chain it is in.
            distribution: What it was drawn from.
            rate: How often a chain's token is right, in (0, 1].
        """
        is_new = token_id not in tip.children
        node = tip.child(token_id)
        if is_new:
            node.worth += math.log(rate)
        self._statistics.drafted += 1
        if node.drafter is not None:
            self._statistics.discarded += 1  # its twin counts
        if (node.drafter is None or drafter < node.drafter) and tip.judged is not node:
            # What a token was drawn from is fixed once it is being judged.
            node.drafter, node.distribution = drafter, distribution
        node.is_branch, node.rank = False, 1
        tip.followers.setdefault(drafter, node)
        return node

    def branch(self, parent: Node, token_id: int, *, drafter: int, rank: int, rate: float) -> Node:
        """Add a token beside the drafter's chain, and return its node; an equal one is shared.

        Args:
            parent: What it follows: a living node about which nothing is decided.
            drafter: Who found it.
            rank: Its place among its siblings, from 1 on.
            rate: How often a token of this rank is right, in (0, 1].
        """
        is_new = token_id not in parent.children
        node = parent.child(token_id)
        if is_new:
            node.is_branch, node.finder, node.rank = True, drafter, rank
            node.worth += math.log(rate)
            self._statistics.branch_drafted += 1
        parent.followers.setdefault(drafter, node)
        return node

    def decide(self, node: Node, token_id: int, logprob: float | None) -> None:
        """Learn what the target says after a text. Only the first word on it counts."""
        if not node.alive or node.next_token is not None:
            return
        had_several = len(node.children) > 1
        chosen = node.child(token_id)
        if had_several and not node.is_branch:
            self._statistics.ranks[chosen.rank] += 1
        chosen.logprob = logprob
        chosen.assigned = True
        for other in node.children.values():
            if other is not chosen:
                self._bury(other)
        node.next_token = token_id
        node.children = {token_id: chosen}
        if chosen.is_branch and not node.is_branch:
            self._adopt(chosen)

    def advance(self) -> list[Node]:
        """Move the root along the facts, and return the nodes passed: newly committed tokens."""
        passed = []
        while self.root.next_token is not None:
            left, self.root = self.root, self.root.children[self.root.next_token]
            left.leave_behind()
            passed.append(self.root)
            self._statistics.corrections_ahead += self.root.rank > 1
            self._statistics.branch_accepted += self.root.rides
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
        while node.next_token is not None:
            node = node.children[node.next_token]
        return node

    def end_of_chain(self, node: Node, *, drafter: int) -> Node:
        """Return where a drafter continues from a node: after what it has drafted there already."""
        while True:
            if node.next_token is not None:
                node = node.children[node.next_token]
            elif drafter in node.followers:
                node = node.followers[drafter]
                if node.is_branch:
                    self._adopt(node)
            else:
                return node

    def last_common(self, node: Node, other: Node) -> Node:
        """Return the end of what two texts share; the other one is a living node."""
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
        """Count what is left in the tree as discarded: the end has come."""
        for node in _subtree(self.root):
            if node is not self.root and node.drafter is not None:
                self._statistics.discarded += 1

    def _adopt(self, branch: Node) -> None:
        """Make a branch, and what was said to follow it, its drafter's chain."""
        drafter = branch.finder
        node: Node | None = branch
        while node is not None and node.is_branch:
            node.is_branch = False
            if node.finder is not None:
                drafter = node.finder
                node.drafter = drafter
                self._statistics.drafted += 1
            follower = node.followers.get(drafter) if drafter is not None else None
            if node.next_token is None:
                node = follower
                continue
            chosen = node.children[node.next_token]
            if follower is not None and follower is not chosen:
                # It was rejected before it was in a chain.
                self._statistics.drafted += 1
                self._statistics.rejected += 1
            node = chosen

    def _bury(self, rejected: Node) -> None:
        """Mark a subtree as contradicted, because of its first token."""
        for node in [*_subtree(rejected)]:
            node.alive = False
            node.cut_off()
            if node.drafter is None:
                continue
            if node is rejected:
                self._statistics.rejected += 1
            else:
                self._statistics.discarded += 1


def _drafter_order(node: Node) -> int:
    assert node.drafter is not None, "only a fact's token has no drafter, and it has no siblings"
    return node.drafter


def _parent(node: Node) -> Node:
    assert node.parent is not None, "below the root every node has a parent"
    return node.parent


def _subtree(top: Node) -> Iterator[Node]:
    waiting = [top]
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(node.children.values())
