"""Invariant forwards of models with recurrent layers: see `invariant_tile.py`."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from paceline_engine.torch_backend.invariant import InvariantRows
from paceline_engine.torch_backend.recurrent.invariant_tile import InvariantTile
from paceline_engine.torch_backend.recurrent.open_tile import TILE
from paceline_engine.torch_backend.recurrent.recurrent_rows import RecurrentRows, TextLayers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_engine.torch_backend.attention import TextRows
    from paceline_engine.torch_backend.recurrent.open_tile import RecurrentInput


class InvariantRecurrentRows(RecurrentRows, InvariantRows):
    """Rows of several sequences, filled up; see `RecurrentRows` and `InvariantRows`."""

    def _layers_of(self, rows: TextRows, *, block_count: int) -> TextLayers:
        return _InvariantLayers(rows, block_count=block_count)


class _InvariantLayers(TextLayers):
    """One sequence's new rows in all recurrent layers, each computed by itself."""

    @cached_property
    def _closed_count(self) -> int:
        # Not beyond the new rows' tile: the states before it are made in the forward.
        most = min(self._most_base, self._chain_end - 1) - self._before.base
        return max(0, most // TILE * TILE)

    @property
    def _chain_end(self) -> int:
        """Where the sequence ends, and the tree behind it begins, if there is one."""
        tree = self._rows.tree
        return self._rows.length if tree is None else tree.first

    def _convolved(
        self, all_raw: Tensor, *, past: int, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        precise = torch.promote_types(all_raw.dtype, torch.float32)
        width, count = weight.shape[-1], self._rows.count
        windows = None if self._rows.tree is None else self._windows(width)
        found = torch.zeros(count, all_raw.shape[-1], dtype=precise)
        for place in range(width):  # in this order, however many rows there are
            first = past - width + 1 + place
            own = all_raw[first : first + count] if windows is None else all_raw[windows[:, place]]
            found = found + own.to(precise) * weight[:, place].to(precise)
        return found if bias is None else found + bias

    def recur(self, layer: int, new: RecurrentInput) -> Tensor:
        """See `TextLayers`."""
        before = self._tile_before(layer)
        tile = InvariantTile.empty(new) if before is None else cast("InvariantTile", before)
        outputs, tile = tile.after(
            new, self._paths, chain_count=self._chain_end - self._before.base
        )
        self._keep(layer, tile.closed(self._closed_count))
        return outputs

    @cached_property
    def _paths(self) -> Sequence[Sequence[int]]:
        """The places, from the base on, of what each new row follows, and its own."""
        rows, base = self._rows, self._before.base
        if rows.tree is None:
            return [range(place + 1) for place in range(rows.start - base, rows.length - base)]
        return [row.nonzero()[:, 0].tolist() for row in self._all_sees]
