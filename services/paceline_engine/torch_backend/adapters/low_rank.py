"""Low-rank weights (LoRA, Hu et al. 2021, arXiv 2106.09685), and which products have them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Iterator

LOW_RANK_PARTS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
"""All products of a layer. Difference: Speculative Streaming's paper does not say which."""


class LowRank(nn.Module):
    """An addition to a product: up(down(x)). It is 0 at first, and stays 0 with rank 0."""

    def __init__(self, inputs: int, outputs: int, *, rank: int) -> None:
        """Build weights that add nothing."""
        super().__init__()
        self.down = nn.Parameter(torch.zeros(rank, inputs))
        self.up = nn.Parameter(torch.zeros(outputs, rank))

    @torch.no_grad()
    def start(self, generator: torch.Generator) -> None:
        """Draw what is random before training."""
        bound = 1 / math.sqrt(self.down.shape[1])
        self.down.copy_(
            torch.empty_like(self.down, device="cpu").uniform_(-bound, bound, generator=generator)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Compute (..., outputs) from (..., inputs)."""
        return functional.linear(functional.linear(x, self.down), self.up)


def low_rank_linears(layer: nn.Module) -> Iterator[nn.Linear]:
    """Yield the products of a layer that can have low-rank weights, in `LOW_RANK_PARTS`'s order.

    Args:
        layer: Of a model that can have adapters.
    """
    for part in LOW_RANK_PARTS:
        linear = layer.get_submodule(part)
        assert isinstance(linear, nn.Linear)
        yield linear
