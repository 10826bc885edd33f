"""Which of a model's products are in groups with `--weights int4`, and with which numbers.

A weight whose file has groups that the products know keeps the file's numbers. Each other weight is
rounded: to four bits if no weight of the model is quantised in its file, and to eight if one is.
What a file has in other ways, such as Q6_K, is not rounded again to four bits, and a line of the
log names it. Weights side by side in one product may be of both kinds.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from paceline_engine.torch_backend.grouped_linear import (
    GROUP,
    GroupProduct,
    rounding,
    takes_groups,
)
from paceline_engine.torch_backend.int8_linear import Int8Product
from paceline_engine.torch_backend.weight_grids import (
    Grid,
    fitting_grid,
    scales_of_outputs,
    stored_as,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from paceline_engine.torch_backend.packed_linear import Product

_log = logging.getLogger(__name__)

_FOUR, _EIGHT = 4, 8


class GroupedProducts:
    """Makes a model's products, and tells afterwards what its files' weights became."""

    def __init__(self, model: Any) -> None:
        """Look at what the files have quantised; `make` goes on from there."""
        self._head: nn.Module | None = model.get_output_embeddings()
        self._is_quantised = any(stored_as(each) is not None for each in model.modules())
        self._kept = 0
        self._rounded = Counter[str]()

    def make(self, product: Product, linears: Sequence[nn.Linear]) -> Product:
        """Return a product of whole numbers, in groups where its inputs make groups of 32."""
        weight = product.weight()
        if not takes_groups(weight.shape):
            grid = fitting_grid(weight, linears)
            scales = scales_of_outputs(grid)
            for each in linears:
                self._count(each, is_kept=scales is not None, why="inputs that 32 does not divide")
            return Int8Product(weight, product.bias, scales)
        parts = torch.split(weight, [each.out_features for each in linears])
        grids = [
            self._grid(part, each).divided(weight.shape[1] // GROUP)
            for part, each in zip(parts, linears, strict=True)
        ]
        return GroupProduct(weight, product.bias, Grid.stacked(grids))

    def tell(self, name: str) -> None:
        """Tell in a line of the log what became of the weights that a model's files quantise."""
        if not self._is_quantised:
            return
        again = ", ".join(f"{count} ({words})" for words, count in sorted(self._rounded.items()))
        _log.info(
            "model %r: %d of its quantised weights are computed with its files' numbers%s",
            name,
            self._kept,
            f"; others are rounded again, to eight bits: {again}" if again else "",
        )

    def _grid(self, weight: Tensor, linear: nn.Linear) -> Grid:
        """Return the grid of a module's weight: its file's, or one to round it."""
        stored = stored_as(linear)
        grid = None if stored is None else stored.grid
        why = ""
        if grid is not None and not takes_groups(weight.shape, grid):
            why, grid = "not a multiple of 32", None
        elif grid is not None and not grid.gives_back(weight):
            why, grid = "whose scales do not give the weight", None
        self._count(linear, is_kept=grid is not None, why=why)
        if grid is not None:
            return grid
        is_large = self._is_quantised or linear is self._head
        return rounding(weight, bits=_EIGHT if is_large else _FOUR)

    def _count(self, linear: nn.Linear, *, is_kept: bool, why: str) -> None:
        stored = stored_as(linear)
        if stored is not None and is_kept:
            self._kept += 1
        elif stored is not None:
            self._rounded[f"{stored.words}, {why}" if why else stored.words] += 1
