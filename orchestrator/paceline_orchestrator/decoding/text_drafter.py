"""The text of a request as one of its drafters: Max-Gram over prompt and output, without a server.

Another way to guess from the text is another `Proposer`; see docs/extending.md.

What the client predicts of the answer is read before the prompt, behind a copy of the prompt's last
tokens. So the end of the prompt stands before the prediction, too, and is copied from there.

It has a slot behind those of the servers. Its drafts are answered in the very turn in which they
are asked for: an answer takes microseconds. Reading a prompt takes some 10 to 50 us a token, so
that is done piece by piece, between other work, and only once the text is to draft. And it takes
memory, for which there is one room in a process: what comes when that is nearly full has less of
its prompt searched, or guesses nothing.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from paceline_contract.max_gram import IndexRoom
from paceline_contract.proposal import NOTHING, Proposal
from paceline_orchestrator.decoding.guesses import Guesses
from paceline_orchestrator.decoding.statistics import TextStatistics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from paceline_contract.proposal import Distribution
    from paceline_protocol.messages import CapacityChanged, StartDraft

TEXT_DRAFTER = "max-gram"
"""What the timeline calls it, where a server's name stands else."""

# Of a prompt, the last so many tokens are searched: the index takes some 0.5 KB for each.
_MOST_TOKENS = 16_384
_PIECE_TOKENS = 32
# Of these at most so many are of a prediction; and so many of the prompt's last tokens lead to it.
_MOST_PREDICTED = _MOST_TOKENS // 2
_LEADING_TOKENS = 32


class Proposer(Protocol):
    """A text that guesses how it goes on, in microseconds; `MaxGram` is one."""

    def extend(self, token_ids: Iterable[int], /) -> None:
        """Append tokens."""

    def follow(self, token_ids: Sequence[int], *, start: int) -> None:
        """Have the text be its first `start` tokens and then these."""

    def propose(self, count: int, /) -> list[int]:
        """Return at most `count` tokens that may follow."""

    @property
    def source(self) -> int | None:
        """Where in the text the first token of the next proposal stands; None: nowhere."""


class TextDrafter:
    """Drafts from a request's own text.

    Args:
        prompt: The text so far.
        proposer: What shall read it, and guess; it has read nothing yet.
        slot: Its index among the drafters: the one after the servers'.
        is_beside: Whether it drafts beside servers; else only while there is none.
        make_distribution: Under rejection sampling: makes what a token was drawn from.
        room: Shared by all texts, for what the proposer reads; `close` gives back what it took.
        predicted: What the client predicts, after the last tokens of the prompt that it was asked.

    Attributes:
        statistics: What became of what it drafted.
        drafts: Whether there is work for a drafter at all.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        *,
        proposer: Proposer,
        slot: int,
        is_beside: bool,
        make_distribution: Callable[[int], Distribution] | None = None,
        room: IndexRoom | None = None,
        predicted: Sequence[int] = (),
        asked: Sequence[int] = (),
    ) -> None:
        self._prompt = prompt
        self._slot = slot
        self._is_beside = is_beside
        self._make_distribution = make_distribution
        self._proposer = proposer
        self._room = room or IndexRoom()
        self._taken = 0  # of that room
        self._before = (
            (*asked[-_LEADING_TOKENS:], *predicted)[:_MOST_PREDICTED] if predicted else ()
        )
        self._shift = -len(prompt)  # of places in the text to those in the index
        self._is_ready = False
        self._final_length = len(prompt)  # of the whole text
        self._indexed_length = len(prompt)  # of that, what the index has, and is final
        self._guesses = Guesses(len(prompt))  # marked: copied from the prediction
        self.statistics = TextStatistics(predicted=len(predicted))
        self.drafts = True

    def is_wanted(self, capacity: CapacityChanged) -> bool:
        """Whether it shall draft, with these servers there."""
        return self.drafts and (self._is_beside or not capacity.drafters)

    def join(self, capacity: CapacityChanged) -> CapacityChanged:
        """Take its slot beside these servers, if it is wanted and has read the prompt."""
        if not (self._is_ready and self.is_wanted(capacity)):
            return capacity
        return replace(capacity, drafters=(*capacity.drafters, self._slot), text=self._slot)

    def is_at(self, drafter: int) -> bool:
        """Whether this is its slot."""
        return drafter == self._slot

    async def read_prompt(self) -> None:
        """Read the prompt, as much of its end as there is room for; others work in between."""
        self._taken = self._room.take(min(len(self._before) + len(self._prompt), _MOST_TOKENS))
        self._before = self._before[: self._taken]
        skipped = len(self._prompt) + len(self._before) - self._taken
        text = (*self._before, *self._prompt[skipped:])
        for start in range(0, len(text), _PIECE_TOKENS):
            self._proposer.extend(text[start : start + _PIECE_TOKENS])
            await asyncio.sleep(0)
        self._shift = len(self._before) - skipped
        self._indexed_length = len(self._prompt)
        self._is_ready = True

    def propose(self, draft: StartDraft) -> Proposal:
        """Return what the text says, which may be nothing."""
        length = len(draft.prefix) + self._shift
        if not (self._is_ready and self._has_room_for(length)):
            return NOTHING
        start = self._indexed_length
        self._proposer.follow(draft.prefix[start:], start=start + self._shift)
        self._indexed_length = min(self._final_length, len(draft.prefix))
        found = self._proposer.propose(draft.max_tokens)
        if not found:
            return NOTHING
        self.statistics.drafted += len(found)
        self._guesses.add(draft.prefix, found, are_marked=self._are_predicted(len(found)))
        make = self._make_distribution
        return Proposal(tuple(found), distributions=tuple(map(make, found)) if make else ())

    def close(self) -> None:
        """Leave its room to others; it proposes nothing after that."""
        self._room.give_back(self._taken)
        self._taken, self._is_ready = 0, False

    def finalize(self, token_ids: Sequence[int]) -> None:
        """Let tokens become final, and see whether they are what was proposed."""
        self._final_length += len(token_ids)
        for token_id in token_ids:
            verdicts = self._guesses.finalize(token_id)
            if verdicts:
                is_right = any(it.is_right for it in verdicts)
                self.statistics.accepted += is_right
                self.statistics.rejected += not is_right
                is_predicted = any(it.is_right and it.is_marked for it in verdicts)
                self.statistics.predicted_accepted += is_predicted

    def _has_room_for(self, count: int) -> bool:
        """Take what room is missing for so many tokens; tell whether there is enough."""
        self._taken += self._room.take(max(0, count - self._taken))
        return count <= self._taken

    def _are_predicted(self, count: int) -> list[bool]:
        """Tell which tokens of the last proposal were copied from the prediction."""
        source = self._proposer.source if self._before else None
        end = len(self._before)
        return [source is not None and source + index < end for index in range(count)]
