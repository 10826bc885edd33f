"""Products in eight bits, which are exact.

Theory of operation
-------------------

A weight is rounded once, at load, to whole numbers for each output, and the rows of a product are
rounded in each forward, each row by itself:

    weight[o]  ~  scale[o] * w[o]        w in [-128, 127]
    hidden[t]  ~  scale[t] * (u[t] - 128)    u in [1, 255]: kernels want unsigned rows

    product[t, o] = scale[t] * (scale[o] * float(sum of (u[t] - 128) * w[o]))

The sum is one of whole numbers below 2^31, so it is the same in whichever order a kernel adds, with
any number of rows and threads. What is left, a conversion and two multiplications, each number
undergoes alone. So a row's product is the same, bit for bit, whatever other rows there are. That is
what `check_exact` proves at load for each kernel that can be used, and what floating-point products
cannot have at full speed. Attention adds floating-point numbers; `invariant.py` sees to its order.

Kernels differ in one thing. With AMX some of oneDNN's code converts the sum of u * w and 128 times
the sum of w to float one by one, and then subtracts: that rounds each of them if it is above 2^24.
Other code subtracts whole numbers. Which code runs depends on the shape and on the number of rows.
So a weight whose sums can be that large (`Int8Product.reach`) is computed only with those numbers
of rows whose code rounds alike, and fewer rows are filled up.

It reads a quarter of the bytes that float32 has, which is what a forward of few rows takes its time
for (bench/LOG.md).
"""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline_engine.terms.backend import ModelLoadError
from paceline_engine.torch_backend.packed_linear import (
    BLOCKS,
    Product,
    in_blocks,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_ONEDNN, _PACKED = torch.ops.onednn, torch.ops.mkldnn
_MACHINES = frozenset({"x86_64", "AMD64"})
_MOST = 127
ZERO = 128
"""The whole number of a row that stands for 0."""
# A row of zeros has this scale, as 0 / 0 is no number.
_LEAST_SCALE = 1e-30
# With more inputs a sum could be too large for 32 bits.
_MOST_SUM = 1 << 31
_MOST_INPUTS = _MOST_SUM // (ZERO * _MOST)
# Here one row takes no longer than 4 (bench/LOG.md), so that few rows need not be filled up.
INT8_BLOCKS = (1, 2, 3, *BLOCKS)
EXACT_FLOAT = 1 << 24
"""Whole numbers up to here are float32 numbers."""
FEW_ROWS = 32
"""Up to so many rows `Int8Product.few` computes (bench/LOG.md)."""
# Outputs that are compared, at both ends of a weight: kernels have other code for a remainder.
_CHECKED_OUTPUTS = 64
_LARGEST = 255  # the largest u


class Int8Product(Product):
    """With a weight of whole numbers, for rows that are rounded to whole numbers.

    Attributes:
        scales: (outputs,) float32: the weight's.
        sums: (outputs,) int32: of w.
        reach: The most that a sum of u * w can be.
        farthest: (inputs,) int8: w of the output that reaches it.
        blocks: The numbers of rows that oneDNN may compute at once.
        few: Computes up to `FEW_ROWS` rows, with the bits of `by_onednn`; None: that computes them.
    """

    blocks: Sequence[int] = INT8_BLOCKS
    few: Callable[[Tensor], Tensor] | None = None

    def __init__(self, weight: Tensor, bias: Tensor | None, scales: Tensor | None = None) -> None:
        """Round a weight, (outputs, inputs) in float32.

        Args:
            scales: (outputs, 1) float32: those with which it was rounded already; None: it was not.
        """
        self.shape, self.bias = weight.shape, bias
        if scales is None:
            scales = (weight.abs().amax(1, keepdim=True) * (1 / _MOST)).clamp_min_(_LEAST_SCALE)
        else:
            scales = torch.where(scales == 0, _LEAST_SCALE, scales)
        # The operator takes numbers in the order in which they lie. -128 is a number of files.
        numbers = (weight / scales).round_().clamp_(-ZERO, _MOST)
        whole = numbers.to(torch.int8).contiguous()
        self.scales = scales[:, 0].contiguous()
        above, below = (
            part.sum(1, dtype=torch.int32) for part in (whole.clamp(min=0), whole.clamp(max=0))
        )
        self.sums, reached = above + below, torch.maximum(above, -below)
        self.reach = _LARGEST * int(reached.max())
        self.farthest = whole[int(reached.argmax())].clone()
        self._zeros = torch.zeros(len(weight), dtype=torch.int64)
        self._packed = _ONEDNN.qlinear_prepack(whole, None)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Compute it."""
        if self.few is not None and len(hidden) <= FEW_ROWS:
            return self.few(hidden)
        return self.by_onednn(hidden)

    def by_onednn(self, hidden: Tensor) -> Tensor:
        """Compute it with oneDNN and torch's operators."""
        rows, scales = round_rows(hidden)
        product = in_blocks(self.of_whole_numbers, rows, blocks=self.blocks).mul_(scales)
        return product if self.bias is None else product.add_(self.bias)

    def of_whole_numbers(self, rows: Tensor) -> Tensor:
        """Compute (T, outputs) float32 from u, (T, inputs) uint8, without the rows' scales."""
        product: Tensor = _ONEDNN.qlinear_pointwise(
            rows,
            1.0,
            ZERO,
            self._packed,
            self.scales,
            self._zeros,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        return product

    @property
    def packed_at(self) -> int:
        """The address of the packed weight."""
        return int(_PACKED.data_ptr(self._packed))

    @property
    def packed_bytes(self) -> int:
        """How long the packed weight is; 0: this torch does not tell where it lies."""
        tells = hasattr(_PACKED, "data_ptr") and hasattr(_PACKED, "_nbytes")
        return int(_PACKED._nbytes(self._packed)) if tells else 0  # noqa: SLF001 - no public word

    def whole_weight(self) -> Tensor:
        """Return w: (outputs, inputs) int8."""
        inputs_first: Tensor = self._packed.to_dense(torch.int8)
        return inputs_first.t()

    def weight(self) -> Tensor:
        """Return the rounded weight."""
        return self.whole_weight() * self.scales[:, None]

    def warm_up(self) -> None:
        """Let oneDNN compile all code for it, so that this takes no time from requests."""
        for count in INT8_BLOCKS:
            self.of_whole_numbers(torch.zeros(count, self.shape[1], dtype=torch.uint8))


def round_rows(hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row by itself: u, (T, inputs) uint8, and the rows' scales, (T, 1)."""
    scales = hidden.abs().amax(-1, keepdim=True).mul_(1 / _MOST).clamp_min_(_LEAST_SCALE)
    return (hidden / scales).round_().add_(ZERO).to(torch.uint8), scales


def refuse_int8(*, dtype: str, device: torch.device) -> None:
    """Refuse eight bits where they cannot be computed; the kernels are proved later.

    Raises:
        ModelLoadError: this device, dtype or torch has no such products.
    """
    if device.type != "cpu" or platform.machine() not in _MACHINES:
        raise ModelLoadError("with --weights int8 a model is computed on an x86-64 CPU")
    if dtype != "float32":
        raise ModelLoadError(
            "with --weights int8 all but the products is computed in float32: leave --dtype alone"
        )
    if not (hasattr(_ONEDNN, "qlinear_pointwise") and hasattr(_ONEDNN, "qlinear_prepack")):
        raise ModelLoadError("--weights int8 cannot be computed by this torch")


def has_vnni() -> bool:
    """Whether this processor adds products of eight bits in 32 bits."""
    is_known = platform.machine() in _MACHINES
    return is_known and torch.cpu._is_vnni_supported()  # noqa: SLF001 - no public word


def check_exact(products: Iterable[Product]) -> dict[torch.Size, Int8Product]:
    """Check that products of all numbers of rows are exact, and let their code be compiled.

    Returns:
        A `large_product` of each shape whose sums can be large.

    Raises:
        ModelLoadError: they are not, as on a processor whose sums of products have 16 bits.
    """
    whole = [each for each in products if isinstance(each, Int8Product)]
    exact = {shape: _is_exact(each) for shape, each in {it.shape: it for it in whole}.items()}
    for product in whole:
        if not exact[product.shape] or product.reach >= _MOST_SUM:
            raise ModelLoadError(
                "this processor's products in eight bits are not exact: it lacks VNNI, or the"
                f" model's width of {product.shape[1]} is too large; leave --weights alone"
            )
    large: dict[torch.Size, Int8Product] = {}
    for product in whole:
        if product.reach > EXACT_FLOAT:
            if product.shape not in large:
                large[product.shape] = large_product(product.shape)
            product.blocks = large[product.shape].blocks
    return large


@torch.inference_mode()
def large_product(shape: torch.Size) -> Int8Product:
    """Return a product of this shape with large sums.

    Its blocks are the numbers of rows whose code rounds such sums alike. Which code that is depends
    on the shape.
    """
    generator = torch.Generator().manual_seed(0)
    weight = _MOST - 40 * torch.rand(shape, generator=generator)
    product = Int8Product(weight, None, torch.ones(shape[0], 1))
    # Of both signs and of one, so that sums lie in several ranges.
    rows = torch.randn(INT8_BLOCKS[-1], shape[1], generator=generator)
    rows[::2] = rows[::2].abs().clamp(max=1) + 1
    expected = product.by_onednn(rows)
    product.blocks = tuple(
        count
        for count in INT8_BLOCKS
        if all(
            torch.equal(product.by_onednn(part), there)
            for part, there in zip(
                torch.split(rows, count), torch.split(expected, count), strict=True
            )
            if len(part) == count
        )
    )
    return product


def _is_exact(product: Int8Product) -> bool:
    """Whether rows of all numbers give the exact sums, rounded in one of two ways."""
    outputs, inputs = product.shape
    if inputs > _MOST_INPUTS:
        return False
    most = INT8_BLOCKS[-1]
    rows = (torch.arange(most * inputs) * 7919 % _LARGEST + 1).to(torch.uint8).view(most, inputs)
    rows[0] = _LARGEST
    ends = [*range(outputs)]
    if outputs > 2 * _CHECKED_OUTPUTS:
        ends = ends[:_CHECKED_OUTPUTS] + ends[-_CHECKED_OUTPUTS:]
    weight, scales = product.whole_weight()[ends].double(), product.scales[ends]
    together = ((rows.double() - ZERO) @ weight.t()).float() * scales
    apart = (rows.double() @ weight.t()).float() - (ZERO * weight.sum(1)).float()
    found = (product.of_whole_numbers(rows[:count])[:, ends] for count in INT8_BLOCKS)
    return all(
        any(torch.equal(each, exact[: len(each)]) for exact in (together, apart * scales))
        for each in found
    )
