"""A backend that is one model: it turns items into rows of a forward, and scores into outcomes."""

from __future__ import annotations

from abc import abstractmethod
from array import array
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError
from paceline_contract.calls import VerificationRule
from paceline_contract.proposal import NOTHING, Proposal
from paceline_engine.terms import validation
from paceline_engine.terms.backend import (
    Backend,
    DeviceLostError,
    ForwardInterrupted,
    forget_locals,
)
from paceline_engine.terms.draft_tree import DraftTree
from paceline_engine.terms.items import Decode, Draft, Item, Judge, Judgement, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from paceline_engine.terms.backend import Interrupt
    from paceline_engine.terms.calls import SessionSpec
    from paceline_engine.terms.draft_tree import Ranked
    from paceline_engine.terms.model_cache import ModelCache


@dataclass(slots=True)
class Feed:
    """An item's rows in a forward.

        tokens      | kept | the rest of the prefix | block        |
        token_ids          |<------ or a first part of it -------->|
        scored_count                              |<- block + 1 -->|
        parents                                    |<- tree's ---->|

    Attributes:
        cache: The sequence; it stands for the kept tokens.
        token_ids: The tokens to append to it, one row for each.
        scored_count: How many of the last rows are scored; 0 in a part of a prefix.
        parents: The parents of the last rows, if they are a tree: see `ModelCache.extend`.
        proposes: How tokens are chosen, if the model is asked for guesses of its own beside the
            scored rows; else None.
        lora: The name of the sequence's LoRA adapter; empty: it has none.
        is_own: Whether the model itself proposed the tree, or a larger one, for this sequence.
        accepts: If rows are computed one by one: asked before each token of the block, with the
            scores of all rows before it, whether the token is accepted.
        kept: The proposal's tokens that were not pruned; None: nothing was pruned.
        dropped_count: How many rows were pruned.
    """

    cache: ModelCache
    token_ids: array[int]
    _: KW_ONLY
    scored_count: int
    parents: Sequence[int] = ()
    proposes: SessionSpec | None = None
    lora: str = ""
    is_own: bool = False
    accepts: Callable[[Sequence[Any]], bool] | None = None
    kept: Sequence[int] | None = None
    dropped_count: int = 0

    @property
    def text_count(self) -> int:
        """How many rows come before the tree's."""
        return len(self.token_ids) - len(self.parents)

    @property
    def tree(self) -> Proposal:
        """The tree's tokens."""
        return Proposal(self.token_ids[self.text_count :].tolist(), self.parents)

    def prune(self, kept: Sequence[int]) -> None:
        """Leave only these of the tree's tokens, as the forward goes on only with them."""
        tree = self.tree.only(kept)
        self.dropped_count += len(self.parents) - len(kept)
        del self.token_ids[self.text_count :]
        self.token_ids.extend(tree.token_ids)
        self.parents, self.scored_count = tree.parents, len(kept) + 1
        self.kept = kept if self.kept is None else [self.kept[index] for index in kept]

    def stop(self, computed_count: int) -> None:
        """Cut the block behind its first rejected token.

        The rejected token stays: what follows may be drawn from what it leaves.

        Args:
            computed_count: How many of the block's tokens were accepted, and so were computed.
        """
        block_count = self.scored_count - 1
        if computed_count < block_count:
            del self.token_ids[len(self.token_ids) - block_count + computed_count :]
            self.kept = range(computed_count + 1)
            self.scored_count = computed_count + 2


class ModelBackend(Backend):
    """One model, on one device.

    A subclass adds a forward (`_forward`), and decides by its scores (`_judge`, `_draft`, `_rank`).
    """

    def run(
        self, items: Sequence[Item], interrupt: Interrupt, *, row_limit: int | None = None
    ) -> list[Outcome | Exception]:
        """Do a step of each item in one forward: see `Backend.run`."""
        answers: list[Outcome | Exception | None] = []
        feeds: list[Feed] = []
        for item in items:
            if forced := self._forced_alone(item):
                answers.append(forced)
                continue
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
        scored = [*zip(asked, feeds, scores, strict=True)]
        chosen = self._choose_together(scored)
        decided = (
            self._decide(item, feed, scores=own, chosen=chosen.get(item))
            for item, feed, own in scored
        )
        return [next(decided) if answer is None else answer for answer in answers]

    def _forced_alone(self, item: Item) -> Outcome | None:
        """Return a draft's next tokens if a grammar leaves no others: no forward is needed.

        In a tree it is one token, as each step there finds one token of the chain. Branches that
        are extended have rows of their own, so such a tree always needs its forwards.
        """
        task = item.task
        if not isinstance(task, Draft) or task.branch_count:
            return None
        forced = self.forced(item, most=1 if task.width > 1 else task.max_tokens - item.found_count)
        if not forced:
            return None
        if task.width == 1:
            return Outcome(0, drafted=forced)
        seed = item.draft_tree if item.draft_tree.found else DraftTree()
        draft_tree = seed.grown([[(forced.token_ids[0], 1.0)]])
        drafted = replace(draft_tree.news_since(seed), forced=forced.forced)
        return Outcome(0, drafted=drafted, draft_tree=draft_tree)

    def _feed_or_error(self, item: Item, row_limit: int | None) -> Feed | Exception:
        """Return an item's rows, or the error of this item alone."""
        try:
            feed = self._feed(item, row_limit)
            self._make_room(feed)
            return feed
        except DeviceLostError:
            raise
        except PacelineError as error:
            return error
        except Exception as error:  # noqa: BLE001 - the caller's, and raised there
            # The code stopped at an unknown point, and may have left anything.
            item.cache.clear()
            return error

    def _feed(self, item: Item, row_limit: int | None) -> Feed:
        cache, tree = item.cache, item.tree
        if tree and cache.has_of(item.prefix, tree):
            start = len(cache.tree)
            rows = array("I", tree.token_ids[start:])
            return Feed(cache, rows, scored_count=len(item.block), parents=tree.parents[start:])
        block = tree.token_ids or item.block
        fed = item.prefix[cache.keep(item.prefix) :]
        # The last token's row comes with the block, because it is computed again with each block.
        if row_limit is not None and len(fed) > 1 and len(fed) + len(block) > row_limit:
            return Feed(cache, fed[: max(1, min(row_limit, len(fed) - 1))], scored_count=0)
        self._check_distributions(item)
        fed.extend(block)
        if tree:
            return Feed(cache, fed, scored_count=len(item.block), parents=tree.parents)
        proposes = item.spec if item.proposes else None
        return Feed(
            cache, fed, scored_count=len(block) + 1, parents=item.parents, proposes=proposes
        )

    def _check_distributions(self, item: Item) -> None:
        """Check a proposal's distributions: on this thread, as that takes too long for the loop."""
        if not isinstance(item.task, Judge) or item.task.score:
            return
        if item.spec.rule is VerificationRule.REJECTION:
            validation.check_distributions(
                item.task.proposal, vocabulary_size=self.description.vocabulary_size
            )

    def _compute(self, feeds: Sequence[Feed], interrupt: Interrupt) -> list[Any]:
        """Compute all feeds in one forward; if that fails, each alone, to find the faulty one."""
        if not feeds:
            return []
        try:
            scores = self._forward(feeds, interrupt)
        except (ForwardInterrupted, DeviceLostError):
            raise
        except Exception as error:  # noqa: BLE001 - the caller's, and raised there
            forget_locals(error)  # before they are tried alone, with the memory that they held
            if len(feeds) == 1:
                feeds[0].cache.clear()
                return [error]
            for feed in feeds:
                feed.cache.settle()
            return [each for feed in feeds for each in self._compute([feed], interrupt)]
        for feed in feeds:
            feed.cache.extend(feed.token_ids, feed.parents)
        return list(scores)

    def _choose_together(self, asked: Sequence[tuple[Item, Feed, Any]]) -> Mapping[Item, int]:  # noqa: ARG002 - most backends choose one by one
        """Choose the next tokens of several items at once, where that is faster."""
        return {}

    def _decide(
        self, item: Item, feed: Feed, *, scores: Any, chosen: int | None
    ) -> Outcome | Exception:
        """Decide by the scores of an item's feed, or pass on the error that it has instead.

        Args:
            chosen: The next token, if it was chosen already (`_choose_together`).
        """
        if isinstance(scores, Exception):
            return scores
        row_count = len(feed.token_ids) + feed.dropped_count
        if not feed.scored_count:
            return Outcome(row_count)
        try:
            if isinstance(item.task, Judge):
                judgement = self._judge_kept(scores, item.task, item=item, kept=feed.kept)
                return Outcome(row_count, judgement=judgement, dropped_count=feed.dropped_count)
            if chosen is not None and isinstance(item.task, Draft):
                return Outcome(row_count, drafted=Proposal((chosen,)))
            if chosen is not None:
                return Outcome(row_count, judgement=Judgement((), chosen))
            if isinstance(item.task, Decode):
                told = item.task
                task = Judge(NOTHING, logprobs=told.logprobs, top_logprobs=told.top_logprobs)
                return Outcome(row_count, judgement=self._judge(scores, task, item=item))
            if item.task.width == 1:
                drafted = self._draft(scores, item)
                most = item.task.max_tokens - item.found_count - len(drafted)
                forced = self.forced(item, drafted.token_ids, most=most)
                return Outcome(row_count, drafted=drafted.followed_by(forced))
            seed = item.draft_tree if item.draft_tree.found else DraftTree(item.task.branch_count)
            draft_tree = seed.grown(self._rank(scores, item))
            return Outcome(row_count, drafted=draft_tree.news_since(seed), draft_tree=draft_tree)
        except DeviceLostError:
            raise
        except Exception as error:  # noqa: BLE001 - the caller's, and raised there
            return error

    def _judge_kept(
        self, scores: Any, task: Judge, *, item: Item, kept: Sequence[int] | None
    ) -> Judgement:
        """Decide on a proposal of which the forward computed only some tokens, or all."""
        if kept is None:
            return self._judge(scores, task, item=item)
        judged = self._judge(scores, task.only(kept), item=item)
        return replace(judged, accepted_path=tuple(kept[index] for index in judged.accepted_path))

    def _make_room(self, feed: Feed) -> None:
        """Take memory for the rows that a forward will append to a sequence.

        Raises:
            OverloadedError: there is none. The sequence is unchanged; other items go on without it.
        """

    @abstractmethod
    def _forward(self, feeds: Sequence[Feed], interrupt: Interrupt) -> Sequence[Any]:
        """Append each feed's tokens to its sequence's state, and score its last rows.

        It may prune a feed's tree (`Feed.prune`); then only the kept tokens are appended. After a
        failure no row counts as appended.

        Raises:
            ForwardInterrupted: the interrupt was set meanwhile.
        """

    @abstractmethod
    def _judge(self, scores: Any, task: Judge, *, item: Item) -> Judgement:
        """Decide on an item's proposal by the scores of its rows."""

    @abstractmethod
    def _draft(self, scores: Any, item: Item) -> Proposal:
        """Choose the token after an item's prefix from the one row of scores."""

    @abstractmethod
    def _rank(self, scores: Any, item: Item) -> Sequence[Ranked]:
        """Return the likeliest tokens after each row of scores, as many as the draft is wide.

        The first is the token that `_draft` chooses.
        """
