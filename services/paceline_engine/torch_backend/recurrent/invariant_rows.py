"""Invariant forwards of models with recurrent layers: see `invariant_tile.py`."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from paceline_engine.torch_backend.invariant import LEAST_MULTIPLE, InvariantRows
from paceline_engine.torch_backend.recurrent.invariant_tile import InvariantTile
from paceline_engine.torch_backend.recurrent.open_tile import TILE
from paceline_engine.torch_backend.recurrent.recurrent_rows import RecurrentLayers, TextLayers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline_engine.torch_backend.attention_kernels import Attention
    from paceline_engine.torch_backend.key_values import KeyValues
    from paceline_engine.torch_backend.recurrent.open_tile import RecurrentInput


class InvariantRecurrentRows(InvariantRows):
    """Rows of several sequences, filled up; see `InvariantRows` and `RecurrentRows`."""

    def __init__(
        self,
        texts: Sequence[KeyValues],
        token_ids: Sequence[Sequence[int]],
        scored_counts: Sequence[int],
        *,
        attention_places: Mapping[int, int],
        parents: Sequence[Sequence[int]] | None = None,
        multiple: int = LEAST_MULTIPLE,
    ) -> None:
        super().__init__(texts, token_ids, scored_counts, parents=parents, multiple=multiple)
        self._attention_places = attention_places
        self.recurrent = RecurrentLayers(
            [
                _InvariantLayers(rows, block_count=max(0, scored - 1))
                for rows, scored in zip(self._texts, scored_counts, strict=True)
            ],
            self._counts,
        )

    def attend(
        self, layer: int, queries: Tensor, *, keys: Tensor, values: Tensor, how: Attention
    ) -> Tensor:
        """Keep a layer's new keys and values, (G, T, D), and attend: (H, T, D) to the same."""
        place = self._attention_places[layer]
        return super().attend(place, queries, keys=keys, values=values, how=how)


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
