"""What a layer computes between its products, in few calls of compiled code.

Theory of operation
-------------------

Of a forward of few rows on a CPU, products in eight bits take half of the time or less. Around them
a layer calls some 60 of torch's operators, each of which computes for a microsecond and is called
for several. `compiled_steps.c` has the same in five functions, from product to product:

    hidden                 norm_rows     the norm, rounded for the product
      product: queries, keys, values
                           turn_rows     heads apart, rotated
      attention                          by torch, or for few rows by `compiled_attention.c`
                           round_heads   heads together, rounded
      product: out of the heads
                           norm_rows     added to hidden; the norm, rounded
      product: gate and up
                           gate_rows     silu(gate) * up, rounded
      product: down
                           add_rows      added to hidden

They give the bits of torch's operators: additions have torch's order, e^x is computed as by Sleef,
which torch uses. So a layer can compute one forward with them and the next without, and a text's
logits are the same with a compiler and without one. That is so with one thread: several divide an
operator's numbers, and compute those beside a cut in another way. `agree` proves it for a model's
sizes by comparing each step with the operators; where a bit differs, or there is no compiler, no
AVX-512, another activation or another width, operators compute all forwards. They also compute
forwards of more than `MOST_ROWS`, and forwards with low-rank weights, which need a product's inputs
as they are before rounding.

The code is compiled at each load, which takes half a second, and leaves no file.
"""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from ctypes import c_float, c_int, c_long, c_uint, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from paceline_engine.torch_backend.compiler import (
    COMPILE_SECONDS,
    COMPILERS,
    StepsUnavailableError,
    compiled,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from paceline_engine.torch_backend.attention_tables import AttentionLayer, Spans

_Room: TypeAlias = tuple[Tensor, Tensor]

MOST_ROWS = 1024
"""With more rows torch's operators compute."""

TOGETHER = 16
"""Widths have to be multiples of so many numbers."""

# Each has what is in the one before it.
_SOURCE = Path(__file__).with_name("compiled_attention.c")
_SOURCE_WITH_PRODUCTS = _SOURCE.with_name("compiled_products.c")
# With more numbers a step takes more than some 100 microseconds, and others may have the
# interpreter's lock meanwhile. With fewer, to give it away and wait for it again would take longer.
_HOLDING_NUMBERS = 1 << 17
# Memory for so many rows is kept.
_KEPT_ROWS = 64
_FUNCTIONS = {
    "norm_rows": (
        c_long, c_long, c_void_p, c_void_p, c_int, c_void_p, c_float, c_void_p, c_void_p, c_void_p,
    ),
    "gate_rows": (c_long, c_long, c_void_p, c_int, c_void_p, c_void_p, c_void_p),
    "turn_rows": (c_long, c_long, c_long, c_long, *[c_void_p] * 5),
    "round_heads": (c_long, c_long, c_long, c_void_p, c_long, c_long, *[c_void_p] * 3),
    "add_rows": (c_long, c_long, *[c_void_p] * 3),
    "use_threads": (c_void_p, c_void_p, c_void_p),
    "attend_where_they_lie": (
        c_void_p, c_long, c_void_p, c_long, c_void_p, c_void_p, c_uint,
    ),
}  # fmt: skip
_OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")


class Steps:
    """The compiled functions, and memory for what goes into a product.

    Concurrency: one thread at a time. What a step returns for a product is valid until the next
    step.

    Attributes:
        libraries: The same functions twice: holding the interpreter's lock, and not.
        has_threads: Whether functions can use torch's threads.
    """

    def __init__(self, path: str) -> None:
        """Load a compiled library.

        Raises:
            OSError: it cannot be loaded.
            StepsUnavailableError: a function is missing.
        """
        self._holding, self._yielding = self.libraries = ctypes.PyDLL(path), ctypes.CDLL(path)
        for library in self.libraries:
            take_functions(library, _FUNCTIONS)
        openmp = _openmp_functions()
        self.has_threads = openmp is not None
        if openmp is not None:
            self._holding.use_threads(*openmp)
        self._memory: dict[int, _Room] = {}
        self._rooms: dict[tuple[int, int], _Room] = {}
        self._scales = torch.empty(MOST_ROWS, 1)
        self._scales_at = self._scales.data_ptr()

    @property
    def scales(self) -> Tensor:
        """The scales of the rows that were rounded last: (MOST_ROWS, 1)."""
        return self._scales

    @property
    def thread_count(self) -> int:
        """With how many threads functions compute."""
        return torch.get_num_threads() if self.has_threads else 1

    def _library(self, numbers: int) -> ctypes.CDLL:
        return self._holding if numbers <= _HOLDING_NUMBERS else self._yielding

    def _room(self, rows: int, width: int) -> _Room:
        """Return room for rows, and for rounded rows; few rows of a width have the same."""
        if rows > _KEPT_ROWS:
            return _room_for(rows, width)
        room = self._rooms.get((rows, width))
        if room is None:
            whole = self._memory.setdefault(width, _room_for(_KEPT_ROWS, width))
            room = self._rooms[rows, width] = whole[0][:rows], whole[1][:rows]
        return room

    def norm(
        self,
        hidden: Tensor,
        norm: tuple[Tensor, float],
        *,
        rounds: bool,
        added: Tensor | None = None,
        is_scaled: bool = False,
    ) -> Tensor:
        """Return the norms of rows, (T, E), as `_SmallNorm` computes them.

        Args:
            hidden: (T, E).
            norm: Its weight, and the least length of a row.
            rounds: Round the norms: they are uint8, and `scales` has their scales.
            added: A product, (T, E), to which `hidden` is added in place first; or None.
            is_scaled: Whether the product has still to be multiplied by `scales`.
        """
        rows, width = hidden.shape
        normed, whole = self._room(rows, width)
        weight, least = norm
        self._library(rows * width).norm_rows(
            rows,
            width,
            hidden.data_ptr(),
            None if added is None else added.data_ptr(),
            is_scaled,
            weight.data_ptr(),
            least,
            normed.data_ptr(),
            whole.data_ptr() if rounds else None,
            self._scales_at,
        )
        return whole if rounds else normed

    def gate(self, gate_up: Tensor, *, is_scaled: bool, rounds: bool) -> Tensor:
        """Return silu(gate) * up: (T, I) from both side by side."""
        rows, width = len(gate_up), gate_up.shape[1] // 2
        gated, whole = self._room(rows, width)
        self._library(rows * width).gate_rows(
            rows,
            width,
            gate_up.data_ptr(),
            is_scaled,
            gated.data_ptr(),
            whole.data_ptr() if rounds else None,
            self._scales_at,
        )
        return whole if rounds else gated

    def turn(
        self, states: Tensor, *, turned: int, rotation: tuple[Tensor, Tensor], is_scaled: bool
    ) -> Tensor:
        """Return heads apart, (heads, T, D), the first `turned` of them rotated; a new tensor."""
        rows, width = rotation[0].shape
        heads = states.shape[1] // width
        out = torch.empty(heads, rows, width)
        self._library(rows * heads * width).turn_rows(
            rows,
            heads,
            turned,
            width,
            states.data_ptr(),
            self._scales_at if is_scaled else None,
            rotation[0].data_ptr(),
            rotation[1].data_ptr(),
            out.data_ptr(),
        )
        return out

    def round_heads(self, seen: Tensor) -> Tensor:
        """Return the heads of each row, (H, T, D), together and rounded: (T, H * D) uint8."""
        heads, rows, width = seen.shape
        if seen.stride(2) != 1:
            seen = seen.contiguous()
        row, whole = self._room(rows, heads * width)
        self._library(rows * heads * width).round_heads(
            rows,
            heads,
            width,
            seen.data_ptr(),
            seen.stride(0),
            seen.stride(1),
            row.data_ptr(),
            whole.data_ptr(),
            self._scales_at,
        )
        return whole

    def attend(self, states: Tensor, spans: Spans, how: AttentionLayer) -> Tensor:
        """Keep a layer's new keys and values, and attend: (H, T, D) from (H + 2 G, T, D)."""
        rows = states.shape[1]
        seen = torch.empty(rows, how.heads, how.width)
        self._library(spans.key_count * how.heads * how.width).attend_where_they_lie(
            spans.at,
            spans.count,
            how.at,
            rows,
            states.data_ptr(),
            seen.data_ptr(),
            self.thread_count,
        )
        return seen.transpose(0, 1)

    def add(self, product: Tensor, hidden: Tensor, *, is_scaled: bool) -> Tensor:
        """Add `hidden` to a product, in place: (T, E)."""
        rows, width = hidden.shape
        self._library(rows * width).add_rows(
            rows,
            width,
            product.data_ptr(),
            self._scales_at if is_scaled else None,
            hidden.data_ptr(),
        )
        return product


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute with one thread meanwhile."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def take_functions(library: ctypes.CDLL, functions: Mapping[str, Sequence[Any]]) -> None:
    """Say what the functions of a library take; they return nothing.

    Raises:
        StepsUnavailableError: one is missing.
    """
    for name, arguments in functions.items():
        try:
            function = getattr(library, name)
        except AttributeError as error:
            raise StepsUnavailableError(f"the compiler leaves out a function: {error}") from error
        function.argtypes, function.restype = arguments, None


def _openmp_functions() -> list[c_void_p] | None:
    """Return the functions of the OpenMP whose threads torch has; None: it is an unknown one.

    Another OpenMP would have threads of its own.
    """
    # Where torch's own calls are looked up: among what is loaded for all, then from torch on.
    libraries = ctypes.CDLL(None), ctypes.CDLL(torch._C.__file__)  # noqa: SLF001 - no public word
    for library in libraries:
        if all(hasattr(library, name) for name in _OPENMP):
            return [ctypes.cast(getattr(library, name), c_void_p) for name in _OPENMP]
    return None


def compile_steps(
    compilers: Sequence[str] = COMPILERS,
    *,
    seconds: float = COMPILE_SECONDS,
    products: bool = False,
) -> Steps:
    """Compile the steps for this processor.

    Args:
        compilers: Names of C compilers; the first one that is there is used.
        seconds: How long it may take.
        products: Also what `compiled_products.py` needs, for a processor with VNNI.

    Raises:
        StepsUnavailableError: there is none, it fails, or the processor lacks AVX-512.
    """
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        raise StepsUnavailableError("the processor has no AVX-512")
    source = _SOURCE_WITH_PRODUCTS if products else _SOURCE
    with compiled(source, compilers=compilers, seconds=seconds, products=products) as made:
        return Steps(str(made))


def _room_for(rows: int, width: int) -> _Room:
    return torch.empty(rows, width), torch.empty(rows, width, dtype=torch.uint8)
