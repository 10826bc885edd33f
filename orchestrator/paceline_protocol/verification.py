"""Verifications of paths of the token tree: what one decides, and which one is due next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline_protocol.task import DispatchPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_protocol.task import DecodingTask
    from paceline_protocol.tree import Node

__all__ = ["Verification", "due_nodes", "frontier_nodes"]


@dataclass(slots=True, eq=False)
class Verification:
    """A verification in flight.

    Its nodes are the last token of its prefix, then its block. It decides what follows each:

        prefix ── nodes[0] ── nodes[1] … nodes[-1]
                         └── judges nodes[1] …   └── the next token, if all are accepted

    Attributes:
        verify_id: Its name.
        target: Where it runs.
        nodes: See above.
        kept: The last node of its path that the target had before; None if it had nothing.
        depth: How many unfinished verifications are before it, as told to the target.
        warms_up: Whether it is worth finishing for the target's session alone: it has the prompt.
    """

    verify_id: int
    target: int
    nodes: tuple[Node, ...]
    kept: Node | None
    depth: int
    warms_up: bool

    def decides(self, node: Node) -> bool:
        """Whether its verdict can tell what follows a node.

        Under rejection sampling a node that was given to a block, when that was dispatched, is
        decided by the fate of that block's token and by nothing else.
        """
        index = node.length - self.nodes[0].length
        if not 0 <= index < len(self.nodes) or self.nodes[index] is not node:
            return False
        return node.judged is None or self.nodes[index + 1 : index + 2] == (node.judged,)

    def is_useful(self) -> bool:
        """Whether its verdict can still tell something new."""
        return any(
            node.alive and node.next_token is None and self.decides(node)
            for node in reversed(self.nodes)
        )

    def claim(self) -> None:
        """Under rejection sampling: fix what decides the nodes, before any outcome is known."""
        for node, judged in zip(self.nodes, self.nodes[1:], strict=False):
            node.judged = judged
        if len(self.nodes) == 1:
            self.nodes[0].plain = True

    def release(self) -> None:
        """Return the block's tokens to those that wait for a verification."""
        for node, token in zip(self.nodes, self.nodes[1:], strict=False):
            token.assigned = node.next_token is not None


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
    first = next((i for i in range(1, len(path)) if not path[i].assigned), len(path))
    if first == len(path):
        return ()
    end = first + 1
    while end < len(path) and not path[end].assigned and path[end - 1].can_judge(path[end]):
        end += 1
    start = first - 1 if path[first - 1].can_judge(path[first]) else first
    closed = end < len(path) or not growing
    if end - start - 1 < task.lookahead and not closed and not urgent:
        return ()
    if task.dispatch is DispatchPolicy.BLOCKS:
        end = min(end, start + 1 + task.lookahead)
    return path[start:end]


def frontier_nodes(path: Sequence[Node], *, task: DecodingTask, growing: bool) -> Sequence[Node]:
    """Return the nodes of a verification that decides what follows the root, now."""
    root = path[0]
    urgent = task.dispatch is DispatchPolicy.WORK_CONSERVING or root.judged is not None
    nodes = due_nodes(path, task=task, growing=growing, urgent=urgent)
    return nodes if nodes and nodes[0] is root else (root,)
