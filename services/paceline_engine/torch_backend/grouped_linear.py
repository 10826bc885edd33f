"""Products of weights in groups, in four bits or eight, computed by compiled code of our own.

Theory of operation
-------------------

A weight has whole numbers in groups of 32 inputs, each group with a scale and a least number. A row
is rounded to eight bits, each group of it with a scale of its own:

    weight[o, i]  ~  scale[o, g] * q[o, i] + least[o, g]     q in [0, 15] or [0, 255], g = i // 32
    hidden[t, i]  ~  scale[t, g] * x[t, i]                   x in [-127, 127]

`compiled_groups.c` says how the product is computed. Sums over a group are whole numbers, and the
groups' parts are added one after the other, so a row's product has the same bits whatever other
rows there are. `compiled_products.py` proves at load that the code computes that.

A file's numbers stay as they are (`Grid`): GGUF's Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K and Q8_0 have
such groups, and larger groups, as GPTQ and AWQ have them, are several of 32. Other weights are
rounded from each group's least number to its largest (`rounding`). A product may have outputs of
both. Scales and least numbers have 16 bits where these hold them exactly, and 32 where they do not.
So a weight in four bits takes 5 or 6 bits in all.

Rows with one scale each, as `int8_linear.py` has them, would change far more tokens: a few of a
row's numbers are much larger than all others (bench/LOG.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from paceline_engine.terms.backend import INT4, ModelLoadError
from paceline_engine.torch_backend.compiler import StepsUnavailableError, check_products_compile
from paceline_engine.torch_backend.int8_linear import has_vnni
from paceline_engine.torch_backend.packed_linear import Product
from paceline_engine.torch_backend.weight_grids import Grid

if TYPE_CHECKING:
    from collections.abc import Callable

GROUP = 32
_PANEL, _FOUR = 16, 4
_BYTE = 8
_LOW_BITS = 15
_GROUP_BITS = frozenset({4, 5, 8})


class GroupProduct(Product):
    """With a weight of whole numbers in groups, for rows that are rounded in groups.

    Attributes:
        bits: 4 or 8.
        packed: (panels, groups, bytes) uint8: see `compiled_groups.c`.
        has_halves: Whether scales and least numbers have 16 bits.
        few: Computes rows; None: nothing does, until `use_groups`.
    """

    few: Callable[[Tensor], Tensor] | None = None

    def __init__(
        self, weight: Tensor, bias: Tensor | None, grid: Grid | None = None, *, bits: int = 4
    ) -> None:
        """Find a weight's numbers, (outputs, inputs) in float32, again, or round it.

        Args:
            grid: Of the numbers that it has; None: it is rounded. See `takes_groups`.
            bits: To how many it is rounded.
        """
        self.shape, self.bias = weight.shape, bias
        if grid is None:
            grid = rounding(weight, bits=bits)
        self.bits = 4 if grid.bits <= 4 else _BYTE
        grid = grid.divided(weight.shape[1] // GROUP)
        self.has_halves = all(
            torch.equal(each.half().float(), each) for each in (grid.scales, grid.least)
        )
        numbers = grid.nearest(weight).view(*grid.scales.shape, GROUP)
        self.packed = _packed(
            numbers, grid.scales, grid.least, bits=self.bits, has_halves=self.has_halves
        )

    def __call__(self, hidden: Tensor) -> Tensor:
        """Compute it."""
        assert self.few is not None, "it is compiled"
        return self.few(hidden)

    def numbers(self, places: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, (outputs, inputs) uint8, and scales and least numbers: (outputs, groups).

        Args:
            places: Of which outputs, ascending; None: of all.
        """
        if places is None:
            places = torch.arange(self.shape[0])
        lie_in, within = torch.unique(places // _PANEL, return_inverse=True)
        packed, wanted = self.packed[lie_in], within * _PANEL + places % _PANEL
        panels, groups, _ = packed.shape
        kind = torch.float16 if self.has_halves else torch.float32
        beside = 2 * _PANEL * kind.itemsize
        cells = packed[..., :beside].contiguous().view(kind).float()
        cells = cells.view(panels, groups, 2, _PANEL).permute(2, 0, 3, 1)
        scales, least = cells.reshape(2, -1, groups)[:, wanted]
        vectors = packed[..., beside:].view(panels, groups, -1, _PANEL, _FOUR)
        if self.bits == _BYTE:
            found = vectors.permute(0, 3, 1, 2, 4)
        else:
            # Panel, output, group, vector, half, input.
            both = torch.stack((vectors & _LOW_BITS, vectors >> 4), 3)
            found = both.permute(0, 4, 1, 2, 3, 5)
        whole = found.reshape(-1, self.shape[1])[wanted]
        return whole.contiguous(), scales.contiguous(), least.contiguous()

    def weight(self) -> Tensor:
        """Return the weight that its numbers stand for."""
        numbers, scales, least = self.numbers()
        groups = numbers.view(*scales.shape, GROUP) * scales[..., None] + least[..., None]
        return groups.view(self.shape)


def rounding(weight: Tensor, *, bits: int) -> Grid:
    """Return the grid that rounds a weight, (outputs, inputs), in groups.

    Its scales and least numbers are numbers of 16 bits, which take less memory, unless that would
    add much to what is rounded anyway: outside of what 16 bits can say, and near 0, where they have
    few digits.
    """
    outputs, inputs = weight.shape
    groups = weight.reshape(outputs, inputs // GROUP, GROUP)
    least, largest, most = groups.amin(-1), groups.amax(-1), (1 << bits) - 1
    steps = largest / most - least / most  # each by itself: the difference can be infinite
    short_least = least.half().float()
    short_steps = (largest / most - short_least / most).half().float()
    added = (short_steps - steps).abs() * most + (short_least - least).abs()
    sizes = torch.maximum(least.abs(), largest.abs())
    # Each of the roundings to 16 bits is of 2^-11 at most, of numbers that they say in full. What
    # is small beside the output's other groups may be rounded by little beside these.
    allowed = steps / 4 + sizes * 2**-9 + steps.amax(-1, keepdim=True) * 2**-8
    if bool((added <= allowed).all()):
        return Grid(bits, short_steps, short_least)
    return Grid(bits, steps, least)


def _packed(
    numbers: Tensor, scales: Tensor, least: Tensor, *, bits: int, has_halves: bool
) -> Tensor:
    """Pack numbers, (outputs, groups, 32) uint8, in panels."""
    outputs, groups, _ = numbers.shape
    missing = -outputs % _PANEL
    kind = torch.float16 if has_halves else torch.float32
    cells = functional.pad(torch.stack((scales, least)), (0, 0, 0, missing))
    # Panel, group, which of both, output.
    cells = cells.view(2, -1, _PANEL, groups).permute(1, 3, 0, 2).to(kind).contiguous()
    whole = functional.pad(numbers, (0, 0, 0, 0, 0, missing))
    # Panel, group, vector, numbers of a byte, output, input.
    whole = whole.view(-1, _PANEL, groups, GROUP * bits // (_BYTE * _FOUR), _BYTE // bits, _FOUR)
    whole = whole.permute(0, 2, 3, 4, 1, 5)
    vectors = whole[:, :, :, 0] if bits == _BYTE else whole[:, :, :, 0] | whole[:, :, :, 1] << 4
    return torch.cat((cells.flatten(2).view(torch.uint8), vectors.flatten(2)), 2).contiguous()


def takes_groups(shape: torch.Size, grid: Grid | None = None) -> bool:
    """Whether a weight of this shape, and of this grid if it has one, can be in such groups."""
    if shape[1] % GROUP:
        return False
    return grid is None or (
        grid.bits in _GROUP_BITS
        and shape[1] % grid.scales.shape[1] == 0
        and shape[1] // grid.scales.shape[1] % GROUP == 0
    )


def refuse_int4(*, dtype: str, device: torch.device, compiled: bool) -> None:
    """Refuse four bits where they cannot be computed.

    Args:
        compiled: Whether code may be compiled.

    Raises:
        ModelLoadError: this device, dtype, processor or installation has no such products.
    """
    instead = "leave it out, or give --weights int8"
    if device.type != "cpu":
        raise ModelLoadError(
            f"--weights {INT4} computes on a CPU: leave out --device, or --weights {INT4}"
        )
    if dtype != "float32":
        raise ModelLoadError(
            f"with --weights {INT4} all but the products is computed in float32: leave --dtype"
            " alone"
        )
    if not has_vnni() or torch.backends.cpu.get_cpu_capability() != "AVX512":
        raise ModelLoadError(
            f"--weights {INT4} needs a processor with AVX-512 and VNNI, and this one"
            f" lacks one of them: {instead}"
        )
    if not compiled:
        raise ModelLoadError(
            f"--weights {INT4} is compiled when the server starts: leave out --no-compile-steps, or"
            " give --weights int8"
        )
    try:
        check_products_compile()
    except StepsUnavailableError as error:
        raise ModelLoadError(
            f"--weights {INT4} is compiled when the server starts, and cannot be: {error}. Mend"
            f" this, {instead}"
        ) from error
