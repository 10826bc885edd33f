"""A token of the token tree, and what drafters, targets and verifications said about it.

`tree.py` has the theory of operation; only a `TokenTree` and a `Verification` change a node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from paceline_contract.proposal import NOTHING

if TYPE_CHECKING:
    from paceline_contract.proposal import Distribution, Proposal


class DraftFacts:
    """What drafters said about a token; `TokenTree.draft` and `TokenTree.branch` set it.

    Attributes:
        drafter: The smallest index of the drafters that have the token in their chain. For a branch
            the drafter that found it first. None if no drafter found it.
        is_branch: Whether the token stands, or follows, beside all chains, and no fact led to it.
        rank: The place that a drafter gave the token: 1 in a chain, 2 or more as a runner-up of its
            siblings, 0 if no drafter found it.
        worth: The logarithm of the probability that was expected of the sequence.
        followers: By drafter: the token that the drafter holds likeliest to follow.
        distribution: What the token was drawn from, unread; None unless under rejection sampling.
    """

    __slots__ = ("distribution", "drafter", "followers", "is_branch", "rank", "worth")

    def __init__(self, before: DraftFacts | None) -> None:
        self.drafter: int | None = None
        self.is_branch: bool = before is not None and before.is_branch
        self.rank = 0
        self.worth: float = before.worth if before is not None else 0.0
        self.followers: dict[int, Node] = {}
        self.distribution: Distribution | None = None

    @property
    def is_in_chain(self) -> bool:
        """Whether a drafter has the token in its chain."""
        return self.drafter is not None and not self.is_branch


class Fact(NamedTuple):
    """What a target said follows a sequence.

    Attributes:
        token_id: The token.
        logprob: The token's log probability, if the target said it.
    """

    token_id: int
    logprob: float | None


class DispatchMarks:
    """What verifications do about a token; `Verification.claim` and `release` set it.

    Attributes:
        assigned: Whether the token needs no (further) verification: a verification has it in its
            block or assumes it, or a fact decides it, or nothing can follow it.
        was_branch: Whether a verification had the token as a branch.
        judged: Under rejection sampling, the child whose fate decides what follows.
        plain: Under rejection sampling, whether the target alone decides what follows.
        guesses: The target's own guesses of what follows, for the next verification that begins
            with the token. The method sets them, and the verification that takes them resets them.
    """

    __slots__ = ("assigned", "guesses", "judged", "plain", "was_branch")

    def __init__(self) -> None:
        self.assigned = False
        self.was_branch = False
        self.judged: Node | None = None
        self.plain = False
        self.guesses: Proposal = NOTHING


class Node:
    """A token after a sequence; see the head of this file.

    Attributes:
        token_id: The token.
        parent: The sequence before it; None for the first root, and once the root has moved on.
        length: Tokens of the whole sequence, this one included.
        children: What may follow, by token.
        alive: Whether no fact contradicts the sequence.
        draft: What drafters said.
        fact: What a target said to follow; None if unknown.
        dispatch: What verifications do about it.
    """

    __slots__ = ("alive", "children", "dispatch", "draft", "fact", "length", "parent", "token_id")

    def __init__(self, token_id: int, *, parent: Node | None, length: int) -> None:
        self.token_id = token_id
        self.parent = parent
        self.length = length
        self.children: dict[int, Node] = {}
        self.alive = True
        self.draft: DraftFacts = DraftFacts(None if parent is None else parent.draft)
        self.fact: Fact | None = None
        self.dispatch = DispatchMarks()

    def cut_off(self) -> None:
        """Forget the tokens after it: drafted ones, and the judged one."""
        self.children, self.draft.followers, self.dispatch.judged = {}, {}, None

    def leave_behind(self) -> None:
        """Forget all but the next token, which a late verdict may still ask for."""
        self.parent, self.draft.followers, self.dispatch.judged = None, {}, None

    def main_child(self) -> Node | None:
        """Return the child on the main path: the judged one, else the smallest drafter's."""
        if len(self.children) > 1 and self.dispatch.judged is not None:
            return self.dispatch.judged
        first: Node | None = None
        for child in self.children.values():
            if not child.draft.is_branch and (first is None or _drafter(child) < _drafter(first)):
                first = child
        return first

    def can_judge(self, child: Node) -> bool:
        """Whether a child's fate may decide what follows: nothing else does already."""
        return not self.dispatch.plain and self.dispatch.judged in (None, child)

    def child(self, token_id: int) -> Node:
        """Return the child with this token; make it if there is none."""
        found = self.children.get(token_id)
        if found is None:
            found = Node(token_id, parent=self, length=self.length + 1)
            self.children[token_id] = found
        return found

    def decided_child(self) -> Node | None:
        """Return the child that a fact leads to; None if nothing is decided."""
        return None if self.fact is None else self.children[self.fact.token_id]


def _drafter(node: Node) -> int:
    assert node.draft.drafter is not None, (
        "only a fact's token has no drafter, and it has no siblings"
    )
    return node.draft.drafter
