"""Drafts that grow a token tree: where each one's next tokens go."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline_contract.proposal import NOTHING

if TYPE_CHECKING:
    from paceline_contract.proposal import Proposal
    from paceline_protocol.commitment import Commitment
    from paceline_protocol.task import DecodingTask
    from paceline_protocol.tree import Node, TokenTree


def ends_text(node: Node, commitment: Commitment) -> bool:
    """Whether the text ends with this node."""
    return commitment.ends_after(node.token_id, length=node.length)


def can_grow(tip: Node, commitment: Commitment) -> bool:
    """Whether a draft token after this node could become output."""
    return tip.length < commitment.limit - 1 and not ends_text(tip, commitment)


def useful_guesses(
    guessed: Proposal, node: Node, *, task: DecodingTask, commitment: Commitment
) -> Proposal:
    """Return what of a target's own guesses after a node may ride along and become output."""
    if not task.own_guesses or ends_text(node, commitment):
        return NOTHING
    longest = min(commitment.limit - 1 - node.length, task.tree_depth)
    return guessed.useful_part(longest=longest, end_ids=task.eos_ids)


@dataclass(slots=True, eq=False)
class Draft:
    """A draft in flight: where its chain's next token goes, and how many of its window are to come.

    While it is cold, its drafter works through the prompt. A restart would begin that anew, so it
    is left alone though the target may be ahead of it by now: else a drafter whose prefill takes
    longer than a target's step would never draft at all.
    """

    draft_id: int
    drafter: int
    tip: Node
    missing: int
    cold: bool
    fruitful: bool = False
    _found: list[Node | None] = field(default_factory=list)
    """What it follows, then what became of each of its tokens: None if nothing did."""
    _tip_index: int = 0
    _ranks: Counter[int] = field(default_factory=Counter)
    """How many tokens were found at a place, by the index of what they follow."""

    def __post_init__(self) -> None:
        self._found.append(self.tip)

    @property
    def is_stale(self) -> bool:
        """Whether its tokens are of no use any more."""
        return not self.tip.alive or (self.tip.next_token is not None and not self.cold)

    def graft(self, piece: Proposal, *, tree: TokenTree, commitment: Commitment) -> list[Node]:
        """Take in what it found, and return what stands beside its chain, each after its parent.

        Args:
            piece: See TokensDrafted.
            tree: What it grows.
            commitment: Says where texts end, and how often tokens of each rank are right.
        """
        self.cold = False
        branches: list[Node] = []
        for index, token_id in enumerate(piece.token_ids):
            parent_index = piece.parents[index] if piece.parents else self._tip_index
            node: Node | None = None
            parent = self._found[parent_index]
            if parent_index == self._tip_index:
                distribution = piece.distributions[index] if piece.distributions else None
                if self.missing and self.tip.next_token is None and can_grow(self.tip, commitment):
                    node = self.tip = tree.draft(
                        self.tip,
                        token_id,
                        drafter=self.drafter,
                        distribution=distribution,
                        rate=commitment.hit_rate(1),
                    )
                    self._tip_index = len(self._found)
                    self.missing -= 1
                    self.fruitful = True
            elif parent is not None and parent.alive and can_grow(parent, commitment):
                if parent.next_token is None:
                    rank = self._ranks[parent_index] + 1
                    node = tree.branch(
                        parent,
                        token_id,
                        drafter=self.drafter,
                        rank=rank,
                        rate=commitment.hit_rate(rank),
                    )
                    node.assigned |= ends_text(node, commitment)  # then nothing follows on it
                    branches.append(node)
                elif parent.next_token == token_id:
                    node = parent.children[token_id]
            self._ranks[parent_index] += 1
            self._found.append(node)
        return branches
