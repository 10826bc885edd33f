"""A model that drafts for a target with another vocabulary.

The rest of the server sees a drafter of the target's vocabulary: sequences, drafts and
distributions are in the target's tokens. Inside, a sequence is the same text in the model's own
tokens (`spoken_text.py`), and a row of its scores becomes a row of the target's (`token_map.py`,
`mapped_rows.py`). Filters and noise act on the target's row, as in every other drafter: the noise
of a token is that of its *target* id.

A step of an item is one forward of the model (`steps.py`). It may find no token, where drafting on
is needed to know the next; or several, where the rows are there already. The models of a stack are
wrapped in the same way, and review chains of the target's tokens.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline_contract.sampling import FILTERS
from paceline_engine.speaking.mapped_rows import RowMap
from paceline_engine.speaking.overlap import measure_overlap
from paceline_engine.speaking.speaking_text import SpeakingText
from paceline_engine.speaking.spoken_text import SpokenText, has_seams
from paceline_engine.speaking.steps import Drafting, Reviewing
from paceline_engine.speaking.token_map import map_tokens
from paceline_engine.speaking.vocabulary import Vocabulary
from paceline_engine.terms.backend import Backend, ComposedBackend, ModelLoadError, TokenMemory
from paceline_engine.terms.items import Draft

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_engine.model_files.target_tokens import TargetTokens
    from paceline_engine.speaking.steps import Step
    from paceline_engine.terms.backend import Interrupt
    from paceline_engine.terms.calls import SessionSpec
    from paceline_engine.terms.items import Item, Outcome

_RULES_VERSION = 1
"""The version of the mapping; a new one makes another drafter."""

_SPARE_TOKENS = 16  # of the model's, beyond what a text should need


def speak(model: Backend, target: TargetTokens) -> Backend:
    """Let a model draft for a target; one with the target's own tokens does so as it is.

    Raises:
        ModelLoadError: their vocabularies have too little in common, or one cannot be translated.
    """
    description = model.description
    if model.tokenizer is None:
        raise ModelLoadError(f"--speak: model {description.name!r} has no tokenizer")
    if (model.tokenizer, description.vocabulary_size) == (target.tokenizer, target.vocabulary_size):
        return model
    ours = Vocabulary(
        model.tokenizer,
        size=description.vocabulary_size,
        end_ids=description.eos_token_ids,
        name=description.name,
    )
    theirs = Vocabulary(
        target.tokenizer,
        size=target.vocabulary_size,
        end_ids=target.end_ids,
        name=f"--speak {target.name}",
    )
    return SpeakingBackend(model, target=theirs, drafter=ours, tokenizer=target.tokenizer)


class SpeakingBackend(ComposedBackend):
    """A model, wrapped; see above.

    Cost: a session keeps a few rows of its last draft.
    """

    def __init__(
        self, model: Backend, *, target: Vocabulary, drafter: Vocabulary, tokenizer: bytes
    ) -> None:
        """Wrap a loaded model that computes logits.

        Args:
            tokenizer: The target's.

        Raises:
            ModelLoadError: too little of what the target writes are tokens of the drafter's.
        """
        self._model = model
        self._target, self._drafter = target, drafter
        self.overlap = measure_overlap(target, drafter)
        self.overlap.check(model.description.name)
        self._token_map = map_tokens(target, drafter)
        self._rows = RowMap(self._token_map, size=target.size)
        self._has_seams = has_seams(drafter)
        self.tokenizer = tokenizer
        own = model.description
        self._longest = own.context_length
        told = hashlib.sha256(tokenizer).hexdigest()
        parts = ("speaking", own.fingerprint, told, target.size, target.end_ids, _RULES_VERSION)
        description = replace(
            own,
            fingerprint=hashlib.sha256(repr(parts).encode()).hexdigest(),
            tokenizer_fingerprint=told,
            vocabulary_size=target.size,
            eos_token_ids=target.end_ids,
            context_length=max(1, int(own.context_length / max(1.0, self.overlap.ratio))),
            takes_trees=False,
            samples_by=FILTERS,
            grammar_engine="",
            scores_prompts=False,
            fim_token_ids=(),
        )
        super().__init__([model], description)

    @property
    def cuts_prompts(self) -> bool:
        """Whether a part of a long prompt is computed as in the whole."""
        return self._model.cuts_prompts

    @property
    def judges_row_by_row(self) -> bool:
        """Whether the model does."""
        return self._model.judges_row_by_row

    @property
    def layers_run(self) -> int:
        """How many layers forwards have gone through so far."""
        return self._model.layers_run

    def measure(self, interrupt: Interrupt) -> None:
        """Measure what the model decides by. Worker thread only."""
        self._model.measure(interrupt)

    def token_memory(self) -> TokenMemory | None:
        """Measure the memory for the target's tokens: each is one token of the model's or more."""
        memory = self._model.token_memory()
        if memory is None:
            return None
        size = memory.bytes_per_token * max(1.0, self.overlap.ratio)
        return replace(memory, bytes_per_token=math.ceil(size))

    def new_cache(self, spec: SessionSpec) -> SpeakingText:
        """Begin an empty sequence for a session."""
        length = self._own_length(spec.reserve_length)
        own = replace(spec, reserve_length=length, limit_length=None)
        text = SpokenText(self._target, self._drafter, self._token_map, seams=self._has_seams)
        return SpeakingText(
            self._model.new_cache(own), text, own_length=self._own_length, reserve_length=length
        )

    def run(
        self, items: Sequence[Item], interrupt: Interrupt, *, row_limit: int | None = None
    ) -> list[Outcome | Exception]:
        """Do a step of each item: see `Backend.run`. One forward of the model."""
        steps = [self._begin(item) for item in items]
        asked = [
            step.wanted.item(step.item, step.text) for step in steps if step.wanted is not None
        ]
        given = iter(self._model.run(asked, interrupt, row_limit=row_limit) if asked else ())
        return [step.end(None if step.wanted is None else next(given)) for step in steps]

    def _begin(self, item: Item) -> Step:
        kind = Drafting if isinstance(item.task, Draft) else Reviewing
        return kind(item, self._rows, longest=self._longest)

    def _own_length(self, length: int) -> int:
        """Return how many of the model's tokens a text of the target's is likely to have."""
        return min(self._longest, math.ceil(length * self.overlap.ratio) + _SPARE_TOKENS)
