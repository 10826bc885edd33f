"""Shaping: how the tokens so far change the logits of the next one, before it is chosen.

With c the number of times that a token is in the answer so far, its logit l becomes, in this order:

    l / r if l > 0 else l * r    if the token is in the sequence, prompt or answer: repetition
                                 penalty r (Keskar et al. 2019, arXiv 1909.05858, section 4.1)
    l - c * f - p                if c > 0: frequency penalty f and presence penalty p
    l + b                        the token's bias
    -inf                         for an end token, while the answer is shorter than `min_tokens`
    -inf                         for a token with which the answer cannot follow the grammar

Temperature, filters and noise come after that. All of this is a function of the tokens before the
row, so each row of a block or of a tree is shaped by the tokens on its own path, and every decoding
method chooses what plain decoding would choose. Nothing of it is on the wire: the counts follow
from the tokens wherever they are missing.
"""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING

import numpy as np
import torch

from paceline.errors import InvalidFieldError
from paceline_engine.deciding.grammars import FIELD
from paceline_engine.deciding.penalties import Penalties
from paceline_engine.terms.model_cache import common_length

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor

    from paceline_contract.proposal import Proposal
    from paceline_engine.deciding.grammars import GrammarPath
    from paceline_engine.terms.calls import SessionSpec


class Shaper:
    """Shapes the logits of one sequence: its tokens, counted. Worker thread only.

    Args:
        spec: How tokens are chosen.
        vocabulary_size: V, the tokens that can be chosen.
        grammar: What the answer follows; None: nothing.

    Cost: some 0.1 ms for a row of 50,000 tokens, and as long for each 2,000 tokens that come.
    """

    def __init__(
        self, spec: SessionSpec, *, vocabulary_size: int, grammar: GrammarPath | None = None
    ) -> None:
        self._sampling = spec.sampling
        self._prompt_length = spec.prompt_length
        self._end_token_ids = list(spec.end_token_ids)
        bias = spec.sampling.logit_bias
        self._bias_ids = np.asarray([token for token, _ in bias], dtype=np.int64)
        self._biases = np.asarray([each for _, each in bias], dtype=np.float64)
        self._grammar = grammar
        self._failures: dict[int, str] = {}  # by row of the last call
        self._tokens = array("I")
        self._penalties = (
            Penalties(spec.sampling, vocabulary_size=vocabulary_size)
            if Penalties.has(spec.sampling)
            else None
        )

    def check(self, rows: Iterable[int]) -> None:
        """Check that the grammar could say what may come next in the rows that were decided by.

        Raises:
            InvalidFieldError: It was too complex for the tokens before one of them.
        """
        for row in rows:
            if row in self._failures:
                raise InvalidFieldError.of(FIELD, self._failures[row])

    def shape(self, logits: Tensor, prefix: array[int], proposal: Proposal) -> Tensor:
        """Shape the rows of a proposal.

        Args:
            logits: (T + 1, V), any float dtype; row 0 follows the prefix, row i + 1 the proposal's
                i-th token.

        Returns:
            (T + 1, V), float64 if the logits are, else float32.
        """
        rows = range(len(proposal) + 1)
        return self._shape(logits, prefix, [(*_path(proposal, row),) for row in rows])

    def shape_ends(
        self, logits: Tensor, prefix: array[int], found: Proposal, due: Sequence[int]
    ) -> Tensor:
        """Shape the rows of a growing draft: the row after each due token; none: after the prefix.

        Args:
            logits: (max(1, len(due)), V), any float dtype.
            found: The draft's tokens.
            due: The indices of those whose rows these are.
        """
        ends = [(*_path(found, index + 1),) for index in due]
        return self._shape(logits, prefix, ends or [()])

    def forced(self, prefix: array[int], beyond: Sequence[int] = (), *, most: int) -> list[int]:
        """Return the tokens that the grammar forces after a prefix and the tokens beyond it."""
        if self._grammar is None or most <= 0:
            return []
        self._move_to(prefix)
        try:
            self._follow((*beyond,), prefix_length=len(prefix))
            return self._grammar.forced(most) if self._is_followed else []
        finally:
            self._cut(len(prefix))

    def followed(self, prefix: array[int], proposal: Proposal) -> Sequence[int]:
        """Return the indices of a proposal's tokens with which the answer follows the grammar.

        All of them where the grammar says nothing: after a prefix that does not follow it, and
        where a token is too complex for it.
        """
        indices = range(len(proposal))
        if self._grammar is None:
            return indices
        self._move_to(prefix)
        try:
            if not self._is_followed:
                return indices
            refused: set[int] = set()  # rows
            for index, parent in enumerate(proposal.all_parents):
                if parent not in refused:
                    path = (*_path(proposal, index + 1),)
                    self._follow(path, prefix_length=len(prefix))
                    if self._grammar.failure:
                        return indices
                    if self._is_followed:
                        continue
                refused.add(index + 1)
            return [index for index in indices if index + 1 not in refused]
        finally:
            self._cut(len(prefix))

    @property
    def _is_followed(self) -> bool:
        """Whether the grammar has taken the whole answer so far."""
        answer_length = max(0, len(self._tokens) - self._prompt_length)
        return self._grammar is not None and self._grammar.length == answer_length

    def _shape(
        self, logits: Tensor, prefix: array[int], paths: Sequence[tuple[int, ...]]
    ) -> Tensor:
        """Shape each row by the prefix and its path."""
        shaped = logits.to(
            torch.float64 if logits.dtype == torch.float64 else torch.float32, copy=True
        )
        self._failures = {}
        self._move_to(prefix)
        try:
            for number, (row, path) in enumerate(zip(shaped, paths, strict=True)):
                self._follow(path, prefix_length=len(prefix))
                self._shape_row(row)
                if self._grammar is not None and self._grammar.failure:
                    self._failures[number] = self._grammar.failure
        finally:
            self._cut(len(prefix))
        return shaped

    def _shape_row(self, row: Tensor) -> None:
        if self._penalties is not None:
            self._penalties.apply(row)
        if len(self._bias_ids):
            self._add_biases(row)
        self._end_row(row)

    def _add_biases(self, row: Tensor) -> None:
        if row.device.type == "cpu":  # as with penalties: numpy's calls cost less
            numbers = row.numpy()
            numbers[self._bias_ids] += self._biases.astype(numbers.dtype)
            return
        token_ids = torch.from_numpy(self._bias_ids).to(row.device)
        row[token_ids] += torch.from_numpy(self._biases).to(row)

    def _end_row(self, row: Tensor) -> None:
        """Leave out the tokens that may not come next."""
        answer_length = len(self._tokens) - self._prompt_length
        grammar = self._grammar
        # Behind a token that the grammar refuses no row is ever read, and so none is masked.
        if grammar is not None and self._is_followed:
            if (allowed := grammar.allowed()) is not None:
                row.masked_fill_(~torch.from_numpy(allowed).to(row.device), -math.inf)
            if grammar.is_complete:  # then nothing but the end may follow
                return
        if answer_length < self._sampling.min_tokens:
            row[self._end_token_ids] = -math.inf

    def _move_to(self, prefix: array[int]) -> None:
        """Count the tokens of a prefix; what it shares with the last one is counted already."""
        self._cut(common_length(self._tokens, prefix))
        self._add(prefix[len(self._tokens) :])

    def _follow(self, path: tuple[int, ...], *, prefix_length: int) -> None:
        beyond = self._tokens[prefix_length:]
        shared = common_length(beyond, array("I", path))
        self._cut(prefix_length + shared)
        self._add(array("I", path[shared:]))

    def _cut(self, length: int) -> None:
        self._count(length, -1)
        del self._tokens[length:]

    def _add(self, tokens: array[int]) -> None:
        start = len(self._tokens)
        self._tokens.extend(tokens)
        self._count(start, 1)

    def _count(self, start: int, change: int) -> None:
        """Count the tokens from a place on, or take them out of the counts."""
        if start == len(self._tokens):
            return
        answer_start = max(start, self._prompt_length)
        answer = self._tokens[answer_start:]
        if self._penalties is not None:
            self._penalties.count(self._tokens[start:], answer, change=change)
        if not answer or self._grammar is None:
            return
        taken_count = answer_start - self._prompt_length
        if change < 0:
            self._grammar.cut(taken_count)
        elif self._grammar.length == taken_count:
            self._grammar.add(answer.tolist())


def _path(proposal: Proposal, row: int) -> Iterator[int]:
    """Yield the tokens from the prefix to a row of a proposal."""
    indices = [] if not row else [*proposal.ancestors(row - 1)]
    yield from proposal.along(reversed(indices))
