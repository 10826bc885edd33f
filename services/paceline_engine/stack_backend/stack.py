"""Several models on one device that draft as one: the largest first, Max-Gram last.

A draft is a cascade (deciding/cascade.py). Each of its steps is one model's forward, and drafts
that need the same model next share a forward. The rest of the server does not know about stages: it
sees a model that finds several tokens in a step, or none.
"""

from __future__ import annotations

import hashlib
import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline_contract.proposal import Proposal
from paceline_engine.deciding.cascade import MAX_GRAM, Reviewed, ReviewTask
from paceline_engine.model_files.tokenizer_difference import tell_difference
from paceline_engine.stack_backend.stack_numbers import MeasuredStack
from paceline_engine.stack_backend.stack_text import StackText
from paceline_engine.terms.backend import Backend, ComposedBackend, ModelLoadError, TokenMemory
from paceline_engine.terms.items import Draft, Item, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline_contract.max_gram import MaxGram
    from paceline_contract.sampling import Grammar
    from paceline_engine.deciding.cascade import Matrix
    from paceline_engine.terms.backend import Interrupt
    from paceline_engine.terms.calls import ModelDescription, SessionSpec
    from paceline_engine.terms.latencies import StageMeasures

_log = logging.getLogger(__name__)

_MAX_GRAM_BYTES = 640
"""The memory of a token in Max-Gram's index (bench/LOG.md) and in its list of tokens."""


@dataclass(frozen=True, slots=True)
class _Step:
    """An item's next forward, as an item of one of the models."""

    stage: int
    inner: Item


class StackBackend(ComposedBackend):
    """A stack of models.

    Cost: a session has its sequence in each model, and a token takes memory in all of them.

    Attributes:
        forward_counts: For each stage, the forwards that ran to their end.
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
            matrix: See cascade.py; None: chosen by the stack's own measurements.
            leniency: The leniency of the stack's reviews, 1 or more.
            new_max_gram: Makes an empty Max-Gram for a session; None: the last stage is a model.
            clock_ns: Measures forwards.

        Raises:
            ModelLoadError: the models do not fit together.
        """
        _check_alike(models)
        description = _describe(
            [model.description for model in models],
            drafting=f"{matrix or 'auto'} {leniency} {new_max_gram is not None}",
        )
        super().__init__(models, description)
        self.forward_counts = [0] * len(models)
        self.proposed_count = 0
        self._leniency = leniency
        self._new_max_gram = new_max_gram
        self._clock_ns = clock_ns
        self._numbers = MeasuredStack(models, has_max_gram=new_max_gram is not None)
        self._fixed_matrix = matrix
        _tell_reaches([model.description for model in models])
        self.tokenizer = models[0].tokenizer

    @property
    def matrix(self) -> Matrix:
        """The matrix of drafts that begin now."""
        return self._fixed_matrix or self._numbers.matrix()

    @property
    def cuts_prompts(self) -> bool:
        """False: a new draft may need another model than was expected, with an uncut prompt."""
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
        """The measurements of each stage, made while it drafted."""
        return self._numbers.measures((*self.description.stage_names, MAX_GRAM))

    def token_memory(self) -> TokenMemory | None:
        """Measure the memory for tokens, each of which takes memory in all models."""
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
            bytes_per_text=sum(memory.bytes_per_text for memory in memories),
        )

    def knows_grammar(self, grammar: Grammar) -> bool:
        """Whether a grammar is compiled for all models already."""
        return all(model.knows_grammar(grammar) for model in self.models)

    def compile_grammar(self, grammar: Grammar) -> None:
        """Compile a grammar for all models: see `Backend.compile_grammar`."""
        for model in self.models:
            model.compile_grammar(grammar)

    def new_cache(self, spec: SessionSpec) -> StackText:
        """Begin an empty sequence for a session."""
        texts = [model.new_cache(spec) for model in self.models]
        max_gram = self._new_max_gram() if self._new_max_gram else None
        reaches = [model.description.context_length for model in self.models]
        return StackText(texts, max_gram, matrix=lambda: self.matrix, reaches=reaches)

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
            # The limit counts the rows of all items, and cuts only the last item.
            limit = row_limit if places[-1] == len(items) - 1 else None
            if limit is not None:
                # A draft that begins here can need more rows than expected: then it is below 0.
                limit -= sum(
                    step.inner.row_count() for step in steps.values() if step.stage != stage
                )
            started_ns = self._clock_ns()
            given = self.models[stage].run(
                [steps[place].inner for place in places], interrupt, row_limit=limit
            )
            self._learn(stage, given, self._clock_ns() - started_ns)
            answers.update(zip(places, given, strict=True))
        # Only now, because after an interrupted later forward this step is done again.
        return [
            self._take(item, steps[place], answers[place])
            if place in steps
            else self._found(item, row_count=0)
            for place, item in enumerate(items)
        ]

    def _step(self, item: Item) -> _Step | None:
        """Return an item's next forward; None if Max-Gram alone has found the whole draft."""
        text = item.cache
        assert isinstance(text, StackText)
        if not isinstance(item.task, Draft):
            inner = Item(text.texts[0], item.spec, prefix=item.prefix, task=item.task)
            return _Step(0, inner)
        text.begin(item, forced=self.models[0].forced)
        if text.is_done:
            return None
        return _Step(item.stage, text.next_item(item, leniency=self._leniency))

    def _learn(self, stage: int, given: Sequence[Outcome | Exception], forward_ns: int) -> None:
        rows = sum(each.row_count for each in given if isinstance(each, Outcome))
        if rows:
            self.forward_counts[stage] += 1
            self._numbers.record(stage, rows, forward_ns)

    def _take(self, item: Item, step: _Step, answer: Outcome | Exception) -> Outcome | Exception:
        """Turn a model's answer into the item's answer, and go on with the draft."""
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
        """Return the tokens that a draft has found since its last step."""
        text = item.cache
        assert isinstance(text, StackText)
        assert text.draft is not None
        found = text.draft.take_found()
        drafted = Proposal(
            tuple(draw.token_id for draw in found),
            distributions=tuple(draw.distribution for draw in found if draw.distribution),
            forced=tuple(index for index, draw in enumerate(found) if draw.is_forced),
        )
        return Outcome(row_count, drafted=drafted, is_inner=not found)


def _check_alike(models: Sequence[Backend]) -> None:
    first, known = models[0], models[0].description
    for model in models[1:]:
        own = model.description
        if own.tokenizer_fingerprint != known.tokenizer_fingerprint:
            told = ""
            if model.tokenizer is not None and first.tokenizer is not None:
                told = f" ({tell_difference(model.tokenizer, first.tokenizer)})"
            raise ModelLoadError(
                f"--then {own.name}: has another tokenizer than {known.name}{told}; all models of a"
                " stack need the same, or --speak"
            )
        if own.vocabulary_size != known.vocabulary_size:
            raise ModelLoadError(
                f"--then {own.name}: chooses from {own.vocabulary_size} tokens, and {known.name}"
                f" from {known.vocabulary_size}; all models of a stack need the same"
            )


def _describe(models: Sequence[ModelDescription], *, drafting: str) -> ModelDescription:
    """Describe a stack as its largest model, with only the abilities that all models have."""
    identity = " ".join([*(model.fingerprint for model in models), drafting])
    return replace(
        models[0],
        fingerprint=hashlib.sha256(f"stack {identity}".encode()).hexdigest(),
        cancels_between_layers=all(model.cancels_between_layers for model in models),
        shares_forwards=all(model.shares_forwards for model in models),
        takes_trees=False,
        is_invariant=all(model.is_invariant for model in models),
        samples_by=frozenset.intersection(*(model.samples_by for model in models)),
        grammar_engine=models[0].grammar_engine if _alike_in_grammars(models) else "",
        scores_prompts=all(model.scores_prompts for model in models),
        scores_every_token=all(model.scores_every_token for model in models),
        stage_names=tuple(model.name for model in models),
        verification_rules=tuple(
            rule
            for rule in models[0].verification_rules
            if all(rule in model.verification_rules for model in models)
        ),
    )


def _alike_in_grammars(models: Sequence[ModelDescription]) -> bool:
    return len({model.grammar_engine for model in models}) == 1


def _tell_reaches(models: Sequence[ModelDescription]) -> None:
    """Log which smaller models have a shorter context than the largest model."""
    for model in models[1:]:
        if model.context_length < models[0].context_length:
            _log.warning(
                "--then %s: holds %d tokens, and %s %d: longer texts are drafted without it",
                model.name,
                model.context_length,
                models[0].name,
                models[0].context_length,
            )
