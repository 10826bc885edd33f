"""The one interface between the engine and a model.

A backend is one model on one device, and runs items (`paceline_engine.items`); a cache is one
session's text in it. Loading and computing happen on the worker thread only; the event loop reads
the description, and makes empty caches.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from paceline_engine import fields
from paceline_engine.calls import VerificationRule
from paceline_engine.items import Item, Judge, Judgement, Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_engine.calls import ModelDescription, SessionSpec
    from paceline_engine.proposal import Proposal

__all__ = [
    "Backend",
    "DeviceLostError",
    "ForwardInterrupted",
    "Forwarded",
    "Interrupt",
    "ModelCache",
    "ModelLoadError",
    "TokenMemory",
]

Interrupt: TypeAlias = threading.Event
"""Set by another thread when a forward has become worthless."""

_Scores = TypeVar("_Scores")
_Value = TypeVar("_Value")


class ModelLoadError(Exception):
    """A model cannot be served. The message is one line for the operator."""

    def __init__(self, message: str) -> None:
        # Libraries explain themselves in paragraphs.
        super().__init__(" ".join(message.split()))


class DeviceLostError(Exception):
    """The device can compute nothing more: the process has to end."""


class ForwardInterrupted(Exception):  # noqa: N818 - an order carried out, not an error
    """A forward was given up because its interrupt was set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMemory:
    """The memory that sessions' tokens can lie in.

    Attributes:
        free_bytes: What is free where the model computes.
        usable_share: The part of it that tokens may fill; forwards need the rest to compute in.
        bytes_per_token: What a token takes, in all layers together.
    """

    free_bytes: int
    usable_share: float
    bytes_per_token: int

    @property
    def token_count(self) -> int:
        """How many tokens fit."""
        return int(self.free_bytes * self.usable_share) // self.bytes_per_token


@dataclass(frozen=True, slots=True)
class Forwarded(Generic[_Value]):
    """What came out of a forward, and how many rows (token positions) it computed."""

    value: _Value
    row_count: int


class ModelCache(ABC, Generic[_Scores]):
    """A session's text in a model: the tokens computed so far and the model's state for them.

    The caller never says what to roll back. It names the whole prefix that it means, and the cache
    keeps what it has in common with that. So no sequence of faults and cancels can make it compute
    on a wrong prefix, and whatever is still right is used again.

    Invariants:
        The state stands for exactly `token_ids`, also after a forward that raised.
    """

    def __init__(self) -> None:
        self._token_ids = array("I")

    @property
    def token_ids(self) -> array[int]:
        """A copy of the tokens the state stands for."""
        return self._token_ids[:]

    def reserve(self, length: int) -> None:
        """Learn how many tokens there is memory for from now on. Called on the event loop."""

    def scores(
        self, prefix: array[int], block: Sequence[int], *, interrupt: Interrupt
    ) -> Forwarded[_Scores]:
        """Compute the model's scores for the token after the prefix and after each of the block.

        tokens      | kept | the rest of the prefix | block        |
        computed           |<------------- row_count ------------->|
        scored                                    |<- block + 1 -->|

        Raises:
            ForwardInterrupted: the interrupt was set. The cache is as good as before.
        """
        kept = min(_common_length(self._token_ids, prefix), self._length(), len(prefix) - 1)
        self._crop(kept)
        del self._token_ids[kept:]
        fed = prefix[kept:]
        fed.extend(block)
        try:
            scores = self._forward(fed, rows=len(block) + 1, interrupt=interrupt)
        except ForwardInterrupted:
            self._crop(kept)
            raise
        except BaseException:
            # What broke off anywhere may have left anything, so nothing of it is used again.
            self._crop(0)
            del self._token_ids[:]
            raise
        self._token_ids.extend(fed)
        return Forwarded(scores, len(fed))

    @abstractmethod
    def _length(self) -> int:
        """Return how many tokens the state really stands for."""

    @abstractmethod
    def _crop(self, length: int) -> None:
        """Forget the state of all tokens but the first `length`, wherever a forward stopped."""

    @abstractmethod
    def _forward(self, token_ids: array[int], *, rows: int, interrupt: Interrupt) -> _Scores:
        """Append tokens to the state, and score what follows each of the last `rows`."""


class Backend(ABC):
    """A loaded model.

    Attributes:
        description: What it is.
        tokenizer: The bytes of its tokenizer.json, or None if it has none.
    """

    description: ModelDescription
    tokenizer: bytes | None

    @property
    def layers_run(self) -> int:
        """How many layers forwards have gone through so far; 0 where there are no layers."""
        return 0

    def token_memory(self) -> TokenMemory | None:
        """Measure what there is for tokens; None where they take no memory. Worker thread only."""
        return None

    @abstractmethod
    def new_cache(self, spec: SessionSpec) -> ModelCache[Any]:
        """Begin an empty text for a session; at once, because the event loop waits for it."""

    def run(self, items: Sequence[Item], interrupt: Interrupt) -> Sequence[Outcome]:
        """Do a step of each item, and answer each as if it had been alone.

        For now the worker gives one item at a time. A drafting item gets at most the tokens that it
        lacks. Worker thread only.

        Args:
            items: Of different texts. Their proposals are chains.
            interrupt: Set when nobody waits for any of them.

        Raises:
            InvalidFieldError: what a token is said to be drawn from is no distribution.
            ForwardInterrupted: the interrupt was set. The caches are as good as before.
        """
        return [self._run_alone(item, interrupt) for item in items]

    def _run_alone(self, item: Item, interrupt: Interrupt) -> Outcome:
        task = item.task
        if not isinstance(task, Judge):
            scored = item.cache.scores(item.prefix, (), interrupt=interrupt)
            return Outcome(scored.row_count, drafted=self._draft(scored.value, item))
        proposal = task.proposal
        if item.spec.rule is VerificationRule.REJECTION:
            # Here, because it would hold up the event loop.
            fields.check_distributions(proposal, vocabulary_size=self.description.vocabulary_size)
        scored = item.cache.scores(item.prefix, proposal.token_ids, interrupt=interrupt)
        return Outcome(scored.row_count, judgement=self._judge(scored.value, task, item))

    @abstractmethod
    def _judge(self, scores: Any, task: Judge, item: Item) -> Judgement:
        """Decide on an item's proposal by the scores of its rows."""

    @abstractmethod
    def _draft(self, scores: Any, item: Item) -> Proposal:
        """Choose the token after an item's prefix from the one row of scores."""


def _common_length(left: array[int], right: array[int]) -> int:
    limit = min(len(left), len(right))
    if left[:limit] == right[:limit]:
        return limit
    return bisect_left(range(limit), True, key=lambda n: left[: n + 1] != right[: n + 1])
