"""From plain settings to a loaded stack of models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from paceline.plain_files import read_plain_file
from paceline_contract.limits import MOST_BIGRAM_BYTES
from paceline_contract.max_gram import BigramError, MaxGram, parse_bigrams
from paceline_contract.suffix_index import Tie
from paceline_engine.deciding.cascade import MAX_GRAM, MatrixError, parse_matrix
from paceline_engine.loading import load_backend
from paceline_engine.stack_backend.stack import StackBackend
from paceline_engine.terms.backend import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_engine.loading import LoadOptions
    from paceline_engine.terms.backend import Backend

AUTO = "auto"
"""The matrix is chosen by the stack's own measurements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackOptions:
    """The stages that draft below a model.

    Attributes:
        then: Models, largest first, each a directory or a hub id; the last may be MAX_GRAM.
        cascade: The matrix as JSON, or AUTO.
        leniency: The leniency of the stack's reviews, 1 or more.
        tie: "earliest" or "latest": the match that Max-Gram copies from.
        bigrams: Path of a bigram table for Max-Gram; None: no table.
    """

    then: Sequence[str] = ()
    cascade: str = AUTO
    leniency: float = 1.0
    tie: str = Tie.EARLIEST.value
    bigrams: str | None = None


def load_stack(largest: LoadOptions, stack: StackOptions) -> StackBackend:
    """Load all models of a stack, as the largest is loaded.

    Raises:
        ModelLoadError: a model cannot be served, or the models do not fit together; the message is
            one line for the operator.
    """
    if not stack.leniency >= 1:
        raise ModelLoadError(f"--leniency {stack.leniency} is below 1")
    if MAX_GRAM in stack.then[:-1]:
        raise ModelLoadError(f"--then {MAX_GRAM} comes last")
    try:
        matrix = (
            None
            if stack.cascade == AUTO
            else parse_matrix(stack.cascade, stage_count=1 + len(stack.then))
        )
    except MatrixError as error:
        raise ModelLoadError(f"--cascade {error}") from None
    others = [name for name in stack.then if name != MAX_GRAM]
    models = [load_backend(largest)]
    models += [load_backend(replace(largest, model=each, revision=None)) for each in others]
    has_max_gram = len(others) < len(stack.then)
    return StackBackend(
        models,
        matrix=matrix,
        leniency=stack.leniency,
        new_max_gram=_max_gram(stack, models[0]) if has_max_gram else None,
    )


def _max_gram(stack: StackOptions, model: Backend) -> partial[MaxGram]:
    bigrams: Sequence[int | None] = ()
    if stack.bigrams is not None:
        try:
            text = read_plain_file(stack.bigrams, most_bytes=MOST_BIGRAM_BYTES).decode()
            bigrams = parse_bigrams(text, vocabulary_size=model.description.vocabulary_size)
        except (OSError, UnicodeDecodeError, BigramError) as error:
            raise ModelLoadError(f"--max-gram-bigrams {stack.bigrams}: {error}") from None
    return partial(MaxGram, tie=Tie(stack.tie), bigrams=bigrams)
