"""How a simulated drafter's tree grows: as model servers' do (drafter_service.proto, Draft)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_contract.proposal import Proposal

if TYPE_CHECKING:
    from collections.abc import Sequence


class DraftedTree:
    """What a draft has found, and what its next forward follows.

    A forward follows the chain's last token, and beside it the tokens of the largest worth that
    none has followed yet: of the largest product of the probabilities along their paths. What it
    finds comes in the order of worth.

        prefix ── the ── cat ── sat        the chain: the first token found at each place
              └── a ── dog                 a runner-up, and what follows on it

    Attributes:
        due: What the next forward follows, the chain's first, as parents: 0 is the prefix, i + 1
            the i-th token.
    """

    def __init__(self, branch_count: int) -> None:
        self.due: tuple[int, ...] = (0,)
        self._branch_count = branch_count
        self._token_ids: list[int] = []
        self._parents: list[int] = []
        self._worths = [1.0]  # by parent
        self._open: list[int] = []  # of the largest worth first
        self._followed: dict[tuple[int, int], int] = {}

    def path_to(self, parent: int) -> list[int]:
        """Return the tokens from the prefix on to one of them; none to the prefix."""
        path = []
        while parent:
            path.append(self._token_ids[parent - 1])
            parent = self._parents[parent - 1]
        return path[::-1]

    def grow(self, ranked: Sequence[Sequence[tuple[int, float]]]) -> Proposal:
        """Take in what a forward found, and return it.

        Args:
            ranked: What may follow each one that was due, the likeliest first, with probabilities.
        """
        tip, *_ = self.due
        found = [
            (self._worths[parent] * probability, parent, token_id)
            for parent, own in zip(self.due, ranked, strict=True)
            for token_id, probability in own
        ]
        found.sort(key=lambda each: -each[0])  # stable: siblings stay in their order
        first = len(self._worths)
        for worth, parent, token_id in found:
            self._worths.append(worth)
            self._parents.append(parent)
            self._token_ids.append(token_id)
        for parent in filter(None, self.due):
            place = self._parents[parent - 1], self._token_ids[parent - 1]
            self._followed[place] = parent
        chain = self._parents.index(tip, first - 1) + 1
        others = (n for n in range(first, len(self._worths)) if n != chain and self._worths[n] > 0)
        self._open = sorted([*self._open, *others], key=lambda each: -self._worths[each])
        self.due = (chain, *self._open[: self._branch_count])
        del self._open[: self._branch_count]
        return Proposal(tuple(self._token_ids[first - 1 :]), tuple(self._parents[first - 1 :]))

    def held_length(self, token_ids: Sequence[int]) -> int:
        """Return how many of the tokens after the prefix forwards have worked through."""
        parent = length = 0
        for token_id in token_ids:
            parent = self._followed.get((parent, token_id), 0)
            if not parent:
                break
            length += 1
        return length
