"""Where a text's keys and values lie: buffers with room, and a length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from paceline_engine.model_cache import ModelCache

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["KeyValueShape", "KeyValues", "Step"]

_FIRST_CAPACITY = 64


class Step(Protocol):
    """A forward of one row, over the same buffers each time."""

    def __call__(self, token_id: int, *, position: int) -> Tensor:
        """Compute a row, and return the logits after it: (1, V), valid until the next call."""


@dataclass(frozen=True, slots=True)
class KeyValueShape:
    """What a model keeps of a token: in each of `layers` layers `heads` (G) keys and values."""

    layers: int
    heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        """What a token takes, in all layers together."""
        width = self.key_width + self.value_width
        return self.layers * self.heads * width * self.dtype.itemsize


class KeyValues(ModelCache):
    """A session's text in a model: (layers, 1, G, capacity, D) each of keys and values.

    A forward writes its rows beyond the last one, and only when it is over they count: so one that
    was given up, or failed, has changed nothing. A tree's rows lie behind the text's, in its order.
    All tokens are kept, also for layers with a sliding window, which mask by it: so any suffix can
    be forgotten.

    Attributes:
        keys, values: The buffers.
        step: A forward of one row over these buffers, once it is captured.
    """

    def __init__(
        self,
        shape: KeyValueShape,
        *,
        reserve_length: int,
        is_fixed: bool = False,
        tile: int = 1,
    ) -> None:
        """Build it without buffers: they come with the first tokens.

        Args:
            shape: The model's.
            reserve_length: Buffers double up to this many tokens, and are not outgrown there.
            is_fixed: Have buffers of that size at once, filled with zeros: they move only when
                more is reserved, and can be read beyond the length.
            tile: Have buffers of a multiple of so many tokens, that can be read beyond the length.
        """
        super().__init__()
        self._shape = shape
        self._reserved_length = reserve_length
        self._is_fixed = is_fixed
        self._tile = tile
        self.keys, self.values = (self._buffer(width, 0) for width in self._widths)
        self.step: Step | None = None

    def reserve(self, length: int) -> None:
        """Let buffers grow to so many tokens."""
        self._reserved_length = length

    @property
    def capacity(self) -> int:
        """How many tokens the buffers have room for."""
        return self.keys.shape[-2]

    @property
    def room(self) -> int:
        """How many rows more the buffers have room for."""
        return self.capacity - self.row_count

    @property
    def byte_count(self) -> int:
        """What the buffers take."""
        return self.keys.nbytes + self.values.nbytes

    def make_room(self, count: int, *, beside: int = 0) -> None:
        """Have buffers with room for so many tokens more.

        Args:
            count: So many.
            beside: Rows for which there shall be room behind them, too, if so much is reserved.

        Raises:
            RuntimeError: as the allocator says it, if there is no memory. Nothing has changed.
        """
        length = self.row_count + count
        if length + beside <= self._reserved_length:
            length += beside
        if self.capacity >= length:
            return
        wanted = self._reserved_length if self._is_fixed else max(2 * length, _FIRST_CAPACITY)
        capacity = max(length, min(wanted, self._reserved_length))
        capacity = -(-capacity // self._tile) * self._tile
        grown = [self._buffer(width, capacity) for width in self._widths]
        for old, new in zip((self.keys, self.values), grown, strict=True):
            new.narrow(-2, 0, self.row_count).copy_(old.narrow(-2, 0, self.row_count))
        self.keys, self.values = grown
        self.step = None

    def until(self, length: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return each layer's keys and values of the first tokens: (1, G, length, D) each."""
        keys, values = (each.narrow(-2, 0, length) for each in (self.keys, self.values))
        return keys.unbind(), values.unbind()

    def between(self, start: int, count: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return each layer's places for some tokens: (G, count, D) each."""
        keys, values = (each[:, 0].narrow(-2, start, count) for each in (self.keys, self.values))
        return keys.unbind(), values.unbind()

    def clear(self) -> None:
        """Forget all, and give the memory back."""
        super().clear()
        self.keys, self.values = (self._buffer(width, 0) for width in self._widths)
        self.step = None

    @torch.inference_mode()
    def close_up(self, kept: Sequence[int], *, start: int, layers: int) -> None:
        """Move rows, counted from one on, to just that one, in the first layers."""
        if tuple(kept) == tuple(range(len(kept))):
            return
        rows = torch.tensor([start + index for index in kept]).to(self._shape.device)
        for each in (self.keys[:layers], self.values[:layers]):
            each.narrow(-2, start, len(kept)).copy_(each.index_select(-2, rows))

    def _gather(self, path: Sequence[int]) -> None:
        self.close_up(path, start=self.length, layers=self._shape.layers)

    def _crop(self, length: int) -> None:
        del length  # only the tokens count

    @property
    def _widths(self) -> tuple[int, int]:
        return self._shape.key_width, self._shape.value_width

    def _buffer(self, width: int, capacity: int) -> Tensor:
        new = torch.zeros if self._is_fixed or self._tile > 1 else torch.empty
        size = (self._shape.layers, 1, self._shape.heads, capacity, width)
        return new(size, dtype=self._shape.dtype, device=self._shape.device)
