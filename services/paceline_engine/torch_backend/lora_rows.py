"""The rows of a forward that have a LoRA adapter (Hu et al. 2021, arXiv 2106.09685).

All rows go through the model's own products, whatever adapter they have or have none. To the rows
of each adapter the product with its two factors is added:

    rows      | seq. A: a a a | seq. B: a | seq. C: - | seq. D: b b |
    product   |<---------------- one, with the weight ------------->|
    added     |  scale * (x down) up of a |           |   of b      |

So rows without an adapter have the bits that they would have without any adapter beside them. On a
CPU the rows of an adapter, too, have the same bits alone and beside others: products with its
factors are computed in blocks of two sizes. In float32 products of fewer than 16 rows, or with a
high rank of hundreds of rows, add in other orders, and in bfloat16, on a processor with AMX, those
of more than 32 rows (`blockwise.py`). On other devices they are computed at once: launches cost
more there than arithmetic.

Letters: T rows, R the rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from paceline_engine.torch_backend.packed_linear import in_blocks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_BLOCKS = (16, 32)

ProductKey: TypeAlias = tuple[int, int] | str
"""A product of `FusedLlama`, by its layer and its number there; or a linear module, by its name."""


@dataclass(frozen=True, slots=True)
class Factors:
    """What is added to a product: `inputs @ down.T @ up`.

    Attributes:
        down: (R, inputs).
        up: (R, outputs), with the scale.
    """

    down: Tensor
    up: Tensor

    def of(self, inputs: Tensor) -> Tensor:
        """Compute (T, outputs) from (T, inputs)."""
        if inputs.device.type == "cpu":
            return in_blocks(self._of_block, inputs, blocks=_BLOCKS)
        return self._of_block(inputs)

    def _of_block(self, inputs: Tensor) -> Tensor:
        return functional.linear(inputs, self.down) @ self.up


def side_by_side(parts: Sequence[tuple[tuple[Tensor, Tensor] | None, int]]) -> Factors:
    """Return one pair of factors for products side by side, from those of some of them.

    Args:
        parts: For each product A, (R, inputs), and B with the scale, (outputs, R), or None; and
            how many outputs it has.
    """
    width = sum(count for _, count in parts)
    downs, ups, start = [], [], 0
    for factors, count in parts:
        if factors is not None:
            down, up = factors
            placed = up.new_zeros(len(down), width)
            placed[:, start : start + count] = up.t()
            downs.append(down)
            ups.append(placed)
        start += count
    return Factors(torch.cat(downs), torch.cat(ups))


LoraWeights: TypeAlias = "Mapping[ProductKey, Factors]"
"""The factors of one adapter, for the products that it changes."""


class LoraRows:
    """Which rows of one forward have which adapter.

    Args:
        rows: For each sequence, in the order of the rows, its adapter's factors or None, and
            how many rows it has.
        device: Where the model computes.
    """

    def __init__(
        self, rows: Iterable[tuple[LoraWeights | None, int]], *, device: torch.device
    ) -> None:
        places: dict[int, list[int]] = {}
        weights: dict[int, LoraWeights] = {}
        start = 0
        for own, count in rows:
            if own is not None:
                weights[id(own)] = own
                places.setdefault(id(own), []).extend(range(start, start + count))
            start += count
        self._groups = [
            (weights[key], torch.tensor(each, dtype=torch.int64).to(device, non_blocking=True))
            for key, each in places.items()
        ]

    def add(self, key: ProductKey, *, inputs: Tensor, product: Tensor) -> None:
        """Add each adapter's part to its rows of a product, (T, outputs), in place."""
        for weights, places in self._groups:
            factors = weights.get(key)
            if factors is not None:
                added = factors.of(inputs.index_select(0, places))
                product.index_add_(0, places, added.to(product.dtype))
