"""A sequence's keys and values: buffers with room, and a length."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline_engine.terms.model_cache import ModelCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_engine.torch_backend.kv_arena import Place, Slabs

_FIRST_CAPACITY = 64


class KeyValues(ModelCache):
    """A session's sequence in a model: (layers, 1, G, capacity, D) each of keys and values.

    A forward writes its rows beyond the last one, and they count only when the forward has ended.
    So an interrupted or failed forward has changed nothing. A tree's rows lie behind the
    sequence's, in the tree's order. All tokens are kept, also for layers with a sliding window,
    which is a mask. So any suffix can be forgotten.

    Attributes:
        keys, values: The buffers.
        place: Their place in the KV arena; None before the first tokens.
    """

    def __init__(self, slabs: Slabs, *, reserve_length: int, can_be_copied: bool = True) -> None:
        """Build it without buffers: they come with the first tokens.

        Args:
            slabs: The model's.
            reserve_length: Buffers double up to this many tokens, and are not outgrown there.
            can_be_copied: Whether a token's keys and values are the same in a longer sequence.
        """
        super().__init__()
        self._slabs = slabs
        self._can_be_copied = can_be_copied
        self._reserved_length = reserve_length
        self.keys, self.values = self._nothing()
        self.place: Place | None = None

    def reserve(self, length: int) -> None:
        """Let buffers grow to so many tokens."""
        self._reserved_length = length

    @property
    def can_be_copied(self) -> bool:
        """Whether another sequence can begin with a copy of this one's state."""
        return self._can_be_copied

    @property
    def capacity(self) -> int:
        """How many tokens the buffers have room for."""
        return self.keys.shape[-2]

    @property
    def room(self) -> int:
        """How many further rows the buffers have room for."""
        return self.capacity - self.row_count

    @property
    def byte_count(self) -> int:
        """The memory of the buffers."""
        return self.keys.nbytes + self.values.nbytes

    def make_room(self, count: int, *, beside: int = 0) -> None:
        """Make room in the buffers for further rows.

        Args:
            count: How many rows.
            beside: Further rows behind them; room is made for these only if it is reserved.

        Raises:
            RuntimeError: as the allocator says it, if there is no memory. Nothing has changed.
        """
        length = self.row_count + count
        if length + beside <= self._reserved_length:
            length += beside
        if self.capacity >= length:
            return
        capacity = max(length, min(max(2 * length, _FIRST_CAPACITY), self._reserved_length))
        capacity = -(-capacity // self._slabs.tile) * self._slabs.tile
        if self.place is None or self.place.slab.length < capacity:
            self._move_to(self._slabs.place(capacity))
        assert self.place is not None
        self.keys, self.values = self.place.buffers(capacity)

    def _move_to(self, place: Place) -> None:
        count = self.row_count
        for old, new in zip((self.keys, self.values), place.buffers(count), strict=True):
            new.copy_(old.narrow(-2, 0, count))
        place.will_hold(count)
        self.place = place

    def _nothing(self) -> tuple[Tensor, Tensor]:
        """Return buffers of no tokens."""
        shape = self._slabs.shape
        keys, values = (
            torch.empty(
                (shape.layers, 1, shape.heads, 0, width), dtype=shape.dtype, device=shape.device
            )
            for width in (shape.key_width, shape.value_width)
        )
        return keys, values

    def until(self, length: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return each layer's keys and values of the first tokens: (1, G, length, D) each."""
        keys, values = (each.narrow(-2, 0, length) for each in (self.keys, self.values))
        return keys.unbind(), values.unbind()

    def places_from(self, like: KeyValues) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Return where keys, and values, lie, counted in numbers from another sequence's.

        For each: the place of the first number, the step to the next layer, and to the next head.
        """
        keys, values = (
            ((own.data_ptr() - other.data_ptr()) // own.itemsize, own.stride(0), own.stride(2))
            for own, other in ((self.keys, like.keys), (self.values, like.values))
        )
        return keys, values

    def between(self, start: int, count: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return each layer's places for some tokens: (G, count, D) each."""
        keys, values = (each[:, 0].narrow(-2, start, count) for each in (self.keys, self.values))
        return keys.unbind(), values.unbind()

    def clear(self) -> None:
        """Forget all state, and free the memory."""
        super().clear()
        self.keys, self.values = self._nothing()
        self.place = None

    @torch.inference_mode()
    def close_up(self, kept: Sequence[int], *, start: int, layers: int) -> None:
        """Move the rows `start` + `kept` together, from `start` on, in the first layers."""
        if tuple(kept) == tuple(range(len(kept))):
            return
        rows = torch.tensor([start + index for index in kept]).to(self.keys.device)
        for each in (self.keys[:layers], self.values[:layers]):
            each.narrow(-2, start, len(kept)).copy_(each.index_select(-2, rows))

    @torch.inference_mode()
    def _copy(self, source: ModelCache, length: int) -> None:
        assert isinstance(source, KeyValues)
        self.make_room(length)
        assert self.place is not None
        self.place.will_hold(length)
        theirs = (source.keys, source.values)
        for own, other in zip((self.keys, self.values), theirs, strict=True):
            own.narrow(-2, 0, length).copy_(other.narrow(-2, 0, length))

    def _gather(self, path: Sequence[int]) -> None:
        self.close_up(path, start=self.length, layers=len(self.keys))

    def _crop(self, length: int) -> None:
        if self.place is not None:
            self.place.blank(length)
