"""Plain decoding ("non-SI"): one target, one token for each forward.

Design. One decode is in flight, a window of tokens at a target that goes on by itself; what it says
is final. So there is no draft, no tree and nothing to take back; what is left is what every method
has to do about servers: stay with the target whose session has the text, and go on elsewhere when
that is lost, or leaves. It is the oracle of the other methods.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_protocol.commitment import Commitment
from paceline_protocol.messages import (
    CapacityChanged,
    Command,
    DecodeEnded,
    DecodeFailed,
    EmitTokens,
    Event,
    Finish,
    FinishReason,
    StartDecode,
    StopDecode,
    TokensDecoded,
)

if TYPE_CHECKING:
    from paceline_protocol.draft_statistics import DraftStatistics
    from paceline_protocol.task import DecodingTask


class AutoregressiveDecoding:
    """Decode with the target alone: the oracle of every other method.

    It stays with one target, whose session holds the text, until that target is lost.
    """

    def __init__(self, task: DecodingTask, capacity: CapacityChanged) -> None:
        self._task = task
        self._commitment = Commitment(task)
        self._targets = capacity.targets
        self._target: int | None = None
        self._decode_count = 0
        self._window = 0  # tokens that the decode in flight may still find
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
            case TokensDecoded(decode_id=decode_id) if self._awaits(decode_id):
                commands.append(self._take(event))
                if self._target not in self._targets:  # it leaves
                    commands += self._withdraw()
            case DecodeEnded() | DecodeFailed() if self._awaits(event.decode_id):
                self._window = 0
            case CapacityChanged(targets=targets):
                self._targets = targets
                if self._target is not None and not event.has(self._target):
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
        if self._window or not self._targets:
            return []
        if self._target not in self._targets:
            self._target = self._targets[0]
        self._decode_count += 1
        self._window = min(self._commitment.remaining, self._task.draft_window)
        return [
            StartDecode(
                decode_id=self._decode_count,
                target=self._target,
                prefix=self._commitment.prefix,
                max_tokens=self._window,
                end_ids=self._task.eos_ids,
            )
        ]

    def _awaits(self, decode_id: int) -> bool:
        return self._window > 0 and decode_id == self._decode_count

    def _take(self, event: TokensDecoded) -> EmitTokens:
        count = len(event.token_ids)
        self._window -= count
        emission = self._commitment.commit(
            event.token_ids, accepted=(False,) * count, logprobs=event.logprobs
        )
        if self._commitment.finish_reason is not None:
            self._window = 0  # the decode ends with the text
        return emission

    def _withdraw(self) -> list[Command]:
        if not self._window:
            return []
        self._window = 0
        return [StopDecode(self._decode_count)]
