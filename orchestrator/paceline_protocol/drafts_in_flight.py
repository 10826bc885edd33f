"""Drafts of several drafters at once: each drafter goes on after a token, or rests.

Each drafter extends one chain of the token tree, a window at a time. The text itself, where it is
one of them, does nothing unasked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_protocol.drafts import Draft, can_grow
from paceline_protocol.messages import (
    DraftEnded,
    DraftFailed,
    StartDraft,
    StopDraft,
    TokensDrafted,
)
from paceline_protocol.task import SPECULATION_LIMIT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_contract.proposal import Proposal
    from paceline_protocol.branches import BranchQueue
    from paceline_protocol.commitment import Commitment
    from paceline_protocol.messages import CapacityChanged, Command
    from paceline_protocol.node import Node
    from paceline_protocol.task import DecodingTask
    from paceline_protocol.tree import TokenTree


class DraftsInFlight:
    """The drafts in flight, at most one of each drafter.

    Args:
        tree: What they grow.
        commitment: What is final, and where the text ends.
        capacity: The drafters there are.
        waiting: Takes what they find beside their chains; None if no target would take it up.

    Attributes:
        tips: The last token that a drafter found, by drafter.
    """

    def __init__(
        self,
        tree: TokenTree,
        *,
        commitment: Commitment,
        capacity: CapacityChanged,
        waiting: BranchQueue | None = None,
    ) -> None:
        self.tips: dict[int, Node] = {}
        self._tree = tree
        self._commitment = commitment
        self._capacity = capacity
        self._waiting = waiting
        self._in_flight: dict[int, Draft] = {}
        self._count = 0
        self._warm: set[int] = set()  # drafters that have found a token
        self._resting: dict[int, int] = {}  # by drafter that found nothing: the length then
        self._text_ends: Node | None = None  # where the text says nothing

    def __contains__(self, draft_id: int) -> bool:
        return draft_id in self._in_flight

    def __len__(self) -> int:
        return len(self._in_flight)

    # --- what happened ------------------------------------------------------------------------

    def take(self, event: TokensDrafted | DraftEnded | DraftFailed) -> list[Command]:
        """Take in what became of one of them: its next tokens, or its end."""
        draft = self._in_flight[event.draft_id]
        match event:
            case TokensDrafted(proposal=proposal):
                return self._grow(draft, proposal)
            case DraftFailed():
                self._rest(draft)
            case DraftEnded() if not draft.fruitful:
                self._rest(draft)
        del self._in_flight[event.draft_id]
        return []

    def _grow(self, draft: Draft, proposal: Proposal) -> list[Command]:
        self._warm.add(draft.drafter)
        branches = draft.graft(proposal, tree=self._tree, commitment=self._commitment)
        if self._waiting is not None:
            self._waiting.extend(branches)
        self.tips[draft.drafter] = draft.tip
        if draft.missing == 0:
            del self._in_flight[draft.draft_id]
        elif not can_grow(draft.tip, self._commitment):
            return [self._stop(draft)]
        return []

    def change(self, capacity: CapacityChanged) -> list[Command]:
        """Stop those of drafters that are lost."""
        self._capacity = capacity
        self._warm.intersection_update(capacity.drafters)
        lost = [d for d in self._in_flight.values() if d.drafter not in capacity.drafters]
        return [self._stop(draft) for draft in lost]

    def _rest(self, draft: Draft) -> None:
        # Until something is committed, so that a broken drafter is not asked in a busy loop; the
        # text is asked again for another end.
        self._resting[draft.drafter] = len(self._commitment.prefix)
        if draft.drafter == self._capacity.text:
            self._text_ends = draft.tip

    # --- questions ----------------------------------------------------------------------------

    @property
    def came_to_nothing(self) -> bool:
        """Whether one has found nothing, or failed, since the last commitment."""
        return len(self._commitment.prefix) in self._resting.values()

    @property
    def awaits_text(self) -> bool:
        """Whether the text was asked, and has not answered."""
        return any(draft.drafter == self._capacity.text for draft in self._in_flight.values())

    def grows_at(self, tip: Node) -> bool:
        """Whether one of them goes on at a node."""
        return any(draft.tip is tip for draft in self._in_flight.values())

    def drafted_length(self, path: Sequence[Node]) -> int:
        """Return how much of a path is drafted: not what the text said beyond a model at work."""
        if self._capacity.text is not None:
            for length in range(len(path), 0, -1):
                if self.grows_at(path[length - 1]):
                    return length
                if path[length - 1].draft.drafter != self._capacity.text:
                    break
        return len(path)

    # --- commands -----------------------------------------------------------------------------

    def start(
        self, drafter: int, tip: Node, *, window: int, task: DecodingTask, chunk_tokens: int = 1
    ) -> Command:
        """Let a drafter that has none draft after a token.

        Args:
            drafter: The drafter.
            tip: What its chain follows.
            window: How long the chain gets at most.
            task: What is asked of the request.
            chunk_tokens: See StartDraft.
        """
        self._count += 1
        self._in_flight[self._count] = Draft(
            self._count, drafter, tip=tip, missing=window, cold=drafter not in self._warm
        )
        is_text = drafter == self._capacity.text  # it says one thing, if any
        return StartDraft(
            self._count,
            drafter,
            self._commitment.prefix + self._tree.token_ids_to(tip),
            max_tokens=window,
            chunk_tokens=chunk_tokens,
            width=1 if is_text else task.width,
            branch_count=0 if is_text else task.branches,
        )

    def draft_on(self, task: DecodingTask) -> list[Command]:
        """Let drafters that have none go on with their chains."""
        commands: list[Command] = []
        committed = len(self._commitment.prefix)
        busy = {draft.drafter for draft in self._in_flight.values()}
        for drafter in self._capacity.drafters:
            if drafter in busy or drafter == self._capacity.text:
                continue
            tip = self._tree.surviving(self.tips.get(drafter, self._tree.root))
            tip = self.tips[drafter] = self._tree.end_of_chain(tip, drafter=drafter)
            if self._resting.get(drafter) == committed:
                continue
            useful = self._commitment.limit - 1 - tip.length
            window = min(task.window, useful)
            is_near = tip.length + window <= committed + SPECULATION_LIMIT
            if is_near and can_grow(tip, self._commitment):
                commands.append(self.start(drafter, tip, window=window, task=task))
        return commands

    def ask_text(self, task: DecodingTask) -> list[Command]:
        """Let the text draft after the main path's end, unless its last draft still waits there."""
        text = self._capacity.text
        if text is None or not self._capacity.targets:
            return []
        tip = self._tree.main_path()[-1]
        window = min(task.lookahead, self._commitment.limit - 1 - tip.length)
        waits = tip.draft.drafter == text and not tip.dispatch.assigned
        ends = tip is self._text_ends or not can_grow(tip, self._commitment)
        is_far = tip.length + window > len(self._commitment.prefix) + SPECULATION_LIMIT
        if waits or ends or is_far or self.awaits_text:
            return []
        return [self.start(text, tip, window=min(window, task.draft_window), task=task)]

    def stop_stale(self) -> list[Command]:
        """Withdraw drafts whose tokens are of no use any more."""
        return [self._stop(draft) for draft in list(self._in_flight.values()) if draft.is_stale]

    def stop_all(self) -> list[Command]:
        """Withdraw what is left."""
        return [self._stop(draft) for draft in list(self._in_flight.values())]

    def _stop(self, draft: Draft) -> Command:
        del self._in_flight[draft.draft_id]
        return StopDraft(draft.draft_id)
