"""The KV arena: memory for keys and values, in which short sequences lie side by side.

A kernel attends to several sequences at once, without a copy, if they lie at equal distances. So a
sequence's buffers are a place in a slab, and all places of a slab have room for equally many
tokens:

    slab | place 0            | place 1            | place 2            |
         | text         |00000| free               | text    |0000000000|

The keys and values of all layers of a sequence lie together, because memory is taken in whole
pages, and pages can be large. Unused slots are zeros: a kernel reads each place up to the longest
sequence's length, and a masked NaN would still poison the output. A place is free when no object
refers to it, and a slab is freed with its last place.
"""

from __future__ import annotations

import itertools
import math
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

_LEAST_LENGTH = 64
# A longer sequence's attention takes long, so a kernel of its own costs nothing beside it.
_MOST_SHARED_LENGTH = 1024
# The size of a slab. It holds all sequences of a small model. It holds few of a large model, where
# a kernel for each sequence costs little beside the products. Unused pages of it take no memory.
_SLAB_BYTES = 1 << 27
# Without attention sequences have places, too, in which nothing lies.
_EMPTY_PLACES = 1024
# The width of a processor's widest loads.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class KeyValueShape:
    """The state of one token: in each of `layers` layers `heads` (G) keys and values."""

    layers: int
    heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        """The memory of a token, in all layers together."""
        width = self.key_width + self.value_width
        return self.layers * self.heads * width * self.dtype.itemsize


class Slabs:
    """All slabs of a model. Worker thread only; places may be dropped on any."""

    def __init__(self, shape: KeyValueShape, *, tile: int = 1) -> None:
        """Build it without memory.

        Args:
            shape: The model's.
            tile: Sequences have room for a multiple of so many tokens, and can be read beyond their
                length.
        """
        self.shape, self.tile = shape, tile
        self._numbers = itertools.count()
        self._known: dict[int, list[weakref.ref[Slab]]] = {}

    def place(self, capacity: int) -> Place:
        """Find room for a sequence of so many tokens.

        Raises:
            RuntimeError: as the allocator says it, if there is no memory.
        """
        length = max(_LEAST_LENGTH, 1 << (capacity - 1).bit_length())
        # On an accelerator memory is taken before a sequence comes to it.
        if length > _MOST_SHARED_LENGTH or self.shape.device.type != "cpu":
            return self._slab(capacity, has_zeros=self.tile > 1).take()
        return self._shared(length).take()

    def _shared(self, length: int) -> Slab:
        """Return a slab of such places that has room."""
        living = [slab for known in self._known.get(length, ()) if (slab := known()) is not None]
        slab = next((each for each in living if each.has_room), None)
        if slab is None:
            place_bytes = length * self.shape.bytes_per_token
            count = max(1, _SLAB_BYTES // place_bytes) if place_bytes else _EMPTY_PLACES
            slab = self._slab(length, count=count)
            living.append(slab)
        self._known[length] = [weakref.ref(each) for each in living]
        return slab

    def _slab(self, length: int, *, count: int = 1, has_zeros: bool = True) -> Slab:
        number = next(self._numbers)
        return Slab(self.shape, number=number, length=length, count=count, has_zeros=has_zeros)


class Slab:
    """Places side by side.

    Attributes:
        number: The slab's number.
        length: The tokens for which each place has room.
        has_zeros: Whether unused slots are zeros, so that kernels may read them.
        keys, values: (places, layers, G, length, D).
        used: How many rows of each place may not be zeros.
    """

    def __init__(
        self, shape: KeyValueShape, *, number: int, length: int, count: int, has_zeros: bool
    ) -> None:
        self.number, self.length, self.has_zeros = number, length, has_zeros
        self.used = [0] * count
        make = _zeros if has_zeros else torch.empty
        self.keys, self.values = (
            make(
                (count, shape.layers, shape.heads, length, width),
                dtype=shape.dtype,
                device=shape.device,
            )
            for width in (shape.key_width, shape.value_width)
        )
        self._holders: list[weakref.ref[Place] | None] = [None] * count

    @property
    def has_room(self) -> bool:
        """Whether a place is free."""
        return any(holder is None or holder() is None for holder in self._holders)

    def take(self) -> Place:
        """Return the first free place. The caller knows that there is one."""
        index = next(
            index
            for index, holder in enumerate(self._holders)
            if holder is None or holder() is None
        )
        place = Place(self, index)
        self._holders[index] = weakref.ref(place)
        place.blank(0)
        return place

    def rows(self, places: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Return the indices of tokens among all rows, in each layer: (layers, G * tokens).

        Args:
            places: The place of each token.
            positions: The row of each token in its sequence.
        """
        _, layers, heads, length, _ = self.keys.shape
        device = self.keys.device
        told = torch.tensor((places, positions)).to(device, non_blocking=True)
        tokens = told[0] * (layers * heads * length)
        tokens += told[1]
        heads_before = torch.arange(layers * heads, device=device).view(layers, heads, 1)
        return (heads_before * length + tokens).flatten(1)

    def keep(self, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Keep keys and values of a layer, (G, tokens, D), in its `rows` of these tokens."""
        for kept, new in ((self.keys, keys), (self.values, values)):
            width = kept.shape[-1]
            kept.view(-1, width).index_copy_(0, rows, new.reshape(-1, width))

    def span(self, first: int, *, count: int, length: int) -> tuple[Sequence[Tensor], ...]:
        """Return each layer's first keys, and values, of `count` places: (count, G, length, D)."""
        keys, values = (
            each[first : first + count, ..., :length, :].unbind(1)
            for each in (self.keys, self.values)
        )
        return keys, values


def _zeros(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make zeros that, on a CPU, take no memory until they are written to.

    Raises:
        RuntimeError: there is no memory.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    byte_count = math.prod(shape) * dtype.itemsize
    try:
        # torch would write zeros; NumPy gets pages that are zero once they are used.
        memory = torch.from_numpy(np.zeros(byte_count + _ALIGNMENT, np.uint8))
    except MemoryError as error:
        raise RuntimeError(f"can't allocate memory: {byte_count} bytes") from error
    start = -memory.data_ptr() % _ALIGNMENT
    return memory[start : start + byte_count].view(dtype).view(*shape)


class Place:
    """A sequence's part of a slab, for as long as it is held.

    Attributes:
        address: Sorts sequences in the order in which they lie.
    """

    __slots__ = ("__weakref__", "address", "index", "slab")

    def __init__(self, slab: Slab, index: int) -> None:
        self.slab, self.index = slab, index
        self.address = (slab.number, index)

    def buffers(self, length: int) -> tuple[Tensor, Tensor]:
        """Return its first keys and values: (layers, 1, G, length, D) each."""
        keys, values = (
            each[self.index, :, None, :, :length] for each in (self.slab.keys, self.slab.values)
        )
        return keys, values

    def will_hold(self, length: int) -> None:
        """Learn that the first `length` rows may not be zeros from now on."""
        self.slab.used[self.index] = max(length, self.slab.used[self.index])

    def blank(self, length: int) -> None:
        """Write zeros beyond the first `length` rows, if kernels may read them."""
        if self.slab.has_zeros and self.slab.used[self.index] > length:
            self._fill(length, self.slab.used[self.index] - length)
            self.slab.used[self.index] = length

    @torch.inference_mode()
    def _fill(self, start: int, count: int) -> None:
        for each in (self.slab.keys, self.slab.values):
            each[self.index, :, :, start : start + count].zero_()

    def is_before(self, other: Place) -> bool:
        """Whether another place is the next one in the same slab."""
        return other.slab is self.slab and other.index == self.index + 1
