"""How urgent verifications are: how many others come before one on its path."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from paceline_protocol.node import Node


class Depths:
    """How many verifications end before a node, on its path from the root.

    The copies of a broadcast prefill count as one. A branch comes after its siblings.

    Cost:
        However many nodes are asked about, each node of the tree is passed once.

    Args:
        ends: Where verifications end.
        root_length: The root's.
    """

    def __init__(self, ends: Collection[Node], *, root_length: int) -> None:
        self._ends = ends
        self._root_length = root_length
        self._counted: dict[Node, int] = {}  # how many end before a node

    def of(self, last: Node) -> int:
        """Return the depth of a verification that ends with this node."""
        return self._before(last) + last.draft.is_branch

    def _before(self, node: Node) -> int:
        path = [node]
        while not self._is_known(path[-1]) and path[-1].parent is not None:
            path.append(path[-1].parent)
        above = path.pop()
        count = self._counted.setdefault(above, 0)
        for below in reversed(path):
            count += above in self._ends
            self._counted[below] = count
            above = below
        return count

    def _is_known(self, node: Node) -> bool:
        return node in self._counted or node.length <= self._root_length
