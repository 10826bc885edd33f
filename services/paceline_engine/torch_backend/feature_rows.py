"""The features of a forward's rows, which an EAGLE head or a checkpoint's module reads later.

Letters: T rows of the forward, E the model's width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from paceline_engine.torch_backend.adapters.eagle import EagleHead
    from paceline_engine.torch_backend.adapters.mtp_head import MtpHead


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
