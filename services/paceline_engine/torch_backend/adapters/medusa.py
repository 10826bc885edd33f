"""Medusa's heads (Cai et al. 2024, arXiv 2401.10774): each guesses one token further ahead.

Letters: B sequences, T rows, E the model's width, V the rows of its head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline_engine.torch_backend.adapters.trunk import Trunk


class MedusaHeads(nn.Module):
    """Heads with the same input as the model's own head.

    Head j (from 1) of the row of token t guesses token t + 1 + j; the model's own decides t + 1.
    Medusa-1: the model is frozen, so its own choices are those of plain decoding.

    Difference: the residual block has no bias at first, so that an untrained head is exactly the
    model's own head; with several blocks for each head none would be shared.
    """

    upper_layers = 0
    feature_layers: tuple[int, ...] = ()

    def __init__(self, *, reach: int, width: int, vocabulary_size: int) -> None:
        """Build heads that guess nothing yet.

        Args:
            reach: How many tokens to guess after the model's own: as many heads (gamma).
            width: E.
            vocabulary_size: V.
        """
        super().__init__()
        self.reach = reach
        self.blocks = nn.Parameter(torch.zeros(reach, width, width))
        self.biases = nn.Parameter(torch.zeros(reach, width))
        self.heads = nn.Parameter(torch.zeros(reach, vocabulary_size, width))

    @torch.no_grad()
    def start_from(self, model: Any, *, generator: torch.Generator) -> None:
        """Make each head the model's own."""
        del generator  # there is nothing random in it
        self.heads.copy_(model.lm_head.weight.to(self.heads.dtype).expand_as(self.heads))

    def draft_logits(self, model: Any, trunk: Trunk) -> Iterator[Tensor]:
        """Yield each head's logits: (B, T, V)."""
        del model
        return self.guess(trunk.last)

    def guess(self, last: Tensor) -> Iterator[Tensor]:
        """Yield each head's logits, (..., V), from the input of the model's own head: (..., E)."""
        for block, bias, head in zip(self.blocks, self.biases, self.heads, strict=True):
            inner = functional.silu(functional.linear(last, block, bias))
            yield functional.linear(last + inner, head)

    def early_logits(self, model: Any, trunk: Trunk) -> Tensor | None:
        """Return None: nothing is pruned before the last layer."""
        del model, trunk
        return None
