"""Streams as rows of a forward: their weights, fused as the decoder's products are.

A stream's row goes through the model's own products together with all other rows, so these weights
are read once. Only the product with its low-rank weights is computed for the stream alone.

Letters: T rows of the forward, S of them streams, E the model's width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, cast

from torch.nn import functional

from paceline_engine.torch_backend.lora_rows import side_by_side

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from paceline_engine.torch_backend.adapters.streams import StreamLayer, Streams
    from paceline_engine.torch_backend.lora_rows import Factors

FUSED = (slice(0, 3), slice(3, 4), slice(4, 6), slice(6, 7))
"""The `LOW_RANK_PARTS` that lie side by side in each product of a layer of `FusedLlama`."""


StreamWeights: TypeAlias = "Mapping[tuple[int, int], Factors]"
"""For each layer and product what is added."""


def fuse_weights(streams: Streams, *, first_layer: int) -> StreamWeights:
    """Put the low-rank weights of streams together, as `FusedLlama` does with the model's own.

    Args:
        first_layer: The first layer that has streams.
    """
    layers = [cast("StreamLayer", layer) for layer in streams.layers]
    return {
        (index, which): _fuse(layer.parts[parts])
        for index, layer in enumerate(layers, start=first_layer)
        for which, parts in enumerate(FUSED)
    }


class StreamRows:
    """The rows of one forward that are streams.

    Args:
        weights: The streams' weights.
        places: The indices of the rows.

    Attributes:
        read: The last layer's output in these rows: (S, E).
    """

    read: Tensor

    def __init__(self, weights: StreamWeights, places: Tensor | slice) -> None:
        self._weights = weights
        self._places = places

    def add(self, layer: int, which: int, *, inputs: Tensor, product: Tensor) -> None:
        """Add the low-rank weights' product with the inputs to a layer's product, in place."""
        factors = self._weights[layer, which]
        if not len(factors.down):  # these streams share the model's own weights
            return
        inner = functional.linear(inputs[self._places], factors.down)
        if isinstance(self._places, slice):
            product[self._places].addmm_(inner, factors.up)
        else:
            product.index_add_(0, self._places, inner @ factors.up)

    def take(self, hidden: Tensor) -> None:
        """Keep the last layer's output, (T, E)."""
        self.read = hidden[self._places]


def _fuse(parts: Any) -> Factors:
    return side_by_side([((each.down.detach(), each.up.detach()), len(each.up)) for each in parts])
