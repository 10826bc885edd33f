"""Plain decoding ("non-SI"): one target, one token for each forward.

Design. One verification is in flight, and judges nothing: what it says is final. So there is no
draft, no tree and nothing to take back; what is left is what every method has to do about servers:
stay with the target whose session has the text, let one that leaves finish, and repeat elsewhere
what was lost. It is the oracle of the other methods, and what they come down to without a drafter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_protocol.commitment import Commitment, DraftStatistics
from paceline_protocol.messages import (
    AbandonVerify,
    BlockVerified,
    CapacityChanged,
    Command,
    Event,
    Finish,
    FinishReason,
    StartVerify,
    VerifyFailed,
)
from paceline_protocol.proposal import Proposal

if TYPE_CHECKING:
    from paceline_protocol.task import DecodingTask

__all__ = ["AutoregressiveDecoding"]


class AutoregressiveDecoding:
    """Decode with the target alone: the oracle of every other method.

    It stays with one target, whose session holds the text, until that target is lost.
    """

    def __init__(self, task: DecodingTask, capacity: CapacityChanged) -> None:
        self._commitment = Commitment(task)
        self._targets = capacity.targets
        self._target: int | None = None
        self._verify_count = 0
        self._verifying = False
        self._finished = False

    @property
    def statistics(self) -> DraftStatistics:
        """What became of the draft tokens: there are none."""
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
                self._verifying = False
                emission = self._commitment.commit(
                    (event.next_token,), accepted=(False,), logprobs=event.logprobs[-1:]
                )
                commands.append(emission)
            case VerifyFailed(verify_id=verify_id) if self._awaits(verify_id):
                self._verifying = False
            case CapacityChanged(targets=targets):
                self._targets = targets
                if self._verifying and self._target is not None and not event.has(self._target):
                    commands += self._withdraw()
            case _:
                return []
        return commands + self._proceed()

    def stop(self) -> list[Command]:
        """End early; see DecodingMethod."""
        if self._finished:
            return []
        self._finished = True
        return [*self._withdraw(), Finish(FinishReason.STOPPED)]

    def _proceed(self) -> list[Command]:
        if self._commitment.finish_reason is not None:
            self._finished = True
            return [Finish(self._commitment.finish_reason)]
        if self._verifying or not self._targets:
            return []
        if self._target not in self._targets:
            self._target = self._targets[0]
        self._verify_count += 1
        self._verifying = True
        return [
            StartVerify(
                verify_id=self._verify_count,
                target=self._target,
                prefix=self._commitment.prefix,
                proposal=Proposal(),
                depth=0,
                anticipate=self._commitment.remaining > 1,
            )
        ]

    def _awaits(self, verify_id: int) -> bool:
        return self._verifying and verify_id == self._verify_count

    def _withdraw(self) -> list[Command]:
        if not self._verifying:
            return []
        self._verifying = False
        return [AbandonVerify(self._verify_count)]
