"""Speculative inference ("SI"): draft lookahead tokens, verify them in one forward, repeat.

Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318). Each verification
yields one token more than it accepts: the correction, or after a block accepted whole the next
one. No target forward is spent on anything else: the prompt's prefill is part of the first.

Design. There is a block, and one call in flight: a draft that adds to the block, or a verification
of it. Events change the block and end the call; `_proceed` then begins the next one, which follows
from the two alone. Whatever goes wrong with drafting makes the block shorter, down to none, which
is plain decoding; whatever goes wrong with verifying leaves it as it is.

The block is the main path of a token tree (`tree.py`). With a width of 2 or more the drafter finds
branches beside it, and the verification judges as many as a tree may have, the likeliest first.
What was drafted behind a correction and not judged is the beginning of the next block.

While it drafts, its target waits, and while it verifies, its drafter: one device would do for both.
So `Invariant.BUSY_FRONTIER` does not hold, and with a bad drafter it is slower than plain decoding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_protocol.branches import branches_beside
from paceline_protocol.commitment import Commitment, DraftStatistics
from paceline_protocol.drafts import Draft, can_grow, ends_text
from paceline_protocol.messages import (
    AbandonVerify,
    BlockVerified,
    CapacityChanged,
    Command,
    DraftEnded,
    DraftFailed,
    EmitTokens,
    Event,
    Finish,
    FinishReason,
    StartDraft,
    StartVerify,
    StopDraft,
    TokensDrafted,
    VerifyFailed,
)
from paceline_protocol.tree import Node, TokenTree
from paceline_protocol.verification import Verification

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_protocol.task import DecodingTask

__all__ = ["SpeculativeDecoding"]


class SpeculativeDecoding:
    """Decode with one drafter and one target, in turn.

    A round drafts min(lookahead, tokens still useful) tokens and has them verified. If the drafter
    fails, is lost or there is none, what there is gets verified: at worst an empty block, which is
    plain decoding. A failed verification is repeated with the same block.
    """

    def __init__(self, task: DecodingTask, capacity: CapacityChanged) -> None:
        self._task = task
        self._commitment = Commitment(task)
        self._capacity = capacity
        self._target: int | None = None
        self._draft_count = 0
        self._verify_count = 0
        self._draft: Draft | None = None  # in flight
        self._verification: Verification | None = None  # in flight
        self._drafted = TokenTree(
            task.prompt[-1], length=len(task.prompt), statistics=self._commitment.statistics
        )
        self._block_complete = False
        self._finished = False

    @property
    def statistics(self) -> DraftStatistics:
        """What became of the draft tokens."""
        return self._commitment.statistics

    def start(self) -> list[Command]:
        """Begin; see DecodingMethod."""
        return self._proceed()

    def handle(self, event: Event) -> list[Command]:
        """Take in an event; see DecodingMethod."""
        if self._finished:
            return []
        commands: list[Command] = []
        match event:
            case TokensDrafted(draft_id=draft_id) if self._is_drafting(draft_id):
                commands += self._take_draft(event)
            case DraftEnded(draft_id=draft_id) if self._is_drafting(draft_id):
                self._block_complete |= self._draft is not None and not self._draft.fruitful
                self._draft = None
            case DraftFailed(draft_id=draft_id) if self._is_drafting(draft_id):
                self._draft = None
                self._block_complete = True
            case BlockVerified(verify_id=verify_id) if self._is_verifying(verify_id):
                commands.append(self._take_verdict(event))
            case VerifyFailed(verify_id=verify_id) if self._is_verifying(verify_id):
                self._end_verification()
            case CapacityChanged():
                commands += self._take_capacity(event)
        return commands + self._proceed()

    def stop(self) -> list[Command]:
        """End early; see DecodingMethod."""
        if self._finished:
            return []
        self._finished = True
        self._drafted.discard()
        return [*self._stop_draft(), *self._abandon(), Finish(FinishReason.STOPPED)]

    def _proceed(self) -> list[Command]:
        if self._commitment.finish_reason is not None:
            self._finished = True
            return [Finish(self._commitment.finish_reason)]
        if self._draft is not None or self._verification is not None:
            return []
        block = self._block
        missing = self._wanted - (len(block) - 1)
        is_complete = self._block_complete or ends_text(block[-1], self._commitment)
        if missing > 0 and not is_complete and self._capacity.drafters:
            return [self._start_draft(block[-1], min(missing, self._task.window))]
        if self._capacity.targets:
            return [self._start_verify(block[: self._wanted + 1])]
        return []

    @property
    def _wanted(self) -> int:
        return min(self._task.lookahead, self._commitment.remaining - 1)

    @property
    def _block(self) -> list[Node]:
        """The last final token, then what was drafted after it."""
        return self._drafted.main_path()

    def _is_drafting(self, draft_id: int) -> bool:
        return self._draft is not None and self._draft.draft_id == draft_id

    def _is_verifying(self, verify_id: int) -> bool:
        return self._verification is not None and self._verification.verify_id == verify_id

    def _start_draft(self, tip: Node, max_tokens: int) -> Command:
        self._draft_count += 1
        drafter = self._capacity.drafters[0]
        self._draft = Draft(self._draft_count, drafter, tip, missing=max_tokens, cold=False)
        drafted = (node.token_id for node in self._drafted.path_to(tip)[1:])
        return StartDraft(
            self._draft_count,
            drafter,
            prefix=(*self._commitment.prefix, *drafted),
            max_tokens=max_tokens,
            chunk_tokens=max_tokens,  # the target waits for the last one
            # The text says one thing, if any.
            width=self._task.width if drafter != self._capacity.text else 1,
            branch_count=self._task.branches if drafter != self._capacity.text else 0,
        )

    def _start_verify(self, trunk: Sequence[Node]) -> Command:
        if self._target not in self._capacity.targets:
            self._target = self._capacity.targets[0]
        self._verify_count += 1
        self._block_complete = True
        self._verification = verification = Verification(
            self._verify_count,
            self._target,
            trunk=tuple(trunk),
            kept=None,
            depth=0,
            warms_up=False,
            branches=branches_beside(trunk, task=self._task),
        )
        for node in verification.branches:
            node.assigned = node.rides = True
        self.statistics.branch_judged += len(verification.branches)
        return StartVerify(
            verify_id=self._verify_count,
            target=self._target,
            prefix=self._commitment.prefix,
            proposal=verification.proposal(rule=self._task.rule),
            depth=0,
        )

    def _end_verification(self) -> None:
        if self._verification is not None:
            self._verification.release()
            self._verification = None

    def _take_draft(self, event: TokensDrafted) -> list[Command]:
        draft = self._draft
        assert draft is not None
        draft.graft(event.proposal, tree=self._drafted, commitment=self._commitment)
        if draft.missing == 0:
            self._draft = None
        elif not can_grow(draft.tip, self._commitment):
            self._block_complete = True
            return self._stop_draft()
        return []

    def _take_verdict(self, verdict: BlockVerified) -> EmitTokens:
        verification = self._verification
        assert verification is not None
        node = verification.trunk[0]
        for accepted in verification.along(verdict.accepted_path):
            self._drafted.decide(node, accepted.token_id, None)
            node = accepted
        self._drafted.decide(node, verdict.next_token, None)
        self._end_verification()
        self._block_complete = False
        passed = self._drafted.advance()
        return self._commitment.commit(
            [each.token_id for each in passed],
            accepted=[each.drafter is not None for each in passed],
            logprobs=verdict.logprobs,
        )

    def _take_capacity(self, capacity: CapacityChanged) -> list[Command]:
        self._capacity = capacity
        commands: list[Command] = []
        if self._draft is not None and self._draft.drafter not in capacity.drafters:
            commands += self._stop_draft()
            self._block_complete = True
        is_lost = self._target is not None and not capacity.has(self._target)
        if self._verification is not None and is_lost:
            commands += self._abandon()
        return commands

    def _stop_draft(self) -> list[Command]:
        if self._draft is None:
            return []
        draft, self._draft = self._draft, None
        return [StopDraft(draft.draft_id)]

    def _abandon(self) -> list[Command]:
        if self._verification is None:
            return []
        verify_id = self._verification.verify_id
        self._end_verification()
        return [AbandonVerify(verify_id)]
