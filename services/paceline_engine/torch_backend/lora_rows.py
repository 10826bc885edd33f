"""The rows of a forward that have a LoRA adapter (Hu et al. 2021, arXiv 2106.09685).

All rows go through the model's own products, whatever adapter they have or have none. To the rows
of each adapter the product with its two factors is added:

    rows      | seq. A: a a a | seq. B: a | seq. C: - | seq. D: b b |
    product   |<---------------- one, with the weight ------------->|
    added     |  scale * (x down) up of a |           |   of b      |

So rows without an adapter have the bits that they would have without any adapter beside them. The
rows of an adapter are filled up to a multiple of 4, as `invariant.py` does with all rows. Factors
are narrow, and products with them have another order of additions for 4, 8 and 12 rows than for
more. So with `--invariant`, where a row must not depend on what else has its adapter, there are at
least 16.

Letters: T rows, R the rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_MULTIPLE = 4
INVARIANT_ROWS = 16
"""From so many rows on the order of additions stays the same (bench/LOG.md)."""

ProductKey: TypeAlias = tuple[int, int] | str
"""A product of `FusedLlama`, by its layer and its number there; or a linear module, by its name."""


@dataclass(frozen=True, slots=True)
class Factors:
    """What is added to a product: `inputs @ down.T @ up`.

    Attributes:
        down: (R, inputs).
        up: (R, outputs), with the scale.
    """

    down: Tensor
    up: Tensor

    def of(self, inputs: Tensor) -> Tensor:
        """Compute (T, outputs) from (T, inputs)."""
        return functional.linear(inputs, self.down) @ self.up


LoraWeights: TypeAlias = "Mapping[ProductKey, Factors]"
"""The factors of one adapter, for the products that it changes."""


class LoraRows:
    """Which rows of one forward have which adapter."""

    def __init__(
        self,
        rows: Iterable[tuple[LoraWeights | None, int]],
        *,
        device: torch.device,
        least: int = _MULTIPLE,
    ) -> None:
        """Build it.

        Args:
            rows: For each sequence, in the order of the rows, its adapter's factors or None, and
                how many rows it has.
            device: Where the model computes.
            least: The rows of each adapter are filled up to so many.
        """
        places: dict[int, list[int]] = {}
        weights: dict[int, LoraWeights] = {}
        start = 0
        for own, count in rows:
            if own is not None:
                weights[id(own)] = own
                places.setdefault(id(own), []).extend(range(start, start + count))
            start += count
        self._groups = [
            (weights[key], _on(device, each), _on(device, _filled(each, least=least)))
            for key, each in places.items()
        ]

    def add(self, key: ProductKey, *, inputs: Tensor, product: Tensor) -> None:
        """Add each adapter's part to its rows of a product, (T, outputs), in place."""
        for weights, places, filled in self._groups:
            factors = weights.get(key)
            if factors is not None:
                added = factors.of(inputs.index_select(0, filled))[: len(places)]
                product.index_add_(0, places, added.to(product.dtype))


def _filled(places: Sequence[int], *, least: int) -> list[int]:
    missing = max(least - len(places), -len(places) % _MULTIPLE)
    return [*places, *([places[-1]] * missing)]


def _on(device: torch.device, places: Sequence[int]) -> Tensor:
    return torch.tensor(places, dtype=torch.int64).to(device, non_blocking=True)
