"""Several models on one device that draft as one: the largest first, at last Max-Gram.

A draft is a cascade (`paceline_engine.cascade`); each of its steps is one model's forward, and the
forwards of drafts that need the same model next are one. Nothing else of a server knows of stages:
to it this is a model that finds several tokens in a step, or none.
"""

from __future__ import annotations

import hashlib
import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline_engine.backends.base import Backend, ModelLoadError, TokenMemory
from paceline_engine.calls import VerificationRule
from paceline_engine.cascade import MAX_GRAM, CascadeDraft, Draw
from paceline_engine.items import Draft, Item, Outcome
from paceline_engine.model_cache import ModelCache
from paceline_engine.proposal import Proposal, SparseDistribution
from paceline_engine.review_tasks import Reviewed, ReviewTask
from paceline_engine.stack_numbers import MeasuredStack

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Sequence

    from paceline_engine.backends.base import Interrupt
    from paceline_engine.calls import ModelDescription, SessionSpec
    from paceline_engine.cascade import Matrix, Propose, Review
    from paceline_engine.draft_tree import Ranked
    from paceline_engine.items import Judge, Judgement
    from paceline_engine.latencies import StageMeasures
    from paceline_protocol.max_gram import MaxGram

__all__ = ["StackBackend", "StackText"]

_log = logging.getLogger(__name__)

_MAX_GRAM_BYTES = 640
"""What a token takes in Max-Gram's index (bench/LOG.md), and in its list of tokens."""
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


@dataclass(frozen=True, slots=True)
class _Step:
    """What an item needs next, as an item of one of the models."""

    stage: int
    inner: Item


class StackBackend(Backend):
    """A stack of models.

    Cost: a session has a text in each model: so much memory a token takes in all of them.

    Attributes:
        forward_counts: By stage, forwards that ran to their end.
    """

    def __init__(
        self,
        models: Sequence[Backend],
        *,
        matrix: Matrix | None,
        leniency: float = 1.0,
        new_max_gram: Callable[[], MaxGram] | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Build it of loaded models.

        Args:
            models: Largest first.
            matrix: Who drafts how much for whom; None: what the stack's own numbers say.
            leniency: Of the stack's reviews, 1 or more.
            new_max_gram: Makes the last stage for a text; None: the last stage is a model.
            clock_ns: Measures forwards.

        Raises:
            ModelLoadError: the models do not go together.
        """
        _check_alike([model.description for model in models])
        self.models = models
        self.forward_counts = [0] * len(models)
        self.proposed_count = 0
        self._leniency = leniency
        self._new_max_gram = new_max_gram
        self._clock_ns = clock_ns
        self._numbers = MeasuredStack(models, has_max_gram=new_max_gram is not None)
        self._fixed_matrix = matrix
        self.tokenizer = models[0].tokenizer
        self.description = _describe(
            [model.description for model in models],
            drafting=f"{matrix or 'auto'} {leniency} {new_max_gram is not None}",
        )

    @property
    def matrix(self) -> Matrix:
        """Who drafts how much for whom from now on."""
        return self._fixed_matrix or self._numbers.matrix()

    @property
    def cuts_prompts(self) -> bool:
        """Not always: a draft that begins may need another model than was foreseen, uncut."""
        return False

    @property
    def layers_run(self) -> int:
        """How many decoder layers forwards of all models have gone through so far."""
        return sum(model.layers_run for model in self.models)

    @property
    def model_forwards(self) -> tuple[tuple[str, int], ...]:
        """How often each model ran, by name."""
        return tuple(zip(self.description.stage_names, self.forward_counts, strict=True))

    @property
    def stage_measures(self) -> tuple[StageMeasures, ...]:
        """What was measured of each stage while it drafted."""
        return self._numbers.measures((*self.description.stage_names, MAX_GRAM))

    def token_memory(self) -> TokenMemory | None:
        """Measure what there is for tokens, each of which lies in all models."""
        memories = [memory for model in self.models if (memory := model.token_memory())]
        if not memories:
            return None
        # Max-Gram's index lies in the machine's memory, beside a model on a CPU.
        shares_memory = self._new_max_gram is not None and self.description.device == "cpu"
        bytes_per_token = sum(memory.bytes_per_token for memory in memories)
        return replace(
            memories[0],
            free_bytes=min(memory.free_bytes for memory in memories),
            bytes_per_token=bytes_per_token + _MAX_GRAM_BYTES * shares_memory,
        )

    def new_cache(self, spec: SessionSpec) -> StackText:
        """Begin an empty text for a session."""
        texts = [model.new_cache(spec) for model in self.models]
        max_gram = self._new_max_gram() if self._new_max_gram else None
        return StackText(texts, max_gram, matrix=lambda: self.matrix)

    def measure(self, interrupt: Interrupt) -> None:
        """Run the models warm, and learn what their forwards cost. Worker thread only."""
        if self._fixed_matrix is None:
            self._numbers.measure(interrupt)
            _log.info("cascade", extra={"matrix": str(self.matrix)})

    def run(
        self, items: Sequence[Item], interrupt: Interrupt, *, row_limit: int | None = None
    ) -> list[Outcome | Exception]:
        """Do a step of each item: see `Backend.run`. One forward if one model is needed next."""
        steps = {
            place: step
            for place, item in enumerate(items)
            if (step := self._step(item)) is not None
        }
        answers: dict[int, Outcome | Exception] = {}
        for stage in dict.fromkeys(step.stage for step in steps.values()):
            places = [place for place, step in steps.items() if step.stage == stage]
            # The limit cuts the last item only, and says what all of them have together.
            limit = row_limit if places[-1] == len(items) - 1 else None
            if limit is not None:
                # Drafts that begin here can need more than that: then it is below 0.
                limit -= sum(
                    step.inner.row_count() for step in steps.values() if step.stage != stage
                )
            started_ns = self._clock_ns()
            given = self.models[stage].run(
                [steps[place].inner for place in places], interrupt, row_limit=limit
            )
            self._learn(stage, given, self._clock_ns() - started_ns)
            answers.update(zip(places, given, strict=True))
        # Only now: had a later forward been given up, this step would be done again.
        return [
            self._take(item, steps[place], answers[place])
            if place in steps
            else self._found(item, row_count=0)
            for place, item in enumerate(items)
        ]

    def _step(self, item: Item) -> _Step | None:
        """Return what an item needs next; None if Max-Gram alone has found all of a draft."""
        text = item.cache
        assert isinstance(text, StackText)
        if not isinstance(item.task, Draft):
            inner = Item(text.texts[0], item.spec, item.prefix, item.task)
            return _Step(0, inner)
        text.begin(item)
        if text.is_done:
            return None
        return _Step(text.stage(item), text.next_item(item, leniency=self._leniency))

    def _learn(self, stage: int, given: Sequence[Outcome | Exception], forward_ns: int) -> None:
        rows = sum(each.row_count for each in given if isinstance(each, Outcome))
        if rows:
            self.forward_counts[stage] += 1
            self._numbers.record(stage, rows, forward_ns)

    def _take(self, item: Item, step: _Step, answer: Outcome | Exception) -> Outcome | Exception:
        """Turn a model's answer into the item's, and go on with the draft."""
        if isinstance(answer, Exception):
            return answer
        if not isinstance(answer.judgement, Reviewed):
            return replace(answer, stage=step.stage)
        text, task = item.cache, step.inner.task
        assert isinstance(text, StackText)
        assert isinstance(task, ReviewTask)
        assert text.draft is not None
        self._numbers.judge(task, accepted_count=len(answer.judgement.accepted_path))
        self.proposed_count += sum(draw.stage == len(self.models) for draw in task.draws)
        text.draft.answer(answer.judgement.draws)
        return replace(self._found(item, row_count=answer.row_count), stage=step.stage)

    def _found(self, item: Item, *, row_count: int) -> Outcome:
        """Return what a draft has found since its last step."""
        text = item.cache
        assert isinstance(text, StackText)
        assert text.draft is not None
        found = text.draft.take_found()
        distributions = tuple(draw.distribution for draw in found if draw.distribution)
        tokens = tuple(draw.token_id for draw in found)
        return Outcome(row_count, drafted=Proposal(tokens, (), distributions), is_inner=not found)

    def _forward(self, feeds: object, interrupt: Interrupt) -> Sequence[object]:
        raise NotImplementedError("its models compute")

    def _judge(self, scores: object, task: Judge, item: Item) -> Judgement:
        raise NotImplementedError("its models decide")

    def _draft(self, scores: object, item: Item) -> Proposal:
        raise NotImplementedError("its models decide")

    def _rank(self, scores: object, item: Item) -> Sequence[Ranked]:
        raise NotImplementedError("a stack drafts chains")


def _check_alike(models: Sequence[ModelDescription]) -> None:
    first = models[0]
    for model in models[1:]:
        if (model.tokenizer_fingerprint, model.vocabulary_size) != (
            first.tokenizer_fingerprint,
            first.vocabulary_size,
        ):
            raise ModelLoadError(
                f"--then {model.name}: has another tokenizer than {first.name}; all models of a"
                " stack need the same"
            )


def _describe(models: Sequence[ModelDescription], *, drafting: str) -> ModelDescription:
    """Describe a stack as one model: its largest, as far as the others allow."""
    identity = " ".join([*(model.fingerprint for model in models), drafting])
    return replace(
        models[0],
        fingerprint=hashlib.sha256(f"stack {identity}".encode()).hexdigest(),
        context_length=min(model.context_length for model in models),
        cancels_between_layers=all(model.cancels_between_layers for model in models),
        shares_forwards=all(model.shares_forwards for model in models),
        takes_trees=False,
        is_invariant=all(model.is_invariant for model in models),
        stage_names=tuple(model.name for model in models),
        verification_rules=tuple(
            rule
            for rule in models[0].verification_rules
            if all(rule in model.verification_rules for model in models)
        ),
    )
