"""Self-speculation ("self-SI"): a target judges its own guesses, and guesses anew in that forward.

Speculative Streaming (Bhendawade et al. 2024, arXiv 2402.11131), Section 3.1, and Medusa (Cai et
al. 2024, arXiv 2401.10774), Section 2.1: what makes the guesses is the target's business, and all
the same here. There is no drafter, and no forward but those that decide.

Design. One verification is in flight: of the text, and of the tree that the last verdict proposed
to follow it. Its verdict commits the accepted path and one token more, and proposes the next tree.
The first one has nothing to judge, so with a target that never proposes this is plain decoding, a
call for each token. A tree keeps what can become output: nothing after an end id, nor beyond the
last token but one. What is asked a second time, of this target or another, is the tree's first
chain: every target can judge that, also one that cannot judge trees.

Difference: typical acceptance (Medusa, Section 2.3.1) is not there; it does not keep the target's
distribution. Under rejection sampling targets propose nothing, since what they guess is drawn from
no distribution.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_contract.calls import VerificationRule
from paceline_contract.proposal import NOTHING, Proposal
from paceline_protocol.commitment import Commitment
from paceline_protocol.messages import (
    AbandonVerify,
    BlockVerified,
    CapacityChanged,
    Command,
    EmitTokens,
    Event,
    Finish,
    FinishReason,
    StartVerify,
    VerifyFailed,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_protocol.draft_statistics import DraftStatistics
    from paceline_protocol.task import DecodingTask


class SelfSpeculativeDecoding:
    """Decode with one target that drafts for itself.

    It stays with one target, whose session holds the text, until that target is lost.
    """

    def __init__(self, task: DecodingTask, capacity: CapacityChanged) -> None:
        self._task = task
        self._commitment = Commitment(task)
        self._targets = capacity.targets
        self._target: int | None = None
        self._verify_count = 0
        self._is_verifying = False
        self._proposal = NOTHING  # what the target guesses to follow the text
        self._finished = False

    @property
    def statistics(self) -> DraftStatistics:
        """What became of the target's guesses."""
        return self._commitment.statistics

    def start(self) -> list[Command]:
        """Begin; see DecodingMethod."""
        return self._proceed()

    def handle(self, event: Event) -> list[Command]:
        """Take in an event; see DecodingMethod."""
        commands: list[Command] = []
        match event:
            case _ if self._finished:
                return []
            case BlockVerified(verify_id=verify_id) if self._awaits(verify_id):
                commands.append(self._take_verdict(event))
            case VerifyFailed(verify_id=verify_id) if self._awaits(verify_id):
                self._give_up()
            case CapacityChanged(targets=targets):
                self._targets = targets
                if self._is_verifying and not event.has(self._verifier):
                    commands.append(AbandonVerify(self._verify_count))
                    self._give_up()
            case _:
                return []
        return commands + self._proceed()

    def stop(self) -> list[Command]:
        """End early; see DecodingMethod."""
        if self._finished:
            return []
        self._finished = True
        self.statistics.discarded += len(self._proposal)
        withdrawn: list[Command] = [AbandonVerify(self._verify_count)] if self._is_verifying else []
        return [*withdrawn, Finish(FinishReason.STOPPED)]

    def _proceed(self) -> list[Command]:
        if self._commitment.finish_reason is not None:
            self._finished = True
            return [Finish(self._commitment.finish_reason)]
        if self._is_verifying or not self._targets:
            return []
        if self._target not in self._targets:
            self._target = self._targets[0]
            self._keep_first_chain()
        self._verify_count += 1
        self._is_verifying = True
        return [
            StartVerify(
                verify_id=self._verify_count,
                target=self._target,
                prefix=self._commitment.prefix,
                proposal=self._proposal,
                depth=0,
                # After its verdict a token is left for a guess, and one for the target.
                propose=self._is_exact and self._commitment.remaining > 2,
            )
        ]

    @property
    def _is_exact(self) -> bool:
        return self._task.rule is VerificationRule.EXACT

    @property
    def _verifier(self) -> int:
        assert self._target is not None, "a verification runs at a target"
        return self._target

    def _awaits(self, verify_id: int) -> bool:
        return self._is_verifying and verify_id == self._verify_count

    def _give_up(self) -> None:
        self._is_verifying = False
        self._keep_first_chain()  # another server may take its slot next

    def _keep_first_chain(self) -> None:
        chain = self._proposal.only(self._proposal.trunk).compact()
        self.statistics.discarded += len(self._proposal) - len(chain)
        self._proposal = chain

    def _take_verdict(self, verdict: BlockVerified) -> EmitTokens:
        self._is_verifying = False
        judged, path = self._proposal, verdict.accepted_path
        corrections, rejected = _corrections_and_rejections(judged, path)
        self.statistics.corrections_ahead += corrections
        self.statistics.rejected += rejected
        self.statistics.discarded += len(judged) - len(path) - rejected
        emission = self._commitment.commit(
            (*judged.along(path), verdict.next_token),
            accepted=(True,) * len(path) + (False,),
            logprobs=verdict.logprobs,
        )
        self._proposal = NOTHING
        if self._is_exact and self._commitment.finish_reason is None:
            # The last token is the target's own.
            self._proposal = verdict.proposal.useful_part(
                longest=self._commitment.remaining - 1, end_ids=self._task.eos_ids
            )
            self.statistics.drafted += len(self._proposal)
        return emission


def _corrections_and_rejections(proposal: Proposal, path: Sequence[int]) -> tuple[int, int]:
    """Return how many runners-up were accepted, and how many first choices were not.

    The other runners-up are judged, too, but nobody held them likely.
    """
    first: dict[int, int] = {}
    for index, parent in enumerate(proposal.all_parents):
        first.setdefault(parent, index)
    places = (0, *(index + 1 for index in path))
    corrections = sum(first[place] != index for place, index in zip(places, path, strict=False))
    return corrections, sum(place in first for place in places) - (len(path) - corrections)
