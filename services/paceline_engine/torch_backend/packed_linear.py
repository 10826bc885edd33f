# ruff: noqa: SLF001 - torch has no public words for packed weights
"""Products with a model's weights, made fast for a few rows.

Speculation pays where a forward of a few rows takes little longer than one of a single row. On a
CPU it does if the weights lie as oneDNN wants them. Weights that lie as they were loaded are put in
order again for each product of several rows, which takes two to three times as long as reading
them (bench/LOG.md).
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline_engine.torch_backend.memory import free_memory

if TYPE_CHECKING:
    from collections.abc import Iterable

# What compiled models use. The public way, `Tensor.to_mkldnn`, would copy each product, too.
_ONEDNN = torch.ops.mkldnn
# The processors on which it was measured.
_MACHINES = frozenset({"x86_64", "AMD64"})
# The part of the free memory that the packed copy may take.
_COPY_SHARE = 0.25
# What oneDNN does around a product takes 10 us: a tiny weight is never worth that, a small one not
# for 2 or 3 rows (bench/LOG.md).
_TINY_BYTES, _SMALL_BYTES = 1 << 18, 1 << 21
# One layout serves all numbers of rows alike (bench/LOG.md); the operator wants to hear one.
_ROWS_OF_LAYOUT = 8

# oneDNN makes code for each number of rows and keeps it, half a megabyte of it: so numbers are
# filled up to one of these, and more rows are computed in blocks. With fewer than 4 it is slow.
_BLOCKS = (4, 5, 6, 7, 8, 12, 16, 20, 24, 32, 40, 48, 64)
_FILLED = [next(size for size in _BLOCKS if size >= count) for count in range(_BLOCKS[-1] + 1)]


@dataclass(frozen=True, slots=True)
class Product:
    """`hidden @ weight.T + bias`: (T, outputs) from (T, inputs).

    Attributes:
        weight: (outputs, inputs).
        bias: (outputs,), or None.
        packed: A copy of the weight in oneDNN's layout, or None.
        packed_from: The fewest rows for which the packed copy is faster.
    """

    weight: Tensor
    bias: Tensor | None
    packed: Tensor | None = None
    packed_from: int = 1

    def __call__(self, hidden: Tensor) -> Tensor:
        """Compute it."""
        count = len(hidden)
        if self.packed is None or count < self.packed_from:
            return functional.linear(hidden, self.weight, self.bias)
        if count < len(_FILLED):
            return self._of_block(hidden, self.packed)
        blocks = torch.split(hidden, _BLOCKS[-1])
        return torch.cat([self._of_block(block, self.packed) for block in blocks])

    def of_any_rows(self, hidden: Tensor) -> Tensor:
        """Compute (..., outputs) from (..., inputs)."""
        rows = self(hidden.reshape(-1, hidden.shape[-1]))
        return rows.view(*hidden.shape[:-1], rows.shape[-1])

    def _of_block(self, hidden: Tensor, packed: Tensor) -> Tensor:
        count, size = len(hidden), _FILLED[len(hidden)]
        if count < size:
            hidden = functional.pad(hidden, (0, 0, 0, size - count))
        product: Tensor = _ONEDNN._linear_pointwise(hidden, packed, self.bias, "none", [], "")
        return product if count == size else product[:count]

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, *, packs: bool) -> Self:
        """Build it, with a packed copy if `packs` and if that is faster."""
        if not packs or weight.nbytes < _TINY_BYTES:
            return cls(weight, bias)
        packed = _ONEDNN._reorder_linear_weight(weight.contiguous(), _ROWS_OF_LAYOUT)
        if weight.dtype == torch.bfloat16:
            return cls(weight, bias, packed)
        return cls(weight, bias, packed, packed_from=4 if weight.nbytes < _SMALL_BYTES else 2)


def can_pack(weights: Iterable[Tensor]) -> bool:
    """Whether weights can be packed here, and there is memory for a copy of them."""
    every = [*weights]
    most_bytes = _COPY_SHARE * free_memory(torch.device("cpu")).byte_count
    return all(map(_is_packable, every)) and sum(each.nbytes for each in every) <= most_bytes


def warm_up(products: Iterable[Product]) -> None:
    """Let oneDNN compile all code that these products will need.

    So it takes neither time nor memory from requests. Products of one shape share it.
    """
    shapes = {
        (each.weight.shape, each.bias is None): each for each in products if each.packed is not None
    }
    for product in shapes.values():
        for count in _BLOCKS:
            product(product.weight.new_zeros(count, product.weight.shape[1]))


def pack_linear_modules(model: nn.Module) -> None:
    """Let a model's linear modules compute with packed weights, if they can be packed."""
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    if not can_pack(module.weight for module in linears):
        return
    products = []
    for module in linears:
        bias = None if module.bias is None else module.bias.detach()
        product = Product.of(module.weight.detach(), bias, packs=True)
        if product.packed is not None:
            module.forward = product.of_any_rows  # type: ignore[assignment, method-assign]
            products.append(product)
    warm_up(products)


def _is_packable(weight: Tensor) -> bool:
    is_here = (
        weight.device.type == "cpu"
        and platform.machine() in _MACHINES
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(_ONEDNN, "_linear_pointwise")
        and hasattr(_ONEDNN, "_reorder_linear_weight")
    )
    if weight.dtype == torch.bfloat16:
        return is_here and bool(_ONEDNN._is_mkldnn_bf16_supported())
    return is_here and weight.dtype == torch.float32
