"""The one interface between the engine and a model.

A backend is one model on one device, and runs items (`paceline_engine.items`); a cache is one
session's text in it. Loading and computing happen on the worker thread only; the event loop reads
the description, and makes empty caches.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from array import array
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from paceline.errors import PacelineError
from paceline_engine import fields
from paceline_engine.calls import VerificationRule
from paceline_engine.draft_tree import DraftTree
from paceline_engine.items import Decode, Item, Judge, Judgement, Outcome
from paceline_engine.proposal import NOTHING, Proposal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline_engine.calls import ModelDescription, SessionSpec
    from paceline_engine.draft_tree import Ranked
    from paceline_engine.latencies import StageMeasures
    from paceline_engine.model_cache import ModelCache

__all__ = [
    "Backend",
    "ChatTemplate",
    "DeviceLostError",
    "Feed",
    "ForwardInterrupted",
    "Interrupt",
    "ModelLoadError",
    "TokenMemory",
]


Interrupt: TypeAlias = threading.Event
"""Set by another thread when a forward has become worthless."""


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
        kept_share: The part of the tokens that fit which texts of ended sessions may have.
    """

    free_bytes: int
    usable_share: float
    bytes_per_token: int
    kept_share: float = 1.0

    @property
    def token_count(self) -> int:
        """How many tokens fit."""
        return int(self.free_bytes * self.usable_share) // self.bytes_per_token


@dataclass(slots=True)
class Feed:
    """An item's rows in a forward.

        tokens      | kept | the rest of the prefix | block        |
        token_ids          |<------ or a first part of it -------->|
        scored_count                              |<- block + 1 -->|
        parents                                    |<- tree's ---->|

    Attributes:
        cache: The text; it stands for the kept tokens.
        token_ids: What to append to it: one row for each.
        scored_count: For how many of the last rows to score what follows; 0 in a part of a prefix.
        parents: Of the last rows, if they are a tree: see `ModelCache.extend`.
        proposes: How tokens are chosen, if the model is asked for guesses of its own beside the
            scored rows; else None.
        is_own: Whether the tree is what the model itself proposed for this text, or a part of it.
        kept: Which of the tree's tokens the forward went on with; None: with all.
        dropped_count: How many rows it did not go on with.
    """

    cache: ModelCache
    token_ids: array[int]
    scored_count: int
    parents: Sequence[int] = ()
    proposes: SessionSpec | None = None
    is_own: bool = False
    kept: Sequence[int] | None = None
    dropped_count: int = 0

    @property
    def text_count(self) -> int:
        """How many of the rows come before the tree's."""
        return len(self.token_ids) - len(self.parents)

    @property
    def tree(self) -> Proposal:
        """The tree's tokens."""
        return Proposal(self.token_ids[self.text_count :].tolist(), self.parents)

    def prune(self, kept: Sequence[int]) -> None:
        """Leave only these of the tree's tokens: what the forward went on with is what counts."""
        tree = self.tree.only(kept)
        self.dropped_count += len(self.parents) - len(kept)
        del self.token_ids[self.text_count :]
        self.token_ids.extend(tree.token_ids)
        self.parents, self.scored_count = tree.parents, len(kept) + 1
        self.kept = kept if self.kept is None else [self.kept[index] for index in kept]


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """How a model wants a conversation written as a prompt; see ChatTemplate in the protos."""

    fingerprint: str
    source: str
    named_tokens: Mapping[str, str]
    special_tokens: tuple[str, ...]


class Backend(ABC):
    """A loaded model.

    Attributes:
        description: What it is.
        tokenizer: The bytes of its tokenizer.json, or None if it has none.
        chat_template: How it wants conversations, or None if it only continues text.
    """

    description: ModelDescription
    tokenizer: bytes | None
    chat_template: ChatTemplate | None = None

    @property
    def cuts_prompts(self) -> bool:
        """Whether a forward never has more rows of a prompt than `run` allows."""
        return True

    @property
    def layers_run(self) -> int:
        """How many layers forwards have gone through so far; 0 where there are no layers."""
        return 0

    @property
    def model_forwards(self) -> tuple[tuple[str, int], ...]:
        """Of a stack, how many forwards each model ran so far, by its name."""
        return ()

    @property
    def stage_measures(self) -> tuple[StageMeasures, ...]:
        """Of a stack, what was measured of each stage while it drafted."""
        return ()

    def measure(self, interrupt: Interrupt) -> None:  # noqa: B027 - most have nothing to choose
        """Measure what it decides by, besides what its callers measure. Worker thread only."""

    def token_memory(self) -> TokenMemory | None:
        """Measure what there is for tokens; None where they take no memory. Worker thread only."""
        return None

    @abstractmethod
    def new_cache(self, spec: SessionSpec) -> ModelCache:
        """Begin an empty text for a session; at once, because the event loop waits for it."""

    def run(
        self, items: Sequence[Item], interrupt: Interrupt, *, row_limit: int | None = None
    ) -> list[Outcome | Exception]:
        """Do a step of each item in one forward, and answer each as if it had been alone.

        Worker thread only.

        Args:
            items: Of different texts. Their proposals are chains, unless the model knows trees.
            interrupt: Set when nobody waits for any of them.
            row_limit: Rows that the forward may have, more than the others need: the last item's
                prefix is cut to what is left, one row at least.

        Returns:
            For each item what it got, or the error that it alone has: InvalidFieldError if what a
            token is said to be drawn from is no distribution, OverloadedError without memory, any
            other where there is a bug.

        Raises:
            ForwardInterrupted: the interrupt was set. The caches are as good as before.
            DeviceLostError: nothing can be computed any more.
        """
        answers: list[Outcome | Exception | None] = []
        feeds: list[Feed] = []
        for item in items:
            feed = self._feed_or_error(item, row_limit if item is items[-1] else None)
            if isinstance(feed, Exception):
                answers.append(feed)
                continue
            answers.append(None)
            feeds.append(feed)
            if row_limit is not None:
                row_limit -= len(feed.token_ids)
        asked = [item for item, answer in zip(items, answers, strict=True) if answer is None]
        scores = self._compute(feeds, interrupt)
        decided = iter(self._decide_all([*zip(asked, feeds, scores, strict=True)]))
        return [next(decided) if answer is None else answer for answer in answers]

    def _feed_or_error(self, item: Item, row_limit: int | None) -> Feed | Exception:
        """Return an item's rows, or the error that it alone has."""
        try:
            feed = self._feed(item, row_limit)
            self._make_room(feed)
            return feed
        except DeviceLostError:
            raise
        except PacelineError as error:
            return error
        except Exception as error:  # noqa: BLE001 - the caller's, and raised there
            # It broke off anywhere, and may have left anything.
            item.cache.clear()
            return error

    def _feed(self, item: Item, row_limit: int | None) -> Feed:
        cache, tree = item.cache, item.tree
        if tree and cache.has_of(item.prefix, tree):
            start = len(cache.tree)
            return Feed(
                cache,
                array("I", tree.token_ids[start:]),
                len(item.block),
                tree.parents[start:],
            )
        block = tree.token_ids or item.block
        fed = item.prefix[cache.keep(item.prefix) :]
        # The last token's row belongs to the block: alone it would be computed again and again.
        if row_limit is not None and len(fed) > 1 and len(fed) + len(block) > row_limit:
            return Feed(cache, fed[: max(1, min(row_limit, len(fed) - 1))], 0)
        self._check_distributions(item)
        fed.extend(block)
        if tree:
            return Feed(cache, fed, len(item.block), tree.parents)
        proposes = item.spec if item.proposes else None
        return Feed(cache, fed, len(block) + 1, item.parents, proposes)

    def _check_distributions(self, item: Item) -> None:
        """Check what a proposal is said to be drawn from: here, as it would hold up the loop."""
        if isinstance(item.task, Judge) and item.spec.rule is VerificationRule.REJECTION:
            fields.check_distributions(
                item.task.proposal, vocabulary_size=self.description.vocabulary_size
            )

    def _compute(self, feeds: Sequence[Feed], interrupt: Interrupt) -> list[Any]:
        """Compute all in one forward; if that fails, each alone, to see whose fault it is."""
        if not feeds:
            return []
        try:
            scores = self._forward(feeds, interrupt)
        except (ForwardInterrupted, DeviceLostError):
            raise
        except Exception as error:  # noqa: BLE001 - the caller's, and raised there
            if len(feeds) == 1:
                feeds[0].cache.clear()
                return [error]
            for feed in feeds:
                feed.cache.settle()
            return [each for feed in feeds for each in self._compute([feed], interrupt)]
        for feed in feeds:
            feed.cache.extend(feed.token_ids, feed.parents)
        return list(scores)

    def _decide_all(self, asked: Sequence[tuple[Item, Feed, Any]]) -> Sequence[Outcome | Exception]:
        """Decide by the scores of each item's feed, or pass on the error that it has instead."""
        return [self._decide(*each) for each in asked]

    def _decide(self, item: Item, feed: Feed, scores: Any) -> Outcome | Exception:
        if isinstance(scores, Exception):
            return scores
        row_count = len(feed.token_ids) + feed.dropped_count
        if not feed.scored_count:
            return Outcome(row_count)
        try:
            if isinstance(item.task, Judge):
                judgement = self._judge_kept(scores, item.task, item, kept=feed.kept)
                return Outcome(row_count, judgement=judgement, dropped_count=feed.dropped_count)
            if isinstance(item.task, Decode):
                told = item.task
                task = Judge(NOTHING, told.logprobs, top_logprobs=told.top_logprobs)
                return Outcome(row_count, judgement=self._judge(scores, task, item))
            if item.task.width == 1:
                return Outcome(row_count, drafted=self._draft(scores, item))
            seed = item.draft_tree if item.draft_tree.found else DraftTree(item.task.branch_count)
            draft_tree = seed.grown(self._rank(scores, item))
            return Outcome(row_count, drafted=draft_tree.news_since(seed), draft_tree=draft_tree)
        except DeviceLostError:
            raise
        except Exception as error:  # noqa: BLE001 - the caller's, and raised there
            return error

    def _judge_kept(
        self, scores: Any, task: Judge, item: Item, *, kept: Sequence[int] | None
    ) -> Judgement:
        """Decide on a proposal of which the forward computed only some tokens, or all."""
        if kept is None:
            return self._judge(scores, task, item)
        judged = self._judge(scores, replace(task, proposal=task.proposal.only(kept)), item)
        return replace(judged, accepted_path=tuple(kept[index] for index in judged.accepted_path))

    def _make_room(self, feed: Feed) -> None:  # noqa: B027 - most need none
        """Have memory for what a forward will append to a text.

        Raises:
            OverloadedError: there is none. The text is as it was, and the others go on without it.
        """

    @abstractmethod
    def _forward(self, feeds: Sequence[Feed], interrupt: Interrupt) -> Sequence[Any]:
        """Append each feed's tokens to its text's state, and score its last rows.

        It may prune a feed's tree (`Feed.prune`), and then those of its tokens that are left are
        appended. Where it fails nothing counts as appended.

        Raises:
            ForwardInterrupted: the interrupt was set meanwhile.
        """

    @abstractmethod
    def _judge(self, scores: Any, task: Judge, item: Item) -> Judgement:
        """Decide on an item's proposal by the scores of its rows."""

    @abstractmethod
    def _draft(self, scores: Any, item: Item) -> Proposal:
        """Choose the token after an item's prefix from the one row of scores."""

    @abstractmethod
    def _rank(self, scores: Any, item: Item) -> Sequence[Ranked]:
        """Say what is likeliest after each row of scores, as many tokens as the draft is wide.

        The first is the one that `_draft` chooses.
        """
