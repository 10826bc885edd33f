"""The features of a forward's rows, which an EAGLE head or a checkpoint's module reads later.

Letters: T rows of the forward, E the model's width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from paceline_engine.torch_backend.adapters.eagle import EagleHead
    from paceline_engine.torch_backend.adapters.mtp_head import MtpHead


@dataclass(frozen=True, slots=True)
class FeatureLayers:
    """Where features lie beside a sequence's keys and values.

    Attributes:
        head: Reads the features.
        first_layer: The first of the layers of a sequence's buffers that have them.
    """

    head: EagleHead | MtpHead
    first_layer: int


def cut_into_layers(
    states: Tensor, *, layers: int, heads: int, widths: tuple[int, int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield states of rows as keys and values of so many layers, by turns, filled up with zeros.

    Args:
        states: (T, any width that fits).
        layers: How many layers have room for them.
        heads: The key and value heads of a layer: G.
        widths: The widths of a key head and of a value head.

    Yields:
        Keys and values: (G, T, width) each.
    """
    sizes = [heads * width for width in widths]
    wanted = layers * sum(sizes)
    states = functional.pad(states, (0, wanted - states.shape[-1]))
    for own in torch.split(states, sum(sizes), -1):
        keys, values = (
            torch.unflatten(each, -1, (heads, -1)).transpose(0, 1)
            for each in torch.split(own, sizes, -1)
        )
        yield keys, values


class FeatureRows:
    """Keeps the features of one forward's rows (`ForwardRows.features`).

    Args:
        head: Reads the features.
        store: Called with the reduced features: (T, E).
    """

    def __init__(self, head: EagleHead | MtpHead, *, store: Callable[[Tensor], None]) -> None:
        self._head = head
        self._store = store
        self._entered: list[Tensor] = []

    def wants(self, layer: int) -> bool:
        """Whether what enters a layer is wanted."""
        return layer in self._head.feature_layers

    def take(self, layer: int, hidden: Tensor) -> None:
        """Learn what enters a layer: (T, E). With the last wanted layer's the features are kept.

        The number of layers stands for the head: what enters it is the final norm's output.
        """
        wanted = self._head.feature_layers
        # A model of few layers may have one of them twice.
        entered = [hidden] * wanted.count(layer)
        if not entered:
            return
        self._entered.extend(entered)
        if len(self._entered) == len(wanted):
            self._store(self._head.reduce(torch.cat(self._entered, -1)))
            self._entered.clear()
