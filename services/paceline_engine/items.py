"""What a model is asked to compute, and what a step of it gives: plain data.

The event loop makes an item, the worker queues it, and the backend runs it step by step until it is
done (`Item.take`). A step is an item's part in one forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline_engine.proposal import Proposal

if TYPE_CHECKING:
    from array import array

    from paceline_engine.calls import SessionSpec
    from paceline_engine.model_cache import ModelCache

__all__ = ["ANTICIPATED", "Draft", "Item", "Judge", "Judgement", "Outcome"]

ANTICIPATED = 1 << 20
"""The depth of what nobody has asked for yet: less urgent than all that somebody has."""

_NOTHING = Proposal()


@dataclass(frozen=True, slots=True)
class Judge:
    """Judge a proposal, and choose the token after what is accepted."""

    proposal: Proposal
    logprobs: bool = False


@dataclass(frozen=True, slots=True)
class Draft:
    """Find tokens that follow."""

    max_tokens: int = 1


@dataclass(frozen=True, slots=True)
class Judgement:
    """A target's word on a proposal: see VerifyResponse in target_service.proto."""

    accepted_path: tuple[int, ...]
    next_token: int
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one step gave one item: with neither judgement nor draft, progress in a long prefix.

    Attributes:
        row_count: Token positions that were computed for it.
        judgement: The answer to a Judge, with its last step.
        drafted: Tokens that follow: none, one or several.
        is_inner: Whether it was a step within a stack that had to find none.
    """

    row_count: int
    judgement: Judgement | None = None
    drafted: Proposal = _NOTHING
    is_inner: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether it got past its prefix."""
        return self.judgement is not None or len(self.drafted) > 0 or self.is_inner


@dataclass(eq=False, slots=True)
class Item:
    """A task at a text.

    Attributes:
        cache: The text's state in the model.
        spec: How tokens are chosen there, and whose work it is.
        prefix: What the task builds on, one token or more; a draft's own tokens are appended.
        task: What to do.
        depth: How urgent: the smallest first.
        patience_ns: How long a forward of it may take before it counts as hung; None: for ever.
        found_count: Tokens drafted so far.
        longest_ahead: Of a Judge: how long a text the model may go on with by itself after the
            verdict; 0: it does not go on.
    """

    cache: ModelCache
    spec: SessionSpec
    prefix: array[int]
    task: Judge | Draft
    depth: int = 0
    patience_ns: int | None = None
    found_count: int = 0
    longest_ahead: int = 0

    @property
    def share(self) -> str:
        """Whose work it is."""
        return self.spec.share

    @property
    def block(self) -> tuple[int, ...]:
        """The tokens after the prefix that its next forward computes, too."""
        return tuple(self.task.proposal.token_ids) if isinstance(self.task, Judge) else ()

    @property
    def stage(self) -> int:
        """Which of a backend's models computes its next forward. Worker thread only."""
        return self.cache.stage(self.prefix)

    def row_count(self) -> int:
        """Count the rows that a forward needs to give it more than progress. Worker thread only."""
        return self.cache.missing_length(self.prefix) + len(self.block)

    def ahead(self, judgement: Judgement) -> Item | None:
        """Return what is asked next, if the caller goes on from this answer; None past the limit.

        It does not go on from there by itself.
        """
        assert isinstance(self.task, Judge)
        if len(self.prefix) + len(judgement.accepted_path) + 1 > self.longest_ahead:
            return None
        prefix = self.prefix[:]
        prefix.extend(self.task.proposal.along(judgement.accepted_path))
        prefix.append(judgement.next_token)
        task = Judge(_NOTHING, self.task.logprobs)
        return Item(self.cache, self.spec, prefix, task, ANTICIPATED, self.patience_ns)

    def asks_the_same(self, other: Item) -> bool:
        """Whether both have one answer. A draft's may have gone out in part, so it never has."""
        return (
            isinstance(self.task, Judge) and self.task == other.task and self.prefix == other.prefix
        )

    def take(self, outcome: Outcome) -> bool:
        """Take in what a step gave, and tell whether it was the last."""
        if isinstance(self.task, Judge):
            return outcome.judgement is not None
        self.prefix.extend(outcome.drafted.token_ids)
        self.found_count += len(outcome.drafted)
        return self.found_count >= self.task.max_tokens
