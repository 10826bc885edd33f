"""Products in few numbers of rows, so that it can be proved that a row's bits stay the same.

A kernel's order of additions can change with the number of rows, at any number. So products are
computed in blocks, and all numbers of rows that a block can have are compared at load: multiples of
`BlockSizes.multiple` up to `BlockSizes.most`. oneDNN's kernels for packed weights have one order
for more of these numbers than others, so small weights are packed as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from paceline_engine.torch_backend.grouped_linear import GroupProduct
from paceline_engine.torch_backend.int8_linear import Int8Product
from paceline_engine.torch_backend.invariant import LEAST_MULTIPLE
from paceline_engine.torch_backend.llama import FusedLlama
from paceline_engine.torch_backend.packed_linear import (
    BLOCKS,
    PackedProduct,
    PlainProduct,
    Product,
    can_pack,
    in_blocks,
    take_weights,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from paceline_engine.torch_backend.decoders import Decoder


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """The numbers of rows of a block.

    Attributes:
        multiple: They are multiples of it.
        most: The largest of them.
    """

    multiple: int
    most: int

    @property
    def blocks(self) -> Sequence[int]:
        """All of them, from the smallest to the largest."""
        return [each for each in BLOCKS if each <= self.most and each % self.multiple == 0]


MOST_MULTIPLE = 16

BLOCK_SIZES = tuple(
    BlockSizes(multiple, most) for multiple in (LEAST_MULTIPLE, MOST_MULTIPLE) for most in (64, 32)
)
"""What is tried, the cheapest first. Other kernels were met below 16 rows, and above 32."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """What computes some products of a model.

    Attributes:
        shape: Of their weights: (outputs, inputs).
        dtype: Theirs.
        strides: How they lie in memory; empty: packed.
        has_bias: Whether a bias is added.
        kind: Which kernel it is.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...]
    has_bias: bool
    kind: type[PlainProduct | PackedProduct | nn.Linear | Conv1D]

    def with_weight(self, weight: Tensor) -> Callable[[Tensor], Tensor]:
        """Return what it computes, of (T, inputs), with another weight of its shape and dtype."""
        zeros = weight.new_zeros(len(weight))
        bias = zeros if self.has_bias else None
        if issubclass(self.kind, PlainProduct | PackedProduct):
            return self.kind(weight, bias)
        if self.kind is Conv1D:
            inputs_first = weight.t().contiguous()
            return lambda rows: torch.addmm(zeros, rows, inputs_first)
        laid_out = weight.new_empty_strided(self.shape, self.strides).copy_(weight)
        return lambda rows: functional.linear(rows, laid_out, bias)


class BlockwiseProduct(Product):
    """A product in blocks of such numbers of rows."""

    def __init__(self, product: Product, *, blocks: Sequence[int]) -> None:
        self.shape, self.bias, self.loaded = product.shape, product.bias, product.loaded
        self._whole, self._blocks = product, blocks

    def __call__(self, hidden: Tensor) -> Tensor:
        """Compute it."""
        return in_blocks(self._whole, hidden, blocks=self._blocks)

    def weight(self) -> Tensor:
        """Return the weight."""
        return self._whole.weight()


def pack_all(model: Any, decoder: Decoder) -> set[Kernel]:
    """Pack all weights of a model that can be packed, and return what computes its products.

    Products of whole numbers are left out: they have a proof of their own.
    """
    if isinstance(decoder, FusedLlama):
        found = [
            _kernel_of(each, dtype=model.dtype) for each in decoder.replace_products(model, _packed)
        ]
    else:
        found = [_packed_module(each) for each in _linear_modules(model)]
    return {each for each in found if each is not None}


def compute_in_blocks(model: Any, decoder: Decoder, blocks: Sequence[int]) -> None:
    """Let all products of a model be computed in blocks of such numbers of rows."""
    if isinstance(decoder, FusedLlama):
        decoder.replace_products(model, partial(_in_blocks, blocks))
        return
    for module in _linear_modules(model):
        module.forward = partial(_module_in_blocks, module.forward, blocks)


def _linear_modules(model: nn.Module) -> list[Any]:
    return [each for each in model.modules() if isinstance(each, nn.Linear | Conv1D)]


def _in_blocks(blocks: Sequence[int], product: Product, _linears: Sequence[nn.Linear]) -> Product:
    if isinstance(product, Int8Product | GroupProduct):  # exact in any number of rows
        return product
    return BlockwiseProduct(product, blocks=blocks)


def _module_in_blocks(
    compute: Callable[[Tensor], Tensor], blocks: Sequence[int], hidden: Tensor
) -> Tensor:
    rows = in_blocks(compute, hidden.reshape(-1, hidden.shape[-1]), blocks=blocks)
    return rows.view(*hidden.shape[:-1], rows.shape[-1])


def _packed(product: Product, _linears: Sequence[nn.Linear]) -> Product:
    if isinstance(product, PlainProduct) and can_pack([product.weight()]):
        return PackedProduct(product.weight(), product.bias)
    return product


def _kernel_of(product: Product, *, dtype: torch.dtype) -> Kernel | None:
    if not isinstance(product, PlainProduct | PackedProduct):
        return None
    loaded = None if isinstance(product, PackedProduct) else product.loaded
    strides = () if loaded is None else loaded.stride()
    return Kernel(product.shape, dtype, strides, product.bias is not None, type(product))


def _packed_module(module: Any) -> Kernel | None:
    """Pack a linear module's weight if it can be; return what computes the module."""
    weight, is_linear = module.weight.detach(), isinstance(module, nn.Linear)
    product = getattr(module.forward, "__self__", None)
    # Another class may compute something else with its weight.
    is_plain: bool = type(module) is nn.Linear
    if not isinstance(product, Product) and is_plain and can_pack([weight]):
        bias = None if module.bias is None else module.bias.detach()
        product = PackedProduct(weight, bias)
        take_weights(product, [module])
        module.forward = product.of_any_rows
    if isinstance(product, Product):
        return _kernel_of(product, dtype=weight.dtype)
    shape = weight.shape if is_linear else weight.t().shape
    kind = nn.Linear if is_linear else Conv1D
    return Kernel(shape, weight.dtype, weight.stride(), module.bias is not None, kind)


# Weights are filled in parts of so many outputs, so that numbers in float32 take little memory.
_PART = 1024


@torch.inference_mode()
def rows_are_alike(kernels: Iterable[Kernel], sizes: BlockSizes) -> bool:
    """Tell whether a row's product has the same bits in blocks of all sizes.

    The products compared add up to zero but for rounding: such a sum shows the order of its
    additions in its first digit. Other sums hide it when they are rounded to half precision.

    Cost: for each kernel two copies of its weight, one after the other, and some 500 rows.
    """
    generator = torch.Generator().manual_seed(1)
    *counts, _ = sizes.blocks
    for kernel in kernels:
        outputs, inputs = kernel.shape
        paired = inputs // 2
        order = torch.randperm(paired, generator=generator)
        weight = torch.zeros(outputs, inputs, dtype=kernel.dtype)
        rows = torch.zeros(sizes.most, inputs, dtype=kernel.dtype)
        for each, sign in ((weight, -1), (rows, 1)):
            for part in torch.split(each, _PART):
                half = torch.randn(len(part), paired, generator=generator)
                part[:, :paired] = half
                part[:, paired : 2 * paired] = sign * part[:, order]
        compute = kernel.with_weight(weight)
        whole = compute(rows)
        for count in counts:
            first, last = slice(0, count), slice(sizes.most - count, sizes.most)
            if not all(torch.equal(compute(rows[own]), whole[own]) for own in (first, last)):
                return False
    return True
