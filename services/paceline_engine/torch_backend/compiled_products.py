"""Products of few rows, in compiled code: in eight bits, from oneDNN's packed weights; in four.

Theory of operation
-------------------

A forward of few rows takes as long as its products, and a product as long as its weight needs from
memory. oneDNN's products of few rows take up to twice that: some 20 microseconds around each, and a
loop that waits for memory. `compiled_products.c` has the same product in a loop as fast as memory.
With more than `FEW_ROWS` rows oneDNN computes: it is faster there, on processors with AMX.
Products in four bits (`grouped_linear.py`) are computed here with any number of rows.

A weight is held once. oneDNN packs it in blocks of 64 outputs, which suits the loop, so the loop
reads it where oneDNN has it. How a packed weight lies depends on the processor and on oneDNN's
version; so nothing is assumed: each product is compared with oneDNN's at load, for all outputs.
Sums of whole numbers are the same in any order, and what follows them has one order in both, so
the comparison asks for equality, and a forward may take either. Where a bit differs, oneDNN
computes all rows of that product. One thing depends on a weight's numbers: how sums above 2^24 are
rounded (`int8_linear.py`). A weight that reaches such sums is computed as oneDNN computes the
largest weight of its shape.

Layers of such products are computed in one call (`FewLayers`) where attention is compiled, too
(`compiled_attention.py`). Else two calls compute a layer (`FewLayer`): up to attention, and from
there on.

    hidden -> norm, product, rotation                         `before`
           -> attention
           -> product, norm, product, gate, product -> hidden `after`
"""

from __future__ import annotations

import ctypes
import logging
import math
from ctypes import c_float, c_long, c_uint, c_void_p
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline_engine.terms.backend import ModelLoadError
from paceline_engine.torch_backend.compiled_steps import TOGETHER, take_functions
from paceline_engine.torch_backend.compiler import StepsUnavailableError
from paceline_engine.torch_backend.grouped_linear import GROUP, GroupProduct
from paceline_engine.torch_backend.int8_linear import (
    EXACT_FLOAT,
    FEW_ROWS,
    INT8_BLOCKS,
    ZERO,
    Int8Product,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from paceline_engine.torch_backend.attention_tables import AttentionLayer, Spans
    from paceline_engine.torch_backend.compiled_steps import Steps
    from paceline_engine.torch_backend.packed_linear import Product

_log = logging.getLogger(__name__)

_BLOCK = 64
# A row adds to what reading a weight takes about a 16th. With more a function takes more than some
# 0.3 milliseconds, and others may have the interpreter's lock meanwhile.
_ROWS_OF_READING, _HOLDING_WORK = 16, 1 << 26
_SLOW_COUNTS = (*range(1, 9), 13, 16, 33, 66)
_CHECKED_OUTPUTS = 64
_FUNCTIONS = {
    "multiply_slowly": (*[c_void_p] * 4, c_long, c_long, c_long, c_void_p, c_void_p),
    "multiply_rows": (c_void_p, c_void_p, c_long, c_void_p, c_void_p, c_uint),
    "before_attention": (c_void_p, c_void_p, c_long, *[c_void_p] * 4, c_uint),
    "after_attention": (
        c_void_p, c_void_p, c_long, c_void_p, c_long, c_long, c_void_p, c_void_p, c_uint,
    ),
    "whole_layers": (
        c_void_p, c_void_p, c_long, c_void_p, c_long, *[c_void_p] * 4, c_long, c_void_p, c_uint,
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
        ("apart", c_long),
        ("bits", c_long),
        ("has_halves", c_long),
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
        ("states", c_void_p),
        ("seen", c_void_p),
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
        if not steps.has_threads:
            raise StepsUnavailableError("torch has an unknown OpenMP")
        for library in steps.libraries:
            take_functions(library, _FUNCTIONS)
        self._memory = {
            "rows": torch.empty(FEW_ROWS, inputs),
            "added": torch.empty(FEW_ROWS, outputs),
            "product": torch.empty(FEW_ROWS, outputs),
            "states": torch.empty(FEW_ROWS, outputs),
            "seen": torch.empty(FEW_ROWS, inputs),
            **_memory_of_rounded(FEW_ROWS, inputs),
        }
        self._room = _Room(**{name: each.data_ptr() for name, each in self._memory.items()})
        self.room = ctypes.addressof(self._room)

    @property
    def yielding(self) -> ctypes.CDLL:
        """The functions for what takes long: others may have the interpreter's lock meanwhile."""
        return self._steps.libraries[1]

    def library(self, byte_count: int, rows: int) -> ctypes.PyDLL | ctypes.CDLL:
        """Return the functions, for weights of so many bytes and so many rows."""
        holding, yielding = self._steps.libraries
        is_short = byte_count * (_ROWS_OF_READING + rows) <= _HOLDING_WORK
        return holding if is_short else yielding


class FewProduct:
    """An `Int8Product` of few rows, or a `GroupProduct` of any number.

    Attributes:
        few: The functions that compute it.
        struct: What they read.
        byte_count: How many bytes the weight has.
    """

    def __init__(self, product: Int8Product | GroupProduct, few: FewRows) -> None:
        """Build it of one of the `few_row_products`, or of any `GroupProduct`."""
        self.few, self._product = few, product
        self.struct = _Product(
            bias=None if product.bias is None else product.bias.data_ptr(),
            outputs=product.shape[0],
            inputs=product.shape[1],
        )
        if isinstance(product, GroupProduct):
            self.struct.weight = product.packed.data_ptr()
            self.struct.bits = product.bits
            self.struct.has_halves = product.has_halves
            self.byte_count = product.packed.nbytes
        else:
            # They lie where C reads them as long as this is.
            self._zeros = product.sums * -ZERO
            self.struct.weight = product.packed_at
            self.struct.zeros = self._zeros.data_ptr()
            self.struct.scales = product.scales.data_ptr()
            self.byte_count = product.shape.numel()
        self._at = ctypes.addressof(self.struct)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Compute (T, outputs) from (T, inputs) float32."""
        hidden = hidden.contiguous()
        rows, inputs = hidden.shape
        out = torch.empty(rows, self._product.shape[0])
        room = self.few.room
        if rows > FEW_ROWS:
            memory = _memory_of_rounded(rows, inputs)
            own = _Room(**{name: each.data_ptr() for name, each in memory.items()})
            room = ctypes.addressof(own)
        self.few.library(self.byte_count, rows).multiply_rows(
            self._at,
            room,
            rows,
            hidden.data_ptr(),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out


def _memory_of_rounded(rows: int, inputs: int) -> dict[str, Tensor]:
    """Return memory for rounded rows, and for their scales: of a row, or of its groups."""
    return {
        "whole": torch.empty(rows, inputs, dtype=torch.uint8),
        "scales": torch.empty(rows, max(1, 2 * (inputs // GROUP))),
    }


class FewLayer:
    """A layer of such products but for its attention. Letters: see `compiled_layers.py`.

    Attributes:
        few: The functions that compute it.
        at: Where they read it.
        byte_count: How many bytes its weights have.
    """

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
        self.few = products[0].few
        self._heads, self._width = heads + 2 * kv_heads, width
        self._layer = _Layer(
            products=(_Product * 4)(*(each.struct for each in products)),
            norms=(c_void_p * 2)(*(weight.data_ptr() for weight, _ in norms)),
            least=(c_float * 2)(*(least for _, least in norms)),
            heads=heads,
            kv_heads=kv_heads,
            width=width,
        )
        self.at = ctypes.addressof(self._layer)
        first, *others = (each.byte_count for each in products)
        self._bytes_before, self._bytes_after = first, sum(others)
        self.byte_count = first + sum(others)

    def before(self, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Return heads apart, (H + 2 G, T, D), queries and keys rotated; a new tensor."""
        rows = len(hidden)
        states = torch.empty(self._heads, rows, self._width)
        self.few.library(self._bytes_before, rows).before_attention(
            self.at,
            self.few.room,
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
        rows, out = len(hidden), torch.empty_like(hidden)
        head_step, row_step, _ = seen.stride()
        self.few.library(self._bytes_after, rows).after_attention(
            self.at,
            self.few.room,
            rows,
            seen.data_ptr(),
            head_step,
            row_step,
            hidden.data_ptr(),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out


class FewLayers:
    """Such layers one after the other, with their attention, in one call.

    Others may have the interpreter's lock meanwhile.
    """

    def __init__(self, layers: Sequence[FewLayer], attentions: Sequence[AttentionLayer]) -> None:
        """Build it of at least one layer, and how each attends."""
        self._layers, self._attentions = layers, attentions
        self._few = layers[0].few
        self._tables = tuple(
            (c_void_p * len(each))(*(own.at for own in each)) for each in (layers, attentions)
        )
        self._at = [ctypes.addressof(each) for each in self._tables]

    def __call__(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], spans: Spans) -> Tensor:
        """Return the last layer's rows, (T, E), a new tensor, from (T, E)."""
        rows, out = len(hidden), torch.empty_like(hidden)
        self._few.yielding.whole_layers(
            *self._at,
            len(self._layers),
            self._few.room,
            rows,
            hidden.data_ptr(),
            rotation[0].data_ptr(),
            rotation[1].data_ptr(),
            spans.at,
            spans.count,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out


@torch.inference_mode()
def use_few_rows(
    products: Sequence[Product], steps: Steps, *, large: Mapping[torch.Size, Int8Product]
) -> int:
    """Let products compute few rows in compiled code, wherever it gives oneDNN's bits.

    Products in four bits compute all rows so.

    Args:
        products: Those that `few_row_products` finds.
        large: See `check_exact`.

    Returns:
        How many do: none, if torch has no threads that the code can use.

    Raises:
        ModelLoadError: Products in four bits cannot be computed.
    """
    groups = [each for each in products if isinstance(each, GroupProduct)]
    try:
        few = FewRows(
            steps,
            inputs=max(each.shape[1] for each in products),
            outputs=max(each.shape[0] for each in products),
        )
    except StepsUnavailableError as error:
        if groups:
            raise ModelLoadError(f"--weights int4 cannot be computed here: {error}") from error
        _log.warning("products in eight bits are not compiled: %s", error)
        return 0
    use_groups(groups, few)
    eight = [each for each in products if isinstance(each, Int8Product)]
    return len(groups) + _use_where_alike(eight, few, large=large)


def _use_where_alike(
    products: Sequence[Int8Product], few: FewRows, *, large: Mapping[torch.Size, Int8Product]
) -> int:
    """Let products in eight bits compute few rows where they have oneDNN's bits; return how many.

    Others are left to oneDNN.
    """
    proved, roundings, count = set[torch.Size](), dict[torch.Size, int | None](), 0
    for each in products:
        own = FewProduct(each, few)
        if each.reach > EXACT_FLOAT:
            if each.shape not in roundings:
                roundings[each.shape] = _rounding(large[each.shape], few)
            apart = roundings[each.shape]
            if apart is None:
                continue
            own.struct.apart = apart
        # Another weight of this shape was proved in all numbers of rows.
        if not _agree(each, own, (2,) if each.shape in proved else INT8_BLOCKS):
            continue
        proved.add(each.shape)
        each.few = own
        count += 1
    return count


@torch.inference_mode()
def use_groups(products: Sequence[GroupProduct], few: FewRows) -> None:
    """Let products in four bits compute, and prove that they do.

    Raises:
        ModelLoadError: The code computes something else than it says.
    """
    proved = set[tuple[torch.Size, int, bool, bool]]()
    for each in products:
        each.few = own = FewProduct(each, few)
        kind = each.shape, each.bits, each.has_halves, each.bias is None
        if kind not in proved and not _is_exact(each, own):
            raise ModelLoadError(
                "with --weights int4 what was compiled computes something else than it says: give"
                " --weights int8, or another C compiler"
            )
        proved.add(kind)


def _is_exact(product: GroupProduct, few: FewProduct) -> bool:
    """Whether rows of many numbers have the bits that one number after the other gives."""
    outputs, inputs = product.shape
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(_SLOW_COUNTS[-1], inputs, generator=generator)
    hidden[1] *= 1e-3
    hidden[2] = 0
    found = [few(hidden[:count]) for count in _SLOW_COUNTS]
    # From the end, so that a row has another place among the rows that are computed together.
    found_last = [few(hidden[-count:]) for count in _SLOW_COUNTS]
    ends = {
        *range(min(outputs, _CHECKED_OUTPUTS)),
        *range(max(0, outputs - _CHECKED_OUTPUTS), outputs),
    }
    places = torch.tensor(sorted(ends))
    parts = product.numbers(places)
    bias = None if product.bias is None else product.bias[places]
    expected = torch.empty(len(hidden), len(places))
    few.few.yielding.multiply_slowly(
        *(each.data_ptr() for each in parts),
        None if bias is None else bias.data_ptr(),
        len(places),
        inputs,
        len(hidden),
        hidden.data_ptr(),
        expected.data_ptr(),
    )
    return all(
        torch.equal(first[:, places], expected[: len(first)])
        and torch.equal(last[:, places], expected[-len(last) :])
        for first, last in zip(found, found_last, strict=True)
    )


def few_row_products(products: Iterable[Product]) -> list[Product]:
    """Return the products that the code could compute."""
    return [
        each
        for each in products
        if isinstance(each, GroupProduct) or (isinstance(each, Int8Product) and _is_readable(each))
    ]


def _is_readable(product: Int8Product) -> bool:
    """Whether a packed weight has as many bytes as the code would read."""
    needed = math.prod(-(-length // _BLOCK) * _BLOCK for length in product.shape)
    return product.shape[1] % TOGETHER == 0 and product.packed_bytes >= needed


def _rounding(large: Int8Product, few: FewRows) -> int | None:
    """Return whether oneDNN rounds the parts of large sums apart (1) or not (0); None: neither."""
    own = FewProduct(large, few)
    for apart in (0, 1):
        own.struct.apart = apart
        if _agree(large, own, INT8_BLOCKS):
            return apart
    return None


def _agree(product: Int8Product, few: FewProduct, counts: Sequence[int]) -> bool:
    """Whether so many rows have the bits of oneDNN, and oneDNN's those that many rows have."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(counts[-1], product.shape[1], generator=generator)
    # Every second row comes near to what sums can reach, and the first to what whole numbers can.
    rows[::2] = product.farthest.sign() * (1 - 0.05 * rows[::2].abs().clamp(max=1))
    rows[0] = 3.0
    expected = product.by_onednn(rows)
    return all(
        torch.equal(product.by_onednn(rows[:count]), expected[:count])
        and (count > FEW_ROWS or torch.equal(few(rows[:count]), expected[:count]))
        for count in counts
    )
