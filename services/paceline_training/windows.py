"""The part of the text that a step learns from: a function of its number, so runs can resume."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

_EPOCH_STRIDE = 1_000_003  # Keeps the seeds of neighbouring runs' epochs apart.


class TextTooShortError(Exception):
    """There is less text than one batch takes."""


class TextWindows:
    """Windows of equal length from streams of tokens; each stream has the same share of a batch.

    Each epoch of a stream cuts it at another offset, and shuffles the pieces anew.

    Args:
        streams: (N,) int64 each.
        length: Tokens in a window.
        batch: Windows in a step; a multiple of the number of streams.
        seed: The seed of offsets and shuffles.

    Raises:
        TextTooShortError: a stream has too few tokens for its share of a batch.
    """

    def __init__(self, streams: Sequence[Tensor], *, length: int, batch: int, seed: int) -> None:
        self._streams = streams
        self._length = length
        self._rows = batch // len(streams)
        self._seed = seed
        for stream in streams:
            # One window less than fits: the offset of an epoch may cost one.
            if (count := len(stream) // length - 1) < self._rows:
                raise TextTooShortError(
                    f"the text has {len(stream)} tokens, and {self._rows} windows of {length} need"
                    f" at least {(self._rows + 1) * length}; have more text, or shorter windows"
                    f" (there are {max(count, 0)})"
                )

    def at(self, step: int) -> Tensor:
        """Return the (batch, length) int64 tokens of a step."""
        return torch.cat([self._part(stream, step) for stream in self._streams])

    def _part(self, stream: Tensor, step: int) -> Tensor:
        count = len(stream) // self._length - 1
        epoch, index = divmod(step, count // self._rows)
        generator = torch.Generator().manual_seed(self._seed * _EPOCH_STRIDE + epoch)
        offset = int(torch.randint(self._length, (1,), generator=generator))
        order = torch.randperm(count, generator=generator)
        chosen = order[index * self._rows : (index + 1) * self._rows] * self._length + offset
        return torch.stack([stream[start : start + self._length] for start in chosen.tolist()])


class WholeTexts:
    """Texts of equal length, from their first token on; each epoch takes them in another order.

    Args:
        token_ids: (N, L) int64.
        batch: Texts in a step.
        seed: The seed of the orders.

    Raises:
        TextTooShortError: there are fewer texts than one step takes.
    """

    def __init__(self, token_ids: Tensor, *, batch: int, seed: int) -> None:
        if len(token_ids) < batch:
            raise TextTooShortError(f"a step takes {batch} texts, and there are {len(token_ids)}")
        self._token_ids = token_ids
        self._batch = batch
        self._seed = seed

    def at(self, step: int) -> Tensor:
        """Return the (batch, L) int64 tokens of a step."""
        epoch, index = divmod(step, len(self._token_ids) // self._batch)
        generator = torch.Generator().manual_seed(self._seed * _EPOCH_STRIDE + epoch)
        order = torch.randperm(len(self._token_ids), generator=generator)
        return self._token_ids[order[index * self._batch : (index + 1) * self._batch]]
