"""The scales of a GGUF tensor whose numbers have groups: what its whole numbers stand for.

    number = scale * q + least       q in [0, 2^bits)

A block of the file begins with its scales, as numbers of 16 bits; Q4_K and Q5_K have eight groups
in a block, and for each a factor of six bits. What the package dequantises is the same, bit for
bit: a factor times q needs fewer bits than float32 has, and then both round once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf.quants import Q4_K

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

_HALF = np.dtype("<f2")
_BITS = {"Q4_0": 4, "Q4_1": 4, "Q4_K": 4, "Q5_0": 5, "Q5_1": 5, "Q5_K": 5, "Q8_0": 8}
# Their numbers are signed in the file; this is what 0 of the unsigned ones stands for.
_MIDDLES = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 128}
FLOATING_KINDS = frozenset({"F32", "F16", "BF16"})
"""The kinds of tensors that are not quantised."""
_OF_BLOCKS = frozenset({"Q4_K", "Q5_K"})
_FACTORS_END = 2 * _HALF.itemsize + Q4_K.K_SCALE_SIZE


@dataclass(frozen=True, slots=True)
class GgufGroups:
    """The groups of 32 numbers of a tensor, (O, I).

    Attributes:
        bits: Of a number.
        scales, least: (O, I / 32) float32.
    """

    bits: int
    scales: NDArray[np.float32]
    least: NDArray[np.float32]

    def changed(self, change: Callable[[NDArray[np.float32]], NDArray[np.float32]]) -> GgufGroups:
        """Return the groups with another order of rows."""
        return GgufGroups(self.bits, change(self.scales), change(self.least))


def groups_of(kind: str, blocks: NDArray[np.uint8], *, rows: int) -> GgufGroups | None:
    """Return the groups of a tensor of a kind; None: its kind has no such groups.

    Args:
        blocks: (blocks, bytes), in the tensor's order.
        rows: How many rows the tensor has.
    """
    if kind not in _BITS:
        return None
    scales = _halves(blocks, 0)
    if kind in _OF_BLOCKS:
        factors: Any = Q4_K.get_scale_min(blocks[:, 2 * _HALF.itemsize : _FACTORS_END])
        least = -(_halves(blocks, 1) * factors[1].astype(np.float32))
        scales = scales * factors[0].astype(np.float32)
    elif kind in _MIDDLES:
        least = scales * np.float32(-_MIDDLES[kind])
    else:
        least = _halves(blocks, 1)
    return GgufGroups(_BITS[kind], scales.reshape(rows, -1), least.reshape(rows, -1))


def _halves(blocks: NDArray[np.uint8], place: int) -> NDArray[np.float32]:
    """Return a number of 16 bits from each block: (blocks, 1)."""
    begin = place * _HALF.itemsize
    found = np.ascontiguousarray(blocks[:, begin : begin + _HALF.itemsize])
    return found.view(_HALF).astype(np.float32)
