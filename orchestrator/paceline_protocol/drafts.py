"""Drafts that grow a token tree: where each one's next tokens go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline_contract.proposal import NOTHING

if TYPE_CHECKING:
    from paceline_contract.proposal import Distribution, Proposal
    from paceline_protocol.commitment import Commitment
    from paceline_protocol.node import Node
    from paceline_protocol.task import DecodingTask
    from paceline_protocol.tree import TokenTree


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


@dataclass(slots=True)
class _Place:
    """A token of a draft, and how many tokens the drafter found to follow it.

    Its node is None if the token did not become part of the tree.
    """

    node: Node | None
    found_count: int = 0


class Draft:
    """A draft in flight: where its chain's next token goes, and how many of its window are to come.

    While it is cold, its drafter works through the prompt. A restart would repeat this work, so a
    cold draft goes on though the target may be ahead of it by now. Otherwise a drafter whose
    prefill takes longer than a target's step would never draft at all.

    Args:
        draft_id: Its name.
        drafter: Who drafts.
        tip: What it follows.
        missing: How many tokens its chain is to get.
        cold: Whether its drafter has found no token yet.

    Attributes:
        tip: The last token of its chain; at first what it follows.
        missing: How many tokens of its chain are still to come.
        fruitful: Whether it has found a token of its chain.
    """

    def __init__(self, draft_id: int, drafter: int, *, tip: Node, missing: int, cold: bool) -> None:
        self.draft_id = draft_id
        self.drafter = drafter
        self.tip = tip
        self.missing = missing
        self.fruitful = False
        self._cold = cold
        self._chain_end = _Place(tip)
        self._places = [self._chain_end]  # what it follows, then each token that it found

    @property
    def is_stale(self) -> bool:
        """Whether its tokens are of no use any more."""
        return not self.tip.alive or (self.tip.fact is not None and not self._cold)

    def graft(self, piece: Proposal, *, tree: TokenTree, commitment: Commitment) -> list[Node]:
        """Take in what it found, and return what stands beside its chain, each after its parent.

        Args:
            piece: See TokensDrafted.
            tree: What it grows.
            commitment: Says where sequences end, and how often tokens of each rank are right.
        """
        self._cold = False
        beside: list[Node] = []
        for index, token_id in enumerate(piece.token_ids):
            # Without parents a piece is a chain: each token follows the one before it.
            parent = self._places[piece.parents[index]] if piece.parents else self._chain_end
            parent.found_count += 1  # also for a token that the tree does not take: ranks count it
            if parent is self._chain_end:
                distribution = piece.distributions[index] if piece.distributions else None
                place = self._extend_chain(token_id, distribution, tree=tree, commitment=commitment)
            else:
                place = self._set_beside(parent, token_id, tree=tree, commitment=commitment)
                if place.node is not None:
                    beside.append(place.node)
            self._places.append(place)
        return beside

    def _extend_chain(
        self,
        token_id: int,
        distribution: Distribution | None,
        *,
        tree: TokenTree,
        commitment: Commitment,
    ) -> _Place:
        if not self.missing or self.tip.fact is not None or not can_grow(self.tip, commitment):
            return _Place(None)
        self.tip = tree.draft(
            self.tip,
            token_id,
            drafter=self.drafter,
            distribution=distribution,
            rate=commitment.hit_rate(1),
        )
        self._chain_end = _Place(self.tip)
        self.missing -= 1
        self.fruitful = True
        return self._chain_end

    def _set_beside(
        self, parent: _Place, token_id: int, *, tree: TokenTree, commitment: Commitment
    ) -> _Place:
        before, rank = parent.node, parent.found_count
        if before is None or not before.alive or not can_grow(before, commitment):
            return _Place(None)
        if before.fact is not None:
            return _Place(before.children.get(token_id))  # only the fact's token is left
        rate = commitment.hit_rate(rank)
        node = tree.branch(before, token_id, drafter=self.drafter, rank=rank, rate=rate)
        node.dispatch.assigned |= ends_text(node, commitment)  # then nothing follows on it
        return _Place(node)
