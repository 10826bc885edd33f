"""Branches: tokens beside the chains of drafters, and which of them are worth a target's rows.

A node's worth is the probability that its text becomes the output: the product, along its path, of
how often tokens of their rank were right. So runners-up come in the order of their ranks, and what
follows on one after it; the rates are those of this request, with what is known at its start.
"""

from __future__ import annotations

import heapq
from itertools import count
from typing import TYPE_CHECKING

from paceline_contract.proposal import NOTHING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paceline_contract.proposal import Proposal
    from paceline_protocol.node import Node
    from paceline_protocol.task import DecodingTask


def branches_beside(trunk: Sequence[Node], *, task: DecodingTask) -> tuple[Node, ...]:
    """Choose which branches ride along with a trunk, each after its parent: the largest worths.

    None if the trunk alone is longer than a tree may be.
    """
    room = task.tree_tokens - (len(trunk) - 1)
    longest = trunk[0].length + task.tree_depth
    if task.width == 1 or trunk[-1].length > longest:
        return ()
    chosen: list[Node] = []
    beside = (child for node in trunk for child in node.children.values())
    best = BranchQueue(child for child in beside if child.length <= longest)
    while len(chosen) < room and (node := best.pop()) is not None:
        chosen.append(node)
        if node.length < longest:
            best.extend(node.children.values())
    return tuple(chosen)


def guesses_beside(
    trunk: Sequence[Node], branches: Sequence[Node], *, task: DecodingTask
) -> Proposal:
    """Choose which of the target's own guesses ride along, too: as many as there is room for."""
    room = task.tree_tokens - (len(trunk) - 1) - len(branches)
    if room <= 0 or trunk[-1].length > trunk[0].length + task.tree_depth:
        return NOTHING
    guessed = trunk[0].dispatch.guesses
    return guessed.only(range(min(room, len(guessed)))).compact()


class BranchQueue:
    """Branches that wait for a verification, the largest worth first.

    A node that has got one meanwhile, or needs none any more, is passed over when its turn comes.
    """

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        self._heap: list[tuple[float, int, Node]] = []
        self._numbers = count()
        self._kept_length = 0
        self.extend(nodes)

    def extend(self, nodes: Iterable[Node]) -> None:
        """Add those of these that wait."""
        for node in nodes:
            if _waits(node):
                heapq.heappush(self._heap, (-node.draft.worth, next(self._numbers), node))

    def pop(self) -> Node | None:
        """Take the best out; None if there is none."""
        while self._heap:
            _, _, node = heapq.heappop(self._heap)
            if _waits(node):
                return node
        return None

    def forget_what_is_over(self) -> None:
        """Drop those that wait no longer, once they may be most of all."""
        if len(self._heap) > 2 * self._kept_length + 100:
            self._heap = [entry for entry in self._heap if _waits(entry[-1])]
            heapq.heapify(self._heap)
            self._kept_length = len(self._heap)


def _waits(node: Node) -> bool:
    if not node.alive or node.fact is not None:
        return False
    return node.draft.is_branch and not node.dispatch.assigned
