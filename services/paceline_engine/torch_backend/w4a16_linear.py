"""Products of folders in four bits whose rows are not rounded (W4A16), for `--dtype bfloat16`.

With `--weights int4` rows are rounded, too: `grouped_linear.py` has those products.

The weight stays as its file has it, with scales and zero points for groups of inputs, and rows are
in bfloat16. torch's kernel makes bfloat16 of a group's numbers while it computes, so a weight takes
a quarter of its memory in bfloat16. Scales, and what a zero point takes off, are rounded to
bfloat16: to 8 bits, as everything else that is computed in it.

The kernel adds each row's products by itself, so a row has the same bits whatever other rows there
are; `rows_are_alone` proves it at load. One row takes half as long as with weights in bfloat16,
five rows take 1.5 times as long, and long prompts twice as long (bench/LOG.md): four bits save
memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline_engine.torch_backend.packed_linear import Product

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline_engine.torch_backend.weight_grids import Grid

_ATEN = torch.ops.aten
_MIDDLE = 8
_GROUPS = frozenset({32, 64, 128, 256})  # what the kernel knows
_OUTPUTS_TOGETHER = 16
_TILES = 1  # the operator wants a number, and a CPU's kernel has no use for it
# Alone, in the kernel's blocks of four rows, and with a remainder.
_CHECKED_COUNTS = (1, 2, 3, 4, 5, 8, 13)


class W4A16Product(Product):
    """With a weight of whole numbers in groups, for rows in bfloat16."""

    def __init__(self, weight: Tensor, bias: Tensor | None, grid: Grid) -> None:
        """Find the whole numbers of a dequantised weight, (outputs, inputs), again."""
        self.shape, self.bias = weight.shape, bias
        self._group = weight.shape[1] // grid.scales.shape[1]
        self._packed = _ATEN._convert_weight_to_int4pack_for_cpu(  # noqa: SLF001 - no public word
            grid.nearest(weight).to(torch.int32), _TILES
        )
        offsets = _MIDDLE * grid.scales + grid.least
        # (G, outputs, 2), as the kernel reads them.
        self._scales = (
            torch.stack([grid.scales.t(), offsets.t()], -1).to(torch.bfloat16).contiguous()
        )

    def __call__(self, hidden: Tensor) -> Tensor:
        """Compute it."""
        product: Tensor = _ATEN._weight_int4pack_mm_for_cpu(  # noqa: SLF001 - no public word
            hidden.contiguous(), self._packed, self._group, self._scales
        )
        return product if self.bias is None else product.add_(self.bias)

    def weight(self) -> Tensor:
        """Return the weight, as the kernel dequantises it."""
        bias, self.bias = self.bias, None
        try:
            return self(torch.eye(self.shape[1], dtype=torch.bfloat16)).t()
        finally:
            self.bias = bias


def takes_w4a16(grid: Grid, shape: torch.Size) -> bool:
    """Whether the kernel can compute a weight of this grid and shape."""
    outputs, inputs = shape
    return (
        grid.bits == 4
        and inputs // grid.scales.shape[1] in _GROUPS
        and outputs % _OUTPUTS_TOGETHER == 0
        and hasattr(_ATEN, "_weight_int4pack_mm_for_cpu")
        and hasattr(_ATEN, "_convert_weight_to_int4pack_for_cpu")
    )


def rows_are_alone(products: Iterable[Product]) -> bool:
    """Whether a row's product has the same bits whatever rows are beside it, in each shape."""
    shapes = {each.shape: each for each in products if isinstance(each, W4A16Product)}
    return all(map(_are_alone, shapes.values()))


def _are_alone(product: W4A16Product) -> bool:
    count, inputs = _CHECKED_COUNTS[-1], product.shape[1]
    numbers = torch.arange(count * inputs) * 7919 % 255 - 127
    rows = (numbers / 64).to(torch.bfloat16).view(count, inputs)
    whole = product(rows)
    return all(
        torch.equal(product(rows[:few]), whole[:few])
        and torch.equal(product(rows[-few:]), whole[-few:])
        for few in _CHECKED_COUNTS
    )
