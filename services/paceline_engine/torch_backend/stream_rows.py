"""Streams as rows of a forward: their weights, fused as the decoder's products are.

A stream row goes through the model's own products beside all other rows, so these weights are read
once for all; only what its low-rank weights add is computed for it alone.

Letters: T rows of the forward, S of them streams, E the model's width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from paceline_engine.torch_backend.adapters.streams import StreamLayer, Streams

_FUSED = (slice(0, 3), slice(3, 4), slice(4, 6), slice(6, 7))
"""Which of `LOW_RANK_PARTS` lie side by side in each product of a layer of `FusedLlama`."""


class StreamWeights:
    """Low-rank weights of streams, as (down, up) for each product of each upper layer."""

    def __init__(self, streams: Streams, *, first_layer: int) -> None:
        self._first_layer = first_layer
        layers = [cast("StreamLayer", layer) for layer in streams.layers]
        self._layers = [[_fuse(layer.parts[own]) for own in _FUSED] for layer in layers]

    def of(self, layer: int, which: int) -> tuple[Tensor, Tensor]:
        """Return what is added to a product: (r, inputs) and (r, outputs)."""
        return self._layers[layer - self._first_layer][which]


class StreamRows:
    """The rows of one forward that are streams.

    Attributes:
        read: What left the last layer in them: (S, E).
    """

    read: Tensor

    def __init__(self, weights: StreamWeights, places: Tensor | slice) -> None:
        """Build it.

        Args:
            weights: Theirs.
            places: Which rows they are.
        """
        self._weights = weights
        self._places = places

    def add(self, layer: int, which: int, *, inputs: Tensor, product: Tensor) -> None:
        """Add to a layer's product, in place, what the low-rank weights make of its inputs."""
        down, up = self._weights.of(layer, which)
        if not len(down):  # they share the model's own weights
            return
        inner = functional.linear(inputs[self._places], down)
        if isinstance(self._places, slice):
            product[self._places].addmm_(inner, up)
        else:
            product.index_add_(0, self._places, inner @ up)

    def take(self, hidden: Tensor) -> None:
        """Keep what left the last layer, (T, E)."""
        self.read = hidden[self._places]


def _fuse(parts: Any) -> tuple[Tensor, Tensor]:
    down = torch.cat([part.down.detach() for part in parts])
    up: Tensor = torch.block_diag(*(part.up.detach() for part in parts))  # type: ignore[no-untyped-call]
    return down, up.t().contiguous()
