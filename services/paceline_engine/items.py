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

__all__ = ["ANTICIPATED", "Decode", "Draft", "Item", "Judge", "Judgement", "Outcome"]

ANTICIPATED = 1 << 20
"""The depth of what nobody has asked for yet: less urgent than all that somebody has."""

_NOTHING = Proposal()


@dataclass(frozen=True, slots=True)
class Judge:
    """Judge a proposal, and choose the token after what is accepted."""

    proposal: Proposal
    logprobs: bool = False


@dataclass(frozen=True, slots=True)
class Decode:
    """Choose the tokens that follow, one in each step, up to one of the end tokens."""

    max_tokens: int
    end_token_ids: frozenset[int] = frozenset()
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
        judgement: The answer to a Judge, with its last step; the next token of a Decode.
        drafted: Tokens that follow: none, one or several.
    """

    row_count: int
    judgement: Judgement | None = None
    drafted: Proposal = _NOTHING

    @property
    def is_whole(self) -> bool:
        """Whether it got past its prefix."""
        return self.judgement is not None or len(self.drafted) > 0


@dataclass(eq=False, slots=True)
class Item:
    """A task at a text.

    Attributes:
        cache: The text's state in the model.
        spec: How tokens are chosen there, and whose work it is.
        prefix: What the task builds on, one token or more; tokens that are drafted or decoded are
            appended.
        task: What to do.
        depth: How urgent: the smallest first.
        patience_ns: How long a forward of it may take before it counts as hung; None: for ever.
        found_count: Tokens drafted or decoded so far.
        goes_on: Of a Judge: whether the model goes on by itself after a correction.
    """

    cache: ModelCache
    spec: SessionSpec
    prefix: array[int]
    task: Judge | Decode | Draft
    depth: int = 0
    patience_ns: int | None = None
    found_count: int = 0
    goes_on: bool = False

    @property
    def share(self) -> str:
        """Whose work it is."""
        return self.spec.share

    @property
    def block(self) -> tuple[int, ...]:
        """The tokens after the prefix that its next forward computes, too."""
        return tuple(self.task.proposal.token_ids) if isinstance(self.task, Judge) else ()

    def row_count(self) -> int:
        """Count the rows that a forward needs to give it more than progress. Worker thread only."""
        return self.cache.missing_length(self.prefix) + len(self.block)

    def ahead(self, judgement: Judgement) -> Item | None:
        """Return what the caller asks next, if it was corrected; it needs no more room than this.

        None where nothing was rejected: then what was drafted after the proposal is judged next.
        """
        assert isinstance(self.task, Judge)
        if not self.goes_on:
            return None
        if len(self.task.proposal) == len(judgement.accepted_path):
            return None
        prefix = self.prefix[:]
        prefix.extend(self.task.proposal.along(judgement.accepted_path))
        prefix.append(judgement.next_token)
        task = Judge(_NOTHING, self.task.logprobs)
        return Item(self.cache, self.spec, prefix, task, ANTICIPATED, self.patience_ns)

    def asks_the_same(self, other: Item) -> bool:
        """Whether both have one answer. Of others than a Judge it may have gone out in part."""
        return (
            isinstance(self.task, Judge) and self.task == other.task and self.prefix == other.prefix
        )

    def take(self, outcome: Outcome) -> bool:
        """Take in what a step gave, and tell whether it was the last."""
        if isinstance(self.task, Judge):
            return outcome.judgement is not None
        if isinstance(self.task, Decode):
            return outcome.judgement is not None and self._append(outcome.judgement, self.task)
        self.prefix.extend(outcome.drafted.token_ids)
        self.found_count += len(outcome.drafted)
        return self.found_count >= self.task.max_tokens

    def _append(self, judgement: Judgement, task: Decode) -> bool:
        self.prefix.append(judgement.next_token)
        self.found_count += 1
        return self.found_count >= task.max_tokens or judgement.next_token in task.end_token_ids
