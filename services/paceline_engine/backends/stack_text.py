"""A session's text in all models of a stack (`stack.py`), and how far a draft on it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_engine.calls import VerificationRule
from paceline_engine.cascade import CascadeDraft, Draw
from paceline_engine.items import Draft, Item
from paceline_engine.model_cache import ModelCache
from paceline_engine.proposal import Proposal, SparseDistribution
from paceline_engine.review_tasks import ReviewTask

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Sequence

    from paceline_engine.cascade import Matrix, Propose, Review
    from paceline_protocol.max_gram import MaxGram

__all__ = ["StackText"]

_MOST_INDEXED = 1024
"""Tokens of a prefix that a step may take into that index: milliseconds, which others wait for."""


class StackText(ModelCache):
    """A session's text in all models of a stack, and how far a draft on it is.

    Attributes:
        texts: In each model.
        max_gram: The last stage, if that is no model.
    """

    def __init__(
        self,
        texts: Sequence[ModelCache],
        max_gram: MaxGram | None,
        *,
        matrix: Callable[[], Matrix],
    ) -> None:
        super().__init__()
        self.texts = texts
        self.max_gram = max_gram
        self._matrix = matrix
        self._item: Item | None = None
        self._base: array[int] | None = None
        self._is_indexed = False
        self.draft: CascadeDraft | None = None

    def reserve(self, length: int) -> None:
        """Learn how many tokens there is memory for from now on. Called on the event loop."""
        for text in self.texts:
            text.reserve(length)

    @property
    def can_be_copied(self) -> bool:
        """Whether another text can begin with what was computed of this one."""
        return all(text.can_be_copied for text in self.texts)

    @property
    def is_empty(self) -> bool:
        """Whether none of the models has computed anything of it."""
        return all(text.is_empty for text in self.texts)

    def begin_like(self, source: ModelCache) -> None:
        """Begin with what a text has in common with the first prefix, in each model."""
        assert isinstance(source, StackText)
        for own, other in zip(self.texts, source.texts, strict=True):
            own.begin_like(other)

    def end(self) -> None:
        """Learn that its session is over: at most it is copied from now on."""
        super().end()
        for text in self.texts:
            text.end()

    def missing_length(self, prefix: array[int]) -> int:
        """Count the rows of the next forward."""
        wanted = self._wanted_at(prefix)
        if wanted is None:
            return self.texts[0].missing_length(prefix)
        return self.texts[wanted.stage].missing_length(self._text(wanted)) + len(wanted.tail)

    def stage(self, item: Item) -> int:
        """Return which of the models computes an item's next forward.

        Of a draft that has not begun: if Max-Gram finds nothing. To ask that takes too long here.
        """
        if not isinstance(item.task, Draft):
            return 0
        draft = self.draft if self._item is item else self._drafting(item.task, lambda *_: ())
        return draft.wanted.stage if draft and draft.wanted else 0

    def begin(self, item: Item) -> None:
        """Begin a draft, unless it has begun."""
        if self._item is item:
            return
        assert isinstance(item.task, Draft)
        self._item, self._base = item, item.prefix[:]
        # Where no row asks Max-Gram, its index would be work for nothing.
        self._is_indexed = not any(row[-1] for row in self._matrix())
        self._index_some()
        self.draft = self._drafting(item.task, self._propose)

    def _drafting(self, task: Draft, propose: Propose) -> CascadeDraft:
        return CascadeDraft(
            self._matrix(),
            propose=None if self.max_gram is None else propose,
            token_count=task.max_tokens,
        )

    @property
    def is_done(self) -> bool:
        """Whether its draft needs no forward more."""
        return self.draft is not None and self.draft.wanted is None

    def next_item(self, item: Item, *, leniency: float) -> Item:
        """Return the forward that a draft needs next, as an item of its model."""
        assert self.draft is not None
        wanted = self.draft.wanted
        assert wanted is not None, "then the draft is done"
        self._index_some()
        distributions = tuple(draw.distribution for draw in wanted.tail if draw.distribution)
        tail = Proposal(tuple(draw.token_id for draw in wanted.tail), (), distributions)
        task = ReviewTask(tail, draws=wanted.tail, stage=wanted.stage, leniency=leniency)
        return Item(self.texts[wanted.stage], item.spec, self._text(wanted), task)

    def _index_some(self) -> None:
        """Take more of a long prefix into Max-Gram's index; until all is in, it finds nothing."""
        if self.max_gram is None or self._is_indexed:
            return
        assert self._base is not None
        known = self.max_gram.common_length(self._base)
        self.max_gram.truncate(known)
        self.max_gram.extend(self._base[known : known + _MOST_INDEXED])
        self._is_indexed = len(self.max_gram) == len(self._base)

    def _wanted_at(self, prefix: array[int]) -> Review | None:
        is_this = self._item is not None and self._item.prefix is prefix
        return self.draft.wanted if is_this and self.draft else None

    def _text(self, wanted: Review) -> array[int]:
        assert self._base is not None
        text = self._base[:]
        text.extend(draw.token_id for draw in wanted.text)
        return text

    def _propose(self, text: Sequence[Draw], count: int) -> list[Draw]:
        assert self.max_gram is not None
        assert self._base is not None
        if not self._is_indexed:
            return []
        assert self._item is not None
        self.max_gram.follow([draw.token_id for draw in text], start=len(self._base))
        stage, is_exact = len(self.texts), self._item.spec.rule is VerificationRule.EXACT
        return [
            Draw(
                token,
                stage=stage,
                distribution=None if is_exact else SparseDistribution((token,), (1.0,)),
            )
            for token in self.max_gram.propose(count)
        ]

    def _crop(self, length: int) -> None:
        """Its models' texts look after themselves."""
