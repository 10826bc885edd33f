# ruff: noqa: SLF001 - torch has no public words for packed weights
"""Products with a model's weights, made fast for a few rows.

Speculation pays where a forward of a few rows takes little longer than one of a single row. On a
CPU it does if the weights lie as oneDNN wants them. Weights that lie as they were loaded are put in
order again for each product of several rows, which takes two to three times as long as reading
them (bench/LOG.md).

A weight that is packed is held once: the packed tensor alone. One row takes it, too. It is then as
fast as with the weight as loaded on one thread, and 1.5 times as fast on two, because torch's own
product of one row has one thread (bench/LOG.md). And a row's product has the same bits however many
rows there are.
"""

from __future__ import annotations

import platform
from abc import ABC, abstractmethod
from bisect import bisect_left
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline_engine.torch_backend.memory import free_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

# What compiled models use. The public way, `Tensor.to_mkldnn`, would copy each product, too.
_ONEDNN = torch.ops.mkldnn
# The processors on which it was measured.
_MACHINES = frozenset({"x86_64", "AMD64"})
# The part of the free memory that the copy of a weight may take, while it is packed.
_COPY_SHARE = 0.25
# What oneDNN does around a product takes 10 us: a tiny weight is never worth that, a small one not
# for 1 to 3 rows (bench/LOG.md). So a small weight is kept as loaded, too: they take little memory.
_TINY_BYTES, _SMALL_BYTES = 1 << 18, 1 << 20
_SMALL_FROM = 4
# One layout serves all numbers of rows alike (bench/LOG.md); the operator wants to hear one.
_ROWS_OF_LAYOUT = 8

# oneDNN makes code for each number of rows and keeps it, half a megabyte of it: so numbers are
# filled up to one of these, and more rows are computed in blocks. With fewer than 4 it is slow.
BLOCKS = (4, 5, 6, 7, 8, 12, 16, 20, 24, 32, 40, 48, 64)


class Product(ABC):
    """`hidden @ weight.T + bias`: (T, outputs) from (T, inputs).

    Attributes:
        shape: Of the weight: (outputs, inputs).
        bias: (outputs,), or None.
        loaded: The weight as it was loaded, or None: it is not kept.
    """

    shape: torch.Size
    bias: Tensor | None
    loaded: Tensor | None = None

    @abstractmethod
    def __call__(self, hidden: Tensor) -> Tensor:
        """Compute it."""

    def of_any_rows(self, hidden: Tensor) -> Tensor:
        """Compute (..., outputs) from (..., inputs)."""
        rows = self(hidden.reshape(-1, hidden.shape[-1]))
        return rows.view(*hidden.shape[:-1], rows.shape[-1])

    @abstractmethod
    def weight(self) -> Tensor:
        """Return the weight, (outputs, inputs), as it was loaded. Cost: may make a copy."""

    def warm_up(self) -> None:  # noqa: B027 - a plain product has nothing to prepare
        """Prepare all that products of any number of rows need."""


MakeProduct: TypeAlias = "Callable[[Product, Sequence[nn.Linear]], Product]"
"""Makes another product of one, and of the linear modules, side by side, that it stands for."""


class PlainProduct(Product):
    """With the weight as it was loaded."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.shape, self.bias, self.loaded = weight.shape, bias, _laid_out(weight)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Compute it."""
        return functional.linear(hidden, self.weight(), self.bias)

    def weight(self) -> Tensor:
        """Return the weight."""
        assert self.loaded is not None
        return self.loaded


class WideProduct(PlainProduct):
    """On a GPU, in float32 from factors in half precision, without rounding to it in between."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight, None)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Compute it."""
        return torch.mm(hidden, self.weight().t(), out_dtype=torch.float32)


class PackedProduct(Product):
    """With the weight in oneDNN's order."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.shape, self.bias = weight.shape, bias
        self._dtype = weight.dtype
        self._packed = _ONEDNN._reorder_linear_weight(weight.contiguous(), _ROWS_OF_LAYOUT)
        # In bfloat16 also one row takes the packed weight, and torch's own product is slow.
        if weight.dtype == torch.float32 and weight.nbytes < _SMALL_BYTES:
            self.loaded = _laid_out(weight)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Compute it."""
        if self.loaded is not None and len(hidden) < _SMALL_FROM:
            return functional.linear(hidden, self.loaded, self.bias)
        return in_blocks(self._of_block, hidden)

    def weight(self) -> Tensor:
        """Return the weight, bit for bit."""
        return self._packed.to_dense(self._dtype) if self.loaded is None else self.loaded

    def warm_up(self) -> None:
        """Let oneDNN compile all code for it, so that this takes no time from requests."""
        for count in BLOCKS:
            self._of_block(torch.zeros(count, self.shape[1], dtype=self._dtype))

    def _of_block(self, hidden: Tensor) -> Tensor:
        product: Tensor = _ONEDNN._linear_pointwise(hidden, self._packed, self.bias, "none", [], "")
        return product


def in_blocks(
    compute: Callable[[Tensor], Tensor], hidden: Tensor, *, blocks: Sequence[int] = BLOCKS
) -> Tensor:
    """Compute rows in blocks, each filled up to one of few numbers of rows.

    A block is filled with copies of its rows: one operator, where to add zeros takes four.
    """
    count, most = len(hidden), blocks[-1]
    if count > most:
        parts = torch.split(hidden, most)
        return torch.cat([in_blocks(compute, block, blocks=blocks) for block in parts])
    size = blocks[bisect_left(blocks, count)]
    if size == count:
        return compute(hidden)
    if count == 0:
        return compute(hidden.new_zeros(size, hidden.shape[1]))[:0]
    copies, rest = divmod(size, count)
    return compute(torch.cat((*[hidden] * copies, hidden[:rest])))[:count]


def product_of(weight: Tensor, bias: Tensor | None, *, packs: bool) -> Product:
    """Make a product, with a packed weight if `packs` and if that is faster."""
    if packs and weight.nbytes >= _TINY_BYTES:
        return PackedProduct(weight, bias)
    return PlainProduct(weight.clone() if packs else weight, bias)


def can_pack(weights: Iterable[Tensor]) -> bool:
    """Whether weights can be packed here, and there is memory to pack one after the other."""
    every = [*weights]
    most_bytes = _COPY_SHARE * free_memory(torch.device("cpu")).byte_count
    return all(map(_is_packable, every)) and max(each.nbytes for each in every) <= most_bytes


def warm_up(products: Iterable[Product]) -> None:
    """Prepare products; those of one shape share what is prepared."""
    shapes = {(type(each), each.shape, each.bias is None): each for each in products}
    for product in shapes.values():
        product.warm_up()


def take_weights(product: Product, linears: Sequence[nn.Linear]) -> None:
    """Let a product of linear modules, side by side, be the only one to hold their weights.

    The modules' weights become views of the product's; or empty, if it has another order of them.
    A weight that another module uses, too, stays there.
    """
    if product.loaded is not None:
        give_weights_back(product, linears)
        return
    for linear in linears:
        nothing = linear.weight.detach().new_empty(0, linear.in_features)
        linear.weight = nn.Parameter(nothing, requires_grad=False)


def give_weights_back(product: Product, linears: Sequence[nn.Linear]) -> None:
    """Give linear modules weights again after `take_weights`."""
    parts = torch.split(product.weight(), [each.out_features for each in linears])
    for linear, part in zip(linears, parts, strict=True):
        linear.weight = nn.Parameter(part, requires_grad=False)


class PackedModules:
    """A model's linear modules, computing with packed weights if they can be packed."""

    def __init__(self, model: nn.Module) -> None:
        """Pack what can be packed."""
        linears = [each for each in model.modules() if type(each) is nn.Linear]
        self._packed: list[tuple[nn.Linear, Product]] = []
        if not linears or not can_pack(each.weight for each in linears):
            return
        leave_files(model)
        for linear in linears:
            bias = None if linear.bias is None else linear.bias.detach()
            product = product_of(linear.weight.detach(), bias, packs=True)
            take_weights(product, [linear])
            if isinstance(product, PackedProduct):
                linear.forward = product.of_any_rows  # type: ignore[assignment, method-assign]
                self._packed.append((linear, product))
        warm_up(product for _, product in self._packed)

    def undo(self) -> None:
        """Give the modules back what they had."""
        for linear, product in self._packed:
            del linear.forward
            give_weights_back(product, [linear])


def leave_files(model: nn.Module) -> None:
    """Copy all parameters that are not packed out of the file that they were loaded from.

    Each lies in the file's own memory, so a single norm would keep all weights there.
    """
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if type(module) is not nn.Linear or name != "weight":
                parameter.data = parameter.data.clone()


def _laid_out(weight: Tensor) -> Tensor:
    """Store a weight, (outputs, inputs), in the order in which small products read it fastest.

    On a CPU in float32 that is input by input where there are more outputs than inputs: MKL then
    needs 0.5 to 1 times as long for a row (bench/LOG.md).
    """
    outputs, inputs = weight.shape
    if weight.device.type == "cpu" and weight.dtype == torch.float32 and outputs > inputs:
        return weight.t().contiguous().t()
    return weight


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
