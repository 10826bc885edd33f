"""The committed tokens of a request, and where they end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_protocol.draft_statistics import DraftStatistics
from paceline_protocol.messages import EmitTokens, FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_protocol.task import DecodingTask

# How many observed places the hit rates known at a request's start count for.
_KNOWN_COUNT = 20
# Never 0, since worths are logarithms.
_LEAST_RATE = 1e-6


class Commitment:
    """The tokens that are final, from the prompt on.

    Attributes:
        prefix: All of them.
        limit: The most there can be.
        finish_reason: Why there will be no more, or None.
        statistics: What became of the draft tokens.
    """

    def __init__(self, task: DecodingTask) -> None:
        self.prefix = task.prompt
        self._prompt_length = len(task.prompt)
        self.limit = self._prompt_length + task.max_tokens
        self.finish_reason = None if task.max_tokens else FinishReason.LENGTH
        self.statistics = DraftStatistics()
        self._eos_ids = task.eos_ids
        self._known_rates = task.hit_rates

    @property
    def remaining(self) -> int:
        """How many tokens may still come."""
        return self.limit - len(self.prefix)

    def hit_rate(self, rank: int) -> float:
        """Return how often a drafter's token of a rank, from 1 on, is expected to be right.

        By what was known at the start, and what was seen since.
        """
        ranks = self.statistics.ranks
        right = ranks[rank] + _KNOWN_COUNT * self._known_rates[rank - 1]
        return max(_LEAST_RATE, right / (sum(ranks.values()) + _KNOWN_COUNT))

    def ends_after(self, token_id: int, *, length: int) -> bool:
        """Whether a text of this length that ends with this token goes no further.

        The prompt itself always goes on, whatever its last token.
        """
        is_over = length >= self.limit or token_id in self._eos_ids
        return is_over and length > self._prompt_length

    def commit(
        self,
        token_ids: Sequence[int],
        *,
        accepted: Sequence[bool],
        logprobs: Sequence[float] = (),
    ) -> EmitTokens:
        """Make one or more tokens final; what follows the end of the text is left out.

        Args:
            accepted: For each whether it is an accepted draft token.
            logprobs: One for each, or none.
        """
        count = 0
        for token_id, was_drafted in zip(token_ids, accepted, strict=True):
            count += 1
            if was_drafted:
                self.statistics.accepted += 1
            else:
                self.statistics.own += 1
            if self.ends_after(token_id, length=len(self.prefix) + count):
                at_eos = token_id in self._eos_ids
                self.finish_reason = FinishReason.EOS if at_eos else FinishReason.LENGTH
                break
        self.prefix += tuple(token_ids[:count])
        return EmitTokens(
            tuple(token_ids[:count]), tuple(accepted[:count]), tuple(logprobs[:count])
        )
