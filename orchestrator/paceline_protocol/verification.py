"""Verifications of parts of the token tree: what one decides, and which one is due next."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline_contract.calls import VerificationRule
from paceline_contract.proposal import NOTHING, Proposal
from paceline_protocol.task import DispatchPolicy

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from paceline_contract.proposal import Distribution
    from paceline_protocol.node import Node
    from paceline_protocol.task import DecodingTask


@dataclass(slots=True, eq=False)
class Verification:
    """A verification in flight.

    Its trunk is the last token of its prefix, then its block. It decides what follows each:

        prefix ── trunk[0] ── trunk[1] … trunk[-1]
                         └── judges trunk[1] …   └── the next token, if all are accepted

    Beside the trunk it may have branches, and decides what follows on those of them that turn out
    right.

    Attributes:
        verify_id: Its name.
        target: Where it runs.
        trunk: See above.
        branches: Tokens beside the trunk, each after its parent.
        guesses: The target's own, which ride along: after the last token of its prefix.
        is_guess: Whether the last token of its prefix is a branch's that none other judges.
        kept: The last node of its path that the target had before; None if it had nothing.
        depth: How many unfinished verifications are before it, as told to the target.
        warms_up: Whether it is worth finishing for the target's session alone: it has the prompt.
        nodes: The last token of its prefix, then all that it judges.
    """

    verify_id: int
    target: int
    trunk: tuple[Node, ...]
    kept: Node | None
    depth: int
    warms_up: bool
    branches: tuple[Node, ...] = ()
    guesses: Proposal = NOTHING
    is_guess: bool = False
    nodes: tuple[Node, ...] = field(init=False)
    _members: frozenset[Node] = field(init=False)
    _parents: tuple[int, ...] = field(init=False)
    """For each token that it judges, the index of the node that the token follows."""

    def __post_init__(self) -> None:
        self.nodes = self.trunk + self.branches
        index = {node: i for i, node in enumerate(self.nodes)}
        self._members = frozenset(index)
        # Kept here, since nodes that the text has passed know their parents no more.
        self._parents = tuple(index[node.parent] for node in self.nodes[1:] if node.parent)

    def proposal(self, *, rule: VerificationRule) -> Proposal:
        """What its target is asked to judge."""
        judged = self.nodes[1:]
        is_chain = self._parents == tuple(range(len(judged)))
        is_exact = rule is VerificationRule.EXACT
        proposal = Proposal(
            tuple(node.token_id for node in judged),
            parents=() if is_chain else self._parents,
            distributions=() if is_exact else _distributions(judged),
        )
        return proposal.beside(self.guesses) if self.guesses else proposal

    def along(self, path: Sequence[int]) -> Iterator[Node]:
        """Yield what a verdict accepts of the trunk and its branches, root first.

        Args:
            path: Indices into the proposal.
        """
        place = 0
        for index in path:
            if index + 1 >= len(self.nodes):
                return
            assert self._parents[index] == place, "a verdict accepts a path of what it judged"
            place = index + 1
            yield self.nodes[place]

    def guessed_along(self, path: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens of the target's own guesses that a verdict accepts after these."""
        if not self.guesses:
            return ()
        proposal = self.proposal(rule=VerificationRule.EXACT)
        return proposal.along([index for index in path if index + 1 >= len(self.nodes)])

    @property
    def end(self) -> Node:
        """The end of its trunk; if that is contradicted, of what branches off it and is not."""
        if self.trunk[-1].alive:
            return self.trunk[-1]
        return next((node for node in reversed(self.branches) if node.alive), self.trunk[-1])

    def decides(self, node: Node) -> bool:
        """Whether its verdict can tell what follows a node.

        Under rejection sampling a node that was given to a block, when that was dispatched, is
        decided by the fate of that block's token and by nothing else.
        """
        judged = node.dispatch.judged
        return node in self._members and (judged is None or judged in self._members)

    def is_useful(self) -> bool:
        """Whether its verdict can still tell something new."""
        return any(
            node.alive and node.fact is None and self.decides(node) for node in reversed(self.nodes)
        )

    def claim(self, *, rule: VerificationRule) -> None:
        """Mark its nodes as assigned, and the guesses that ride along as taken.

        Under rejection sampling this also fixes what decides the nodes, before any outcome is
        known.
        """
        self.trunk[0].dispatch.guesses = NOTHING  # they ride along with one verification only
        for node in self.nodes:
            node.dispatch.assigned = True
            node.dispatch.was_branch |= node.draft.is_branch
        if rule is VerificationRule.REJECTION:
            for node, judged in zip(self.trunk, self.trunk[1:], strict=False):
                node.dispatch.judged = judged
            self.trunk[0].dispatch.plain |= len(self.trunk) == 1

    def release(self) -> None:
        """Return what it judges to those tokens that wait for a verification."""
        for node, parent in zip(self.nodes[1:], self._parents, strict=True):
            node.dispatch.assigned = self.nodes[parent].fact is not None
        if self.is_guess:
            self.trunk[0].dispatch.assigned = False


def due_nodes(
    path: Sequence[Node], *, task: DecodingTask, growing: bool, urgent: bool = False
) -> Sequence[Node]:
    """Return the nodes of the next verification that is due on a path; none if none is.

    The first run of unassigned tokens is due if it is long enough or cannot grow any more. Where
    something else decides what follows the node before it (under rejection sampling), the run's
    first token is assumed instead of judged.

        path:   root ── a ── a ── u ── u ── u ── tip      a: assigned, u: unassigned
                             └ start   └ block ┘

    Args:
        path: From an assigned node down.
        task: Has the policy and the lookahead.
        growing: Whether a drafter is at work at the path's end.
        urgent: Whether a short run is due, too.
    """
    first = next(
        (i for i in range(1, len(path)) if _is_open(path[i], before=path[i - 1])), len(path)
    )
    if first == len(path):
        return ()
    end = first + 1
    while (
        end < len(path) and not path[end].dispatch.assigned and path[end - 1].can_judge(path[end])
    ):
        end += 1
    start = first - 1 if path[first - 1].can_judge(path[first]) else first
    closed = end < len(path) or not growing
    if end - start - 1 < task.lookahead and not closed and not urgent:
        return ()
    if task.dispatch is DispatchPolicy.BLOCKS:
        end = min(end, start + 1 + task.lookahead)
    return path[start:end]


def _is_open(node: Node, *, before: Node) -> bool:
    """Whether a verification that begins with a node would tell something new.

    Where it cannot judge the node, it can only tell what follows it.
    """
    return not node.dispatch.assigned and (node.fact is None or before.can_judge(node))


def frontier_nodes(path: Sequence[Node], *, task: DecodingTask, growing: bool) -> Sequence[Node]:
    """Return the nodes of a verification that decides what follows the root, now."""
    root = path[0]
    urgent = task.dispatch is DispatchPolicy.WORK_CONSERVING or root.dispatch.judged is not None
    nodes = due_nodes(path, task=task, growing=growing, urgent=urgent)
    if nodes and nodes[0] is root:
        return nodes
    # Another verification may assume the token whose fate decides, and so have it assigned. It is
    # judged here all the same: under rejection sampling nothing else may decide what follows.
    judged = root.dispatch.judged
    return (root,) if judged is None else (root, judged)


def _distributions(judged: Iterable[Node]) -> tuple[Distribution, ...]:
    return tuple(node.draft.distribution for node in judged if node.draft.distribution is not None)
