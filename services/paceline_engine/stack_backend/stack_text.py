"""A session's sequence in all models of a stack (`stack.py`), and the draft after it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from paceline_contract.calls import VerificationRule
from paceline_contract.proposal import Proposal, SparseDistribution
from paceline_engine.deciding.cascade import CascadeDraft, Draw, ReviewTask, without_stages
from paceline_engine.terms.items import Draft, Item
from paceline_engine.terms.model_cache import ModelCache

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Sequence

    from paceline_contract.max_gram import MaxGram
    from paceline_engine.deciding.cascade import Matrix, Propose, Review

_MOST_INDEXED = 1024
"""Tokens that a step adds to the index at most: this takes milliseconds, and other calls wait."""


class LastStage:
    """Max-Gram below a stack's models: an index of a sequence, and proposals from it.

    It has no reference to the `StackText`. So a draft, which refers to this object, has none.

    Args:
        max_gram: An empty index.
        stage: How many models are above it.
    """

    def __init__(self, max_gram: MaxGram, *, stage: int) -> None:
        self._max_gram = max_gram
        self._stage = stage
        self._base: array[int] | None = None
        self._is_exact = True
        self._is_indexed = False

    def begin(self, base: array[int], *, is_exact: bool, is_asked: bool) -> None:
        """Begin a draft.

        Args:
            base: The tokens before the draft.
            is_exact: Whether tokens need no distributions.
            is_asked: Whether the matrix uses this stage; if not, no index is made.
        """
        self._base, self._is_exact, self._is_indexed = base, is_exact, not is_asked
        self.index_some()

    def index_some(self) -> None:
        """Add more tokens of a long sequence to the index; proposals begin when all are in it."""
        if self._is_indexed:
            return
        assert self._base is not None
        known = self._max_gram.common_length(self._base)
        self._max_gram.truncate(known)
        self._max_gram.extend(self._base[known : known + _MOST_INDEXED])
        self._is_indexed = len(self._max_gram) == len(self._base)

    def propose(self, text: Sequence[Draw], count: int) -> list[Draw]:
        """Return at most `count` tokens that follow the base and these tokens."""
        assert self._base is not None
        if not self._is_indexed:
            return []
        self._max_gram.follow([draw.token_id for draw in text], start=len(self._base))
        return [
            Draw(
                token,
                stage=self._stage,
                distribution=None if self._is_exact else SparseDistribution.certain(token),
            )
            for token in self._max_gram.propose(count)
        ]


class StackText(ModelCache):
    """A session's sequence in all models of a stack, and the draft after it.

    Attributes:
        texts: The sequence in each model.
        draft: The draft that has begun; None: no draft has.
    """

    def __init__(
        self,
        texts: Sequence[ModelCache],
        max_gram: MaxGram | None,
        *,
        matrix: Callable[[], Matrix],
        reaches: Sequence[int],
    ) -> None:
        super().__init__()
        self._reaches = reaches
        self.texts = texts
        self._matrix = matrix
        self._last = None if max_gram is None else LastStage(max_gram, stage=len(texts))
        # The prefix identifies the item whose draft has begun. A reference to the item itself would
        # be a cycle, because an item refers to its cache.
        self._prefix: array[int] | None = None
        self._base: array[int] | None = None
        self.draft: CascadeDraft | None = None

    def reserve(self, length: int) -> None:
        """Learn for how many tokens memory is reserved from now on. Called on the event loop."""
        for text in self.texts:
            text.reserve(length)

    @property
    def can_be_copied(self) -> bool:
        """Whether another sequence can begin with what was computed of this one."""
        return all(text.can_be_copied for text in self.texts)

    @property
    def is_empty(self) -> bool:
        """Whether none of the models has computed anything of it."""
        return all(text.is_empty for text in self.texts)

    def begin_like(self, source: ModelCache) -> None:
        """Begin with what a sequence has in common with the first prefix, in each model."""
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

    def stage(self, prefix: array[int], *, draft_count: int) -> int:
        """Return which of the models computes the next forward after a prefix.

        Before a draft has begun, this is the model that is needed if Max-Gram finds no token. To
        ask Max-Gram takes too long here.
        """
        if not draft_count:
            return 0
        if self._prefix is prefix:
            draft = self.draft
        else:
            propose = None if self._last is None else lambda *_: ()
            draft = self._drafting(draft_count, propose, length=len(prefix))
        return draft.wanted.stage if draft and draft.wanted else 0

    def begin(self, item: Item, *, forced: Callable[..., Proposal]) -> None:
        """Begin a draft, unless it has begun.

        Args:
            forced: See `Backend.forced`; of the largest model.
        """
        if self._prefix is item.prefix:
            return
        assert isinstance(item.task, Draft)
        self._prefix, self._base = item.prefix, item.prefix[:]
        if self._last is not None:
            self._last.begin(
                self._base,
                is_exact=item.spec.rule is VerificationRule.EXACT,
                is_asked=any(row[-1] for row in self._matrix()),
            )
        propose = None if self._last is None else self._last.propose
        force = None
        if item.spec.sampling.grammar is not None:
            own = Item(self.texts[0], item.spec, prefix=self._base, task=item.task)
            force = partial(_forced_draws, forced, own)
        length = len(item.prefix)
        self.draft = self._drafting(item.task.max_tokens, propose, force=force, length=length)

    def _drafting(
        self, count: int, propose: Propose | None, *, force: Propose | None = None, length: int
    ) -> CascadeDraft:
        """Begin a draft; models whose context it could exceed take no part."""
        ends = length + count
        resting = [stage for stage, reach in enumerate(self._reaches) if stage and ends > reach]
        matrix = without_stages(self._matrix(), resting) if resting else self._matrix()
        return CascadeDraft(matrix, propose=propose, force=force, token_count=count)

    @property
    def is_done(self) -> bool:
        """Whether its draft needs no further forward."""
        return self.draft is not None and self.draft.wanted is None

    def next_item(self, item: Item, *, leniency: float) -> Item:
        """Return the next forward of the draft, as an item of its model."""
        assert self.draft is not None
        wanted = self.draft.wanted
        assert wanted is not None, "then the draft is done"
        if self._last is not None:
            self._last.index_some()
        distributions = tuple(draw.distribution for draw in wanted.tail if draw.distribution)
        tail = Proposal(tuple(draw.token_id for draw in wanted.tail), (), distributions)
        task = ReviewTask(tail, draws=wanted.tail, stage=wanted.stage, leniency=leniency)
        return Item(self.texts[wanted.stage], item.spec, prefix=self._text(wanted), task=task)

    def _wanted_at(self, prefix: array[int]) -> Review | None:
        return self.draft.wanted if self._prefix is prefix and self.draft else None

    def _text(self, wanted: Review) -> array[int]:
        assert self._base is not None
        text = self._base[:]
        text.extend(draw.token_id for draw in wanted.text)
        return text

    def _crop(self, length: int) -> None:
        """Do nothing: each model's sequence crops itself."""


def _forced_draws(
    forced: Callable[..., Proposal], item: Item, text: Sequence[Draw], count: int
) -> list[Draw]:
    """Return the tokens that a grammar forces after an item's prefix and a text."""
    found = forced(item, [draw.token_id for draw in text], most=count)
    return [
        Draw(
            token,
            distribution=SparseDistribution.certain(token) if found.distributions else None,
            is_forced=True,
        )
        for token in found.token_ids
    ]
