"""Speculative inference ("SI"): draft lookahead tokens, verify them in one forward, repeat.

Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318). Each verification
yields one token more than it accepts: the correction, or after a block accepted whole the next
one. No target forward is spent on anything else: the prompt's prefill is part of the first.

Design. There is a block, and one call in flight: a draft that adds to the block, or a verification
of it. Events change the block and end the call; `_proceed` then begins the next one, which follows
from the two alone. Whatever goes wrong with drafting makes the block shorter, down to none, which
is plain decoding; whatever goes wrong with verifying leaves it as it is.

While it drafts, its target waits, and while it verifies, its drafter: one device would do for both.
So `Invariant.BUSY_FRONTIER` does not hold, and with a bad drafter it is slower than plain decoding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_protocol.commitment import Commitment, DraftStatistics
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
from paceline_protocol.proposal import Proposal

if TYPE_CHECKING:
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
        self._drafter: int | None = None
        self._draft_count = 0
        self._verify_count = 0
        self._draft_id: int | None = None  # in flight
        self._draft_end = 0  # the block's length when all of its tokens are there
        self._verify_id: int | None = None  # in flight
        self._block: list[int] = []
        self._distributions: list[object] = []
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
            case TokensDrafted(draft_id=draft_id) if draft_id == self._draft_id:
                commands += self._take_draft(event)
            case DraftEnded(draft_id=draft_id) if draft_id == self._draft_id:
                self._draft_id = None
                self._block_complete |= not self._block
            case DraftFailed(draft_id=draft_id) if draft_id == self._draft_id:
                self._draft_id = None
                self._block_complete = True
            case BlockVerified(verify_id=verify_id) if verify_id == self._verify_id:
                commands.append(self._take_verdict(event))
            case VerifyFailed(verify_id=verify_id) if verify_id == self._verify_id:
                self._verify_id = None
            case CapacityChanged():
                commands += self._take_capacity(event)
        return commands + self._proceed()

    def stop(self) -> list[Command]:
        """End early; see DecodingMethod."""
        if self._finished:
            return []
        self._finished = True
        self.statistics.discarded += len(self._block)
        return [*self._stop_draft(), *self._abandon(), Finish(FinishReason.STOPPED)]

    def _proceed(self) -> list[Command]:
        if self._commitment.finish_reason is not None:
            self._finished = True
            return [Finish(self._commitment.finish_reason)]
        if self._draft_id is not None or self._verify_id is not None:
            return []
        missing = self._wanted - len(self._block)
        if missing > 0 and not self._block_complete and self._capacity.drafters:
            return [self._start_draft(min(missing, self._task.draft_window))]
        if self._capacity.targets:
            return [self._start_verify()]
        return []

    @property
    def _wanted(self) -> int:
        return min(self._task.lookahead, self._commitment.remaining - 1)

    def _start_draft(self, max_tokens: int) -> Command:
        self._draft_count += 1
        self._draft_id = self._draft_count
        self._drafter = self._capacity.drafters[0]
        self._draft_end = len(self._block) + max_tokens
        prefix = self._commitment.prefix + tuple(self._block)
        return StartDraft(
            self._draft_id,
            self._drafter,
            prefix=prefix,
            max_tokens=max_tokens,
            chunk_tokens=max_tokens,  # the target waits for the last one
        )

    def _start_verify(self) -> Command:
        if self._target not in self._capacity.targets:
            self._target = self._capacity.targets[0]
        self._verify_count += 1
        self._verify_id = self._verify_count
        self._block_complete = True
        return StartVerify(
            verify_id=self._verify_id,
            target=self._target,
            prefix=self._commitment.prefix,
            proposal=Proposal(tuple(self._block), distributions=tuple(self._distributions)),
            depth=0,
        )

    def _take_draft(self, event: TokensDrafted) -> list[Command]:
        proposal = event.proposal
        assert proposal.is_chain, "a drafter of one chain was asked"
        for index, token_id in enumerate(proposal.token_ids):
            self._block.append(token_id)
            self._distributions += proposal.distributions[index : index + 1]
            self.statistics.drafted += 1
            length = len(self._commitment.prefix) + len(self._block)
            self._block_complete = self._commitment.ends_after(token_id, length=length)
            if len(self._block) == self._draft_end:
                self._draft_id = None
                break
            if self._block_complete:
                return self._stop_draft()
        return []

    def _take_verdict(self, verdict: BlockVerified) -> EmitTokens:
        accepted = len(verdict.accepted_path)
        if accepted < len(self._block):
            self.statistics.rejected += 1
            self.statistics.discarded += len(self._block) - accepted - 1
        emission = self._commitment.commit(
            [*self._block[:accepted], verdict.next_token],
            accepted=[True] * accepted + [False],
            logprobs=verdict.logprobs,
        )
        self._verify_id = None
        self._block, self._distributions, self._block_complete = [], [], False
        return emission

    def _take_capacity(self, capacity: CapacityChanged) -> list[Command]:
        self._capacity = capacity
        commands: list[Command] = []
        if self._draft_id is not None and self._drafter not in capacity.drafters:
            commands += self._stop_draft()
            self._block_complete = True
        is_lost = self._target is not None and not capacity.has(self._target)
        if self._verify_id is not None and is_lost:
            commands += self._abandon()
        return commands

    def _stop_draft(self) -> list[Command]:
        if self._draft_id is None:
            return []
        draft_id, self._draft_id = self._draft_id, None
        return [StopDraft(draft_id)]

    def _abandon(self) -> list[Command]:
        if self._verify_id is None:
            return []
        verify_id, self._verify_id = self._verify_id, None
        return [AbandonVerify(verify_id)]
