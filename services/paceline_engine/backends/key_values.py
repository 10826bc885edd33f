"""Where a session's keys and values lie: buffers with room, and a length."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

from transformers.cache_utils import Cache, DynamicLayer

if TYPE_CHECKING:
    from torch import Tensor

    from paceline_engine.backends.captured import CapturedStep

__all__ = ["KeyValueLayer", "KeyValues"]

_FIRST_CAPACITY = 64


class KeyValueLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values of one decoder layer for the tokens so far, (1, G, capacity, D) each.

    The library's own layer concatenates: each forward copies all that is there. Here a forward
    copies what is new, and forgetting tokens moves the length. It keeps every token, also for
    sliding-window layers, which still mask by their window: so any suffix can be forgotten.

    Attributes:
        length: How many tokens it stands for.
        reserve_length: Buffers of this many tokens are not outgrown; they double up to it.
    """

    def __init__(self, *, reserve_length: int, is_fixed: bool = False) -> None:
        """Build it without buffers: they come with the first tokens.

        Args:
            reserve_length: See the attribute.
            is_fixed: Have buffers of that size at once, filled with zeros: they move only when
                more is reserved, and can be read beyond the length.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.length = 0
        self.reserve_length = reserve_length
        self._is_fixed = is_fixed

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Append T tokens, (1, G, T, D) each, and return all: (1, G, length, D) each."""
        start, self.length = self.length, self.length + key_states.shape[-2]
        self.keys = self._with_room(self.keys, key_states, kept=start)
        self.values = self._with_room(self.values, value_states, kept=start)
        stored = []
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            buffer.narrow(-2, start, states.shape[-2]).copy_(states)
            stored.append(buffer.narrow(-2, 0, self.length))
        return stored[0], stored[1]

    def _with_room(self, buffer: Tensor | None, states: Tensor, *, kept: int) -> Tensor:
        if buffer is not None and buffer.shape[-2] >= self.length:
            return buffer
        wanted = self.reserve_length if self._is_fixed else max(2 * self.length, _FIRST_CAPACITY)
        capacity = max(self.length, min(wanted, self.reserve_length))
        shape = (*states.shape[:-2], capacity, states.shape[-1])
        grown = states.new_zeros(shape) if self._is_fixed else states.new_empty(shape)
        if buffer is not None:
            grown.narrow(-2, 0, kept).copy_(buffer.narrow(-2, 0, kept))
        return grown

    def get_seq_length(self) -> int:
        """Return the length."""
        return self.length

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens: -n of them."""
        self.length += tokens_to_remove


class KeyValues(Cache):
    """A text's keys and values; its layers appear during the first forward, one by one.

    Attributes:
        step: A forward of one row over these buffers, once it is captured.
    """

    def __init__(self, *, reserve_length: int, is_fixed: bool = False) -> None:
        new_layer = partial(KeyValueLayer, reserve_length=reserve_length, is_fixed=is_fixed)
        super().__init__(layer_class_to_replicate=new_layer)  # type: ignore[arg-type]
        self._is_fixed = is_fixed
        self.step: CapturedStep | None = None

    def reserve(self, length: int) -> None:
        """Let buffers grow to so many tokens, those of layers to come too."""
        new_layer = partial(KeyValueLayer, reserve_length=length, is_fixed=self._is_fixed)
        self.layer_class_to_replicate = new_layer  # type: ignore[assignment]
        for layer in self.text_layers:
            layer.reserve_length = length

    @property
    def text_layers(self) -> list[KeyValueLayer]:
        """The layers there are."""
        return cast("list[KeyValueLayer]", self.layers)

    @property
    def byte_count(self) -> int:
        """What the buffers take."""
        return sum(
            buffer.nbytes
            for layer in self.text_layers
            for buffer in (layer.keys, layer.values)
            if buffer is not None
        )

    @property
    def has_room(self) -> bool:
        """Whether there are buffers with room for another token."""
        return any(
            layer.keys is not None and layer.length < layer.keys.shape[-2]
            for layer in self.text_layers[:1]
        )

    def keep(self, length: int) -> None:
        """Forget all tokens but the first, wherever a forward stopped.

        One that was given up leaves its first layers longer than the others.
        """
        for layer in self.text_layers:
            layer.length = min(layer.length, length)
