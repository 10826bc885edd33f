"""Products in eight bits of few rows, in compiled code that reads oneDNN's packed weights.

Theory of operation
-------------------

A forward of few rows takes as long as its products, and a product as long as its weight needs from
memory. oneDNN's products of few rows take up to twice that: some 20 microseconds around each, and a
loop that waits for memory. `compiled_products.c` has the same product in a loop as fast as memory.
With more than `FEW_ROWS` rows oneDNN computes: it is faster there, on processors with AMX.

A weight is held once. oneDNN packs it in blocks of 64 outputs, which suits the loop, so the loop
reads it where oneDNN has it. How a packed weight lies depends on the processor and on oneDNN's
version; so nothing is assumed: each product is compared with oneDNN's at load, for all outputs.
Sums of whole numbers are the same in any order, and what follows them has one order in both, so
the comparison asks for equality, and a forward may take either. Where a bit differs, oneDNN
computes all rows of that product.

Two calls compute a layer of such products (`FewLayer`): up to attention, and from there on.

    hidden -> norm, product, rotation -> attention -> product, norm, product, gate, product -> hidden
              `before`                                `after`
"""

from __future__ import annotations

import ctypes
import logging
import math
from ctypes import c_float, c_long, c_uint, c_void_p
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline_engine.torch_backend.compiled_steps import (
    TOGETHER,
    StepsUnavailableError,
    take_functions,
)
from paceline_engine.torch_backend.int8_linear import FEW_ROWS, ZERO, Int8Product

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paceline_engine.torch_backend.compiled_steps import Steps
    from paceline_engine.torch_backend.packed_linear import Product

_log = logging.getLogger(__name__)

_BLOCK = 64
# A function that reads more may take more than half a millisecond, and others may have the
# interpreter's lock meanwhile.
_HOLDING_BYTES = 1 << 22
_ALL_COUNTS = range(1, FEW_ROWS + 1)
_OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
_FUNCTIONS = {
    "use_threads": (c_void_p, c_void_p, c_void_p),
    "multiply_rows": (c_void_p, c_void_p, c_long, c_void_p, c_void_p, c_uint),
    "before_attention": (c_void_p, c_void_p, c_long, *[c_void_p] * 4, c_uint),
    "after_attention": (
        c_void_p, c_void_p, c_long, c_void_p, c_long, c_long, c_void_p, c_void_p, c_uint,
    ),
}  # fmt: skip


class _Product(ctypes.Structure):
    """As in compiled_products.c, like the next two."""

    _fields_ = (
        ("weight", c_void_p),
        ("zeros", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
        ("outputs", c_long),
        ("inputs", c_long),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        ("products", _Product * 4),
        ("norms", c_void_p * 2),
        ("least", c_float * 2),
        ("heads", c_long),
        ("kv_heads", c_long),
        ("width", c_long),
    )


class _Room(ctypes.Structure):
    _fields_ = (
        ("rows", c_void_p),
        ("added", c_void_p),
        ("product", c_void_p),
        ("whole", c_void_p),
        ("scales", c_void_p),
    )


class FewRows:
    """The compiled functions, and memory for what they compute in between.

    Concurrency: one thread at a time.
    """

    def __init__(self, steps: Steps, *, inputs: int, outputs: int) -> None:
        """Let the functions use torch's threads.

        Args:
            inputs, outputs: The most that a product has.

        Raises:
            StepsUnavailableError: torch has no threads that they can use.
        """
        self._steps = steps
        for library in steps.libraries:
            take_functions(library, _FUNCTIONS)
        # Looked up from torch on: another OpenMP would have threads of its own.
        openmp = ctypes.CDLL(torch._C.__file__)  # noqa: SLF001 - no public word
        try:
            found = [ctypes.cast(getattr(openmp, name), c_void_p) for name in _OPENMP]
        except AttributeError as error:
            raise StepsUnavailableError(f"torch has an unknown OpenMP: {error}") from error
        steps.libraries[0].use_threads(*found)
        self._memory = {
            "rows": torch.empty(FEW_ROWS, inputs),
            "added": torch.empty(FEW_ROWS, outputs),
            "product": torch.empty(FEW_ROWS, outputs),
            "whole": torch.empty(FEW_ROWS, inputs, dtype=torch.uint8),
            "scales": torch.empty(FEW_ROWS),
        }
        self._room = _Room(**{name: each.data_ptr() for name, each in self._memory.items()})
        self.room = ctypes.addressof(self._room)

    def library(self, byte_count: int) -> ctypes.PyDLL | ctypes.CDLL:
        """Return the functions, for weights of so many bytes."""
        holding, yielding = self._steps.libraries
        return holding if byte_count <= _HOLDING_BYTES else yielding


class FewProduct:
    """An `Int8Product` of few rows.

    Attributes:
        few: The functions that compute it.
        struct: What they read.
    """

    def __init__(self, product: Int8Product, few: FewRows) -> None:
        """Build it of one of the `few_row_products`."""
        self.few, self._product = few, product
        # They lie where C reads them as long as this is.
        self._zeros = product.whole_weight().sum(1, dtype=torch.int32).mul_(-ZERO)
        self.struct = _Product(
            weight=product.packed_at,
            zeros=self._zeros.data_ptr(),
            scales=product.scales.data_ptr(),
            bias=None if product.bias is None else product.bias.data_ptr(),
            outputs=product.shape[0],
            inputs=product.shape[1],
        )
        self._at = ctypes.addressof(self.struct)
        self._multiply = few.library(self.byte_count).multiply_rows

    @property
    def byte_count(self) -> int:
        """How many bytes the weight has."""
        return self._product.shape.numel()

    def __call__(self, hidden: Tensor) -> Tensor:
        """Compute (T, outputs) from (T, inputs) float32, with T up to `FEW_ROWS`."""
        hidden = hidden.contiguous()
        out = torch.empty(len(hidden), self._product.shape[0])
        self._multiply(
            self._at,
            self.few.room,
            len(hidden),
            hidden.data_ptr(),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out


class FewLayer:
    """A layer of such products but for its attention. Letters: see `compiled_layers.py`."""

    def __init__(
        self,
        products: Sequence[FewProduct],
        norms: Sequence[tuple[Tensor, float]],
        *,
        heads: int,
        kv_heads: int,
        width: int,
    ) -> None:
        """Build it of the four products, in a layer's order, and the two norms."""
        self._products, self._norms = products, norms
        self._few = products[0].few
        self._heads, self._width = heads + 2 * kv_heads, width
        self._layer = _Layer(
            products=(_Product * 4)(*(each.struct for each in products)),
            norms=(c_void_p * 2)(*(weight.data_ptr() for weight, _ in norms)),
            least=(c_float * 2)(*(least for _, least in norms)),
            heads=heads,
            kv_heads=kv_heads,
            width=width,
        )
        self._at = ctypes.addressof(self._layer)
        library = self._few.library(sum(each.byte_count for each in products))
        self._before, self._after = library.before_attention, library.after_attention

    def before(self, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Return heads apart, (H + 2 G, T, D), queries and keys rotated; a new tensor."""
        rows = len(hidden)
        states = torch.empty(self._heads, rows, self._width)
        self._before(
            self._at,
            self._few.room,
            rows,
            hidden.data_ptr(),
            rotation[0].data_ptr(),
            rotation[1].data_ptr(),
            states.data_ptr(),
            torch.get_num_threads(),
        )
        return states

    def after(self, seen: Tensor, hidden: Tensor) -> Tensor:
        """Return the layer's rows, (T, E), a new tensor, from what heads saw, (H, T, D)."""
        if seen.stride(2) != 1:
            seen = seen.contiguous()
        out = torch.empty_like(hidden)
        head_step, row_step, _ = seen.stride()
        self._after(
            self._at,
            self._few.room,
            len(hidden),
            seen.data_ptr(),
            head_step,
            row_step,
            hidden.data_ptr(),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out


@torch.inference_mode()
def use_few_rows(products: Sequence[Int8Product], steps: Steps) -> int:
    """Let products compute few rows in compiled code, wherever it gives oneDNN's bits.

    Args:
        products: Those that `few_row_products` finds.

    Returns:
        How many do: none, if torch has no threads that the code can use.
    """
    try:
        few = FewRows(
            steps,
            inputs=max(each.shape[1] for each in products),
            outputs=max(each.shape[0] for each in products),
        )
    except StepsUnavailableError as error:
        _log.warning("products in eight bits are not compiled: %s", error)
        return 0
    proved, count = set[torch.Size](), 0
    for each in products:
        own = FewProduct(each, few)
        # Code for each number of rows, and then only how each weight lies.
        if all(_agree(each, own, rows) for rows in ([2] if each.shape in proved else _ALL_COUNTS)):
            proved.add(each.shape)
            each.few = own
            count += 1
    return count


def few_row_products(products: Iterable[Product]) -> list[Int8Product]:
    """Return the products that the code could compute."""
    return [
        each
        for each in products
        if isinstance(each, Int8Product)
        and each.shape[1] % TOGETHER == 0
        and each.packed_bytes >= math.prod(-(-length // _BLOCK) * _BLOCK for length in each.shape)
    ]


def _agree(product: Int8Product, few: FewProduct, count: int) -> bool:
    """Whether a product of so many rows has oneDNN's bits; one row has the largest sums."""
    generator = torch.Generator().manual_seed(count)
    rows = torch.randn(count, product.shape[1], generator=generator)
    rows[-1] = 3.0
    return torch.equal(few(rows), product.by_onednn(rows))
