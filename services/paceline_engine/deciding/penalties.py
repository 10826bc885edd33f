"""Penalties for the tokens that are in a sequence already: repetition, frequency and presence.

Theory of operation
    A forward leaves nothing of this in a processor's caches, so what counts is how many library
    calls and how many far places of memory a row takes, and not the arithmetic. So the tokens that
    were ever counted are listed, and no row searches all V counts; a row's listed logits are read
    once and written once; and on a CPU numpy does that, whose calls cost less than torch's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable

    from torch import Tensor

    from paceline_contract.sampling import SamplingParameters


class Penalties:
    """The counted tokens of one sequence, and what they cost. Worker thread only.

    Args:
        sampling: How tokens are chosen.
        vocabulary_size: V, the tokens that can be chosen.
    """

    def __init__(self, sampling: SamplingParameters, *, vocabulary_size: int) -> None:
        self._sampling = sampling
        self._repeats = sampling.repetition_penalty != 1
        self._in_sequence = np.zeros(vocabulary_size, dtype=np.int32)
        self._in_answer = np.zeros(vocabulary_size, dtype=np.int32)
        # Every token that was ever counted: what a rejected draft had stays, with a count of 0.
        self._is_listed = np.zeros(vocabulary_size, dtype=np.bool_)
        self._listed = np.empty(0, dtype=np.int64)

    @staticmethod
    def has(sampling: SamplingParameters) -> bool:
        """Whether any token is penalised."""
        return bool(
            sampling.repetition_penalty != 1
            or sampling.frequency_penalty
            or sampling.presence_penalty
        )

    def count(self, tokens: array[int], answer: array[int], *, change: int) -> None:
        """Count tokens that come at the sequence's end, or take them out of the counts.

        Args:
            tokens: All of them.
            answer: Those of the answer among them.
            change: 1 or -1.
        """
        in_answer = np.asarray(answer, dtype=np.int64)
        np.add.at(self._in_answer, in_answer, change)
        counted = in_answer
        if self._repeats:
            counted = np.asarray(tokens, dtype=np.int64)
            np.add.at(self._in_sequence, counted, change)
        new = counted[~self._is_listed[counted]]
        if len(new):
            self._is_listed[new] = True
            self._listed = np.concatenate((self._listed, np.unique(new)))

    def apply(self, row: Tensor) -> None:
        """Change a row's logits, (V,) float32 or float64."""
        if not len(self._listed):
            return
        in_sequence, in_answer = self._in_sequence[self._listed], self._in_answer[self._listed]
        if row.device.type == "cpu":
            numbers = row.numpy()
            own = numbers[self._listed]
            of_answer = in_answer.astype(own.dtype)
            numbers[self._listed] = self._penalised(own, in_sequence, of_answer, where=np.where)
            return
        listed = torch.from_numpy(self._listed).to(row.device)
        seen = torch.from_numpy(in_sequence).to(row.device)
        counts = torch.from_numpy(in_answer).to(row)
        row[listed] = self._penalised(row[listed], seen, counts, where=torch.where)

    def _penalised(
        self, own: Any, in_sequence: Any, in_answer: Any, *, where: Callable[..., Any]
    ) -> Any:
        """Return the listed logits with their penalties, as arrays or as tensors."""
        sampling = self._sampling
        if self._repeats:
            penalty = sampling.repetition_penalty
            penalised = where(own > 0, own / penalty, own * penalty)
            own = where(in_sequence > 0, penalised, own)
        if sampling.frequency_penalty or sampling.presence_penalty:
            penalties = in_answer * sampling.frequency_penalty + sampling.presence_penalty
            own = where(in_answer > 0, own - penalties, own)
        return own
