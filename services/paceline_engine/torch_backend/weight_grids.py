"""The whole numbers that a file has for a weight, found again in the dequantised weight.

A model is loaded with dequantised weights, and each linear module keeps a `StoredAs`: how its file
has the weight, and the scales with which a product finds the whole numbers again.

    weight[o, i]  =  scale[o, g] * q[o, i] + least[o, g]      g: the group of input i

A grid is believed after it has been tried: `Grid.gives_back` computes the weight from the whole
numbers that it finds. That takes as long as reading the weight a few times, and memory for some
rows of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MIDDLE = 128
"""What a grid's numbers of eight bits have more than signed ones."""
_NUMBERS_AT_ONCE = 1 << 16  # so that a core's cache holds what is computed of them
# A file's reader rounds at most three times where a grid rounds twice, each time to float32.
_ROUNDINGS = 4


@dataclass(frozen=True, slots=True)
class Grid:
    """The scales of a weight's whole numbers.

    A number q, in [0, 2^bits), stands for scale * q + least.

    Attributes:
        bits: Of a number.
        scales: (O, G) float32; a group has I / G inputs.
        least: (O, G) float32.
    """

    bits: int
    scales: Tensor
    least: Tensor

    @staticmethod
    def stacked(grids: Sequence[Grid]) -> Grid | None:
        """Return the grid of weights with the same inputs, one below the other, if it is one.

        It has the bits of the weight with the most.
        """
        if len({each.scales.shape[1] for each in grids}) != 1:
            return None
        scales = torch.cat([each.scales for each in grids])
        least = torch.cat([each.least for each in grids])
        return Grid(max(each.bits for each in grids), scales, least)

    def of_outputs(self, outputs: Tensor) -> Grid:
        """Return the grid of some of the outputs."""
        return Grid(self.bits, self.scales[outputs], self.least[outputs])

    def divided(self, count: int) -> Grid:
        """Return the same grid with so many groups, a multiple of its own."""
        times = count // self.scales.shape[1]
        scales, least = (each.repeat_interleave(times, 1) for each in (self.scales, self.least))
        return Grid(self.bits, scales, least)

    def nearest(self, weight: Tensor) -> Tensor:
        """Return the whole numbers nearest to a weight, (O, I): uint8."""
        found = torch.empty(weight.shape, dtype=torch.uint8)
        for rows in _slices(weight):
            groups = _grouped(weight, rows, self.scales.shape[1])
            found[rows] = self._nearest(groups, rows).flatten(1).to(torch.uint8)
        return found

    def gives_back(self, weight: Tensor) -> bool:
        """Whether whole numbers stand for this weight, (O, I), up to the rounding of its dtype."""
        outputs, count = self.scales.shape
        if len(weight) != outputs or weight.shape[1] % count:
            return False
        rounding, own = (torch.finfo(it).eps for it in (weight.dtype, torch.float32))
        for rows in _slices(weight):
            scales, least = self.scales[rows, :, None], self.least[rows, :, None]
            expected = _grouped(weight, rows, count)
            error = (
                self._nearest(expected.clone(), rows).mul_(scales).add_(least).sub_(expected).abs_()
            )
            if rounding > own:
                error.sub_(expected.abs_(), alpha=rounding)
            most = _ROUNDINGS * own * ((1 << self.bits) * scales.abs() + least.abs())
            # Written so that NaN and infinity agree with nothing.
            if not bool((error <= most).all()):
                return False
        return True

    def _nearest(self, groups: Tensor, rows: slice) -> Tensor:
        """Return them of some rows, (rows, G, I / G) float32: in place of their weight."""
        scales = self.scales[rows, :, None]
        groups.sub_(self.least[rows, :, None]).div_(torch.where(scales == 0, 1, scales))
        return groups.round_().clamp_(0, (1 << self.bits) - 1)


@dataclass(frozen=True, slots=True)
class StoredAs:
    """How a file has a weight that it does not have in floating point.

    Attributes:
        words: For people, as in "12 in Q6_K".
        grid: With which products find the whole numbers again; None: no product computes them.
    """

    words: str
    grid: Grid | None

    def of_outputs(self, outputs: Tensor) -> StoredAs:
        """Return how it has some of the outputs."""
        return StoredAs(self.words, None if self.grid is None else self.grid.of_outputs(outputs))


def stored_as(module: nn.Module) -> StoredAs | None:
    """Return how the file has a linear module's weight; None: in floating point."""
    found = getattr(module, "stored_as", None)
    return found if isinstance(found, StoredAs) else None


def grid_of(linears: Sequence[nn.Linear]) -> Grid | None:
    """Return the grid of modules' weights, side by side, if they have one."""
    stored = [stored_as(each) for each in linears]
    grids = [each.grid for each in stored if each is not None and each.grid is not None]
    return Grid.stacked(grids) if len(grids) == len(linears) else None


def fitting_grid(weight: Tensor, linears: Sequence[nn.Linear]) -> Grid | None:
    """Return the grid of modules' weights, side by side, if it gives them back."""
    grid = grid_of(linears)
    return grid if grid is not None and grid.gives_back(weight) else None


def scales_of_outputs(grid: Grid | None) -> Tensor | None:
    """Return the scales of signed numbers of eight bits, (O, 1), if each output has one scale."""
    if grid is None or grid.bits != 8 or grid.scales.shape[1] != 1:
        return None
    return grid.scales if torch.equal(grid.least, -MIDDLE * grid.scales) else None


def _slices(weight: Tensor) -> Iterator[slice]:
    step = max(1, _NUMBERS_AT_ONCE // weight.shape[1])
    for start in range(0, len(weight), step):
        yield slice(start, start + step)


def _grouped(weight: Tensor, rows: slice, count: int) -> Tensor:
    """Return some rows in groups, (rows, G, I / G) float32: a copy."""
    part = weight[rows]
    return part.to(torch.float32, copy=True).reshape(len(part), count, -1)
