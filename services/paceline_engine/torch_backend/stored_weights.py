"""Quantised weights of Hugging Face folders, as numbers.

Theory of operation
-------------------

All layouts say the same of a weight, (O, I), with different words: whole numbers (or numbers in
eight bits of floating point), and for each cell of a grid over them a scale and a zero point:

    weight[o, i] = (stored[o, i] - zero[o', g]) * scale[o', g]

          |<-- a group of inputs -->|
    o --> | scale[o, 0], zero[o, 0] | scale[o, 1], ...        one output a row: groups, channels
    128 outputs
      --> | scale[0, 0]             | scale[0, 1], ...        blocks of FP8

A layout is read by one function, which unpacks its tensors into a `Stored`. What follows is common
to all: `Stored.numbers` dequantises, in float32; `Stored.as_stored` remembers the scales with which
a product can find the whole numbers again (`weight_grids.py`). The library's model gets the
dequantised weights, so that each decoder proves itself as for any other model.
"""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor

from paceline_engine.terms.backend import ModelLoadError
from paceline_engine.torch_backend.weight_grids import MIDDLE, Grid, StoredAs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from paceline_engine.model_files.files import ModelFiles
    from paceline_engine.model_files.quantisation import Quantisation

_THREADS = 4
_WORD_BITS = 32
# Where the eight numbers of a word of AWQ belong.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_FLOATS = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
_UNSCALED = _FLOATS | {torch.int8, torch.uint8}  # what is no weight by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A weight as it is stored.

    Attributes:
        stored: (O, I), of any kind of number.
        bits: Of one of them.
        scales: (O', G).
        zeros: (O', G); None: zero is 0.
        groups: (I,): the group of each input; None: groups lie side by side.
        block: The rows and columns of a cell; None: as many as divide evenly.
    """

    stored: Tensor
    bits: int = 8
    scales: Tensor
    zeros: Tensor | None = None
    groups: Tensor | None = None
    block: tuple[int, int] | None = None

    def numbers(self) -> Tensor:
        """Return the weight: (O, I) float32."""
        numbers = self.stored.float()
        if self.zeros is not None:
            numbers = numbers - self._spread(self.zeros)
        return numbers * self._spread(self.scales)

    def check_groups(self, sizes: frozenset[int]) -> None:
        """Check that there are as many scales as a size of groups makes.

        Raises:
            ValueError: there are more or fewer: the configuration is of other weights.
        """
        inputs, count = self.stored.shape[-1], self.scales.shape[1]
        counts = {-(-inputs // size) if size else 1 for size in sizes}
        if counts and self.block is None and count not in counts:
            told = " or ".join(str(each or -1) for each in sorted(sizes))
            raise ValueError(
                f"it has {count} scales for the {inputs} numbers of an output, and config.json says"
                f" group_size {told}"
            )

    def as_stored(self, method: str) -> StoredAs:
        """Return how a file of a method has it; with a grid, if each output has its own scales."""
        (outputs, inputs), (rows, count) = self.stored.shape, self.scales.shape
        if self.stored.dtype in _FLOATS:
            return StoredAs(f"{method} in floating point of 8 bits", None)
        words = f"{method} in {self.bits} bits"
        if self.groups is not None:
            return StoredAs(f"{words}, inputs in an order of their own", None)
        if self.block is not None or rows not in {1, outputs}:
            return StoredAs(f"{words}, scales of blocks", None)
        scales = self.scales.float().expand(outputs, count).contiguous()
        zeros = torch.zeros(1) if self.zeros is None else self.zeros.float()
        if self.stored.dtype == torch.int8:
            zeros = zeros + MIDDLE
        grid = Grid(self.bits, scales, -zeros.expand(outputs, count) * scales)
        return StoredAs(f"{words}, groups of {inputs // count}" if count > 1 else words, grid)

    def _spread(self, cells: Tensor) -> Tensor:
        """Return the number of the cell of each place: (O, I), or what broadcasts to it."""
        (outputs, inputs), (rows, count) = self.stored.shape, cells.shape
        sides = self.block or (_even(outputs, rows), _even(inputs, count))
        found = cells.float()
        if rows > 1 and rows != outputs:
            found = found.repeat_interleave(sides[0], 0)[:outputs]
        if self.groups is not None:
            return found[:, self.groups.long()]
        return found.repeat_interleave(sides[1], 1)[:, :inputs] if count > 1 else found


def _even(length: int, count: int) -> int:
    if count == 0 or length % count:
        raise ValueError(f"{length} numbers have {count} scales")
    return length // count


def _of_plain(parts: Mapping[str, Tensor], how: Quantisation) -> Stored:
    """Read eight bits, whole or floating, as compressed-tensors and fp8 have them."""
    scales = parts.get("weight_scale_inv", parts.get("weight_scale"))
    assert scales is not None
    stored, zeros = parts["weight"], parts.get("weight_zero_point")
    block, counts = how.block, None
    if block is not None and stored.ndim == 2:
        counts = tuple(-(-count // side) for count, side in zip(stored.shape, block, strict=True))
    return Stored(
        stored=stored,
        scales=_cells(scales),
        zeros=None if zeros is None else _cells(zeros),
        groups=_order(parts.get("weight_g_idx")),
        # Some weights of such a folder may have other scales: one for each output, or one.
        block=block if scales.shape == counts else None,
    )


def _of_packed(parts: Mapping[str, Tensor], _: Quantisation) -> Stored:
    """Read compressed-tensors' words, which have an output's numbers, shifted to be unsigned."""
    outputs, inputs = parts["weight_shape"].tolist()
    words = parts["weight_packed"]
    # A folder may have layers of four bits and layers of eight.
    bits = 4 if -(-inputs * 4 // _WORD_BITS) == words.shape[1] else 8
    scales, zeros = _cells(parts["weight_scale"]), parts.get("weight_zero_point")
    middle = float(1 << (bits - 1))
    if zeros is not None and zeros.dtype == torch.int32:
        zeros = _unpacked(zeros.t(), bits=bits)[:, :outputs].t()
    elif zeros is not None:
        zeros = _cells(zeros).float() + middle
    return Stored(
        stored=_unpacked(words, bits=bits)[:, :inputs],
        bits=bits,
        scales=scales,
        zeros=torch.full_like(scales, middle, dtype=torch.float32) if zeros is None else zeros,
        groups=_order(parts.get("weight_g_idx")),
    )


def _of_words(parts: Mapping[str, Tensor], how: Quantisation) -> Stored:
    """Read GPTQ's words or AWQ's, whose tensors have the same names."""
    return (_of_gptq if how.method == "gptq" else _of_awq)(parts, how)


def _of_gptq(parts: Mapping[str, Tensor], how: Quantisation) -> Stored:
    """Read words that have an input's numbers for an output, one below the other."""
    zeros = _unpacked(parts["qzeros"], bits=how.bits).t() + int(how.zeros_less_one)
    groups, scales = parts.get("g_idx"), parts["scales"].t()
    stored = _unpacked(parts["qweight"].t(), bits=how.bits)
    if groups is not None:
        inputs, count = stored.shape[1], scales.shape[1]
        if torch.equal(groups, torch.arange(inputs, dtype=groups.dtype) // _even(inputs, count)):
            groups = None
    return Stored(stored=stored, bits=how.bits, scales=scales, zeros=zeros, groups=groups)


def _of_awq(parts: Mapping[str, Tensor], how: Quantisation) -> Stored:
    """Read words that have the numbers of eight outputs, in an order of their own."""

    def ordered(words: Tensor) -> Tensor:
        found = _unpacked(words, bits=how.bits)
        return found.view(len(words), -1, len(_AWQ_ORDER))[..., _AWQ_ORDER].flatten(1).t()

    return Stored(
        stored=ordered(parts["qweight"]),
        bits=how.bits,
        scales=parts["scales"].t(),
        zeros=ordered(parts["qzeros"]),
    )


_READERS: Mapping[frozenset[str], Callable[[Mapping[str, Tensor], Quantisation], Stored]] = {
    frozenset({"weight", "weight_scale_inv"}): _of_plain,
    frozenset({"weight", "weight_scale"}): _of_plain,
    frozenset({"weight_packed", "weight_scale", "weight_shape"}): _of_packed,
    frozenset({"qweight", "qzeros", "scales"}): _of_words,
}
"""The tensors that a layout has for each weight, and its reader."""
_BESIDE = frozenset({"weight_zero_point", "weight_g_idx", "g_idx"})
# Roundings of rows: here rows are rounded by themselves, or not at all.
_LEFT_OUT = frozenset({"input_scale", "input_zero_point", "input_scale_ub", "activation_scale"})
_PARTS = frozenset[str]().union(*_READERS, _BESIDE, _LEFT_OUT)


def stored_weights(
    files: ModelFiles, how: Quantisation, *, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor, StoredAs | None]]:
    """Yield a folder's weights: name, numbers in a dtype, and how the folder has them.

    What it has in floating point has no third part.

    Cost: several weights are dequantised at a time, on as many threads as there are cores.

    Raises:
        ModelLoadError: A weight has other tensors than its layout says, or other shapes.
    """
    opened: list[Any] = [safe_open(path, framework="pt") for path in files.weights]
    places = {name: file for file in opened for name in file.keys()}  # noqa: SIM118 - no mapping
    modules: dict[str, dict[str, str]] = defaultdict(dict)
    for name in places:
        module, _, part = name.rpartition(".")
        modules[module if part in _PARTS else name][part if part in _PARTS else ""] = name

    def read(each: tuple[str, dict[str, str]]) -> list[tuple[str, Tensor, StoredAs | None]]:
        module, names = each
        parts = {part: places[name].get_tensor(name) for part, name in names.items()}
        try:
            return _read(module, parts, how, dtype=dtype)
        except (IndexError, RuntimeError, ValueError) as error:
            raise ModelLoadError(
                f"model {files.name!r}: {module} cannot be dequantised: {error}"
            ) from error

    # Each thread holds a weight several times.
    with ThreadPoolExecutor(_THREADS) as pool:
        for found in pool.map(read, modules.items()):
            yield from found


def _read(
    module: str, parts: Mapping[str, Tensor], how: Quantisation, *, dtype: torch.dtype
) -> list[tuple[str, Tensor, StoredAs | None]]:
    """Read the weights of a module, of which all other parts are known by their last names."""
    layout = frozenset(parts) - _BESIDE - _LEFT_OUT
    if layout <= {"", "weight"}:
        if any(parts[part].dtype in _UNSCALED for part in layout):
            raise ValueError("its numbers have no scales")
        return [
            (f"{module}.{part}" if part else module, parts[part].to(dtype), None) for part in layout
        ]
    reader = _READERS.get(layout)
    if reader is None:
        raise ValueError(f"it has {', '.join(sorted(parts))}, which no layout of {how.method} has")
    stored = reader(parts, how)
    stored.check_groups(how.group_sizes)
    return [(f"{module}.weight", stored.numbers().to(dtype), stored.as_stored(how.method))]


def _unpacked(words: Tensor, *, bits: int) -> Tensor:
    """Return the unsigned numbers of words, the lowest first: (N, n * 32 / bits) from (N, n)."""
    shifts = torch.arange(0, _WORD_BITS, bits, dtype=torch.int32)
    found = (words.contiguous()[..., None] >> shifts) & ((1 << bits) - 1)
    return found.to(torch.uint8).flatten(1)


def _order(groups: Tensor | None) -> Tensor | None:
    """Return the groups of inputs; compressed-tensors writes -1 where they lie side by side."""
    return None if groups is None or bool((groups < 0).any()) else groups


def _cells(found: Tensor) -> Tensor:
    """Return scales as (O', G): a scalar or a list is of a whole weight, or of outputs."""
    return found if found.ndim == 2 else found.reshape(-1, 1)
