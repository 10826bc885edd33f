"""The rows of several sequences in one forward of a model with recurrent layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from paceline_engine.torch_backend.recurrent.open_tile import TILE, OpenTile, Path
from paceline_engine.torch_backend.recurrent.recurrent_text import (
    MARGIN,
    LayerRows,
    Layers,
)
from paceline_engine.torch_backend.shared_rows import SharedRows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline_engine.torch_backend.attention import TextRows
    from paceline_engine.torch_backend.attention_kernels import Attention
    from paceline_engine.torch_backend.key_values import KeyValues
    from paceline_engine.torch_backend.recurrent.invariant_tile import InvariantTile
    from paceline_engine.torch_backend.recurrent.open_tile import RecurrentInput
    from paceline_engine.torch_backend.recurrent.recurrent_text import RecurrentText


class RecurrentLayers:
    """What the recurrent layers of a forward do with its rows, text by text.

    Args:
        texts: Each sequence's part.
        counts: How many rows each has. Further rows fill the forward up.
    """

    def __init__(self, texts: Sequence[TextLayers], counts: Sequence[int]) -> None:
        self._texts, self._counts = texts, counts

    def convolve(self, layer: int, raw: Tensor, *, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Keep what enters a layer's convolution, (T, C), and return what leaves it.

        Args:
            weight: (C, w).
        """
        count = sum(self._counts)
        parts = torch.split(raw[:count], [*self._counts])
        found = [
            text.convolve(layer, part, weight=weight, bias=bias)
            for text, part in zip(self._texts, parts, strict=True)
        ]
        if len(raw) > count:
            found.append(torch.zeros_like(raw[count:]))
        return torch.cat(found)

    def recur(self, layer: int, new: RecurrentInput) -> Tensor:
        """Append rows to a layer's tiles, after `convolve`, and return their outputs: (H, T, V)."""
        outputs, start = [], 0
        for text, count in zip(self._texts, self._counts, strict=True):
            outputs.append(text.recur(layer, new.part(start, start + count)))
            start += count
        if new.values.shape[1] > start:
            outputs.append(torch.zeros_like(new.values[:, start:]))
        return torch.cat(outputs, 1)


class RecurrentRows(SharedRows):
    """Rows of several sequences; see `SharedRows`. Recurrent layers go text by text.

    Args:
        texts, token_ids, scored_counts: See `SharedRows`.
        attention_places: The place, among the layers with keys and values, of each such layer.
        how: What else the class of rows behind this one takes: see there.

    Attributes:
        recurrent: What its recurrent layers call.
    """

    def __init__(
        self,
        texts: Sequence[KeyValues],
        token_ids: Sequence[Sequence[int]],
        scored_counts: Sequence[int],
        *,
        attention_places: Mapping[int, int],
        **how: Any,
    ) -> None:
        super().__init__(texts, token_ids, scored_counts, **how)
        self._attention_places = attention_places
        self.recurrent = RecurrentLayers(
            [
                self._layers_of(rows, block_count=max(0, scored - 1))
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

    def _layers_of(self, rows: TextRows, *, block_count: int) -> TextLayers:
        return TilePieces(rows, block_count=block_count)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some of a sequence's new rows, at most a tile and a tree.

    Attributes:
        start, end: Among the new rows.
        closed_count: How many open rows are closed before.
    """

    start: int
    end: int
    closed_count: int
    path: Path


class TextLayers(ABC):
    """One sequence's new rows in all recurrent layers.

    Args:
        block_count: How many of the rows are a proposal, which may be rejected.
    """

    def __init__(self, rows: TextRows, *, block_count: int) -> None:
        self._rows = rows
        self._before = cast("RecurrentText", rows.kept).layers.cut(rows.start)
        self._made: dict[int, LayerRows] = {}
        self._most_base = rows.length - block_count - MARGIN
        base = self._before.base + self._closed_count
        cast("RecurrentText", rows.kept).take(Layers(base, rows.length, self._made))

    @property
    @abstractmethod
    def _closed_count(self) -> int:
        """How many open rows are closed in the forward."""

    @abstractmethod
    def recur(self, layer: int, new: RecurrentInput) -> Tensor:
        """Append rows to a layer's tile, after `convolve`: their outputs, (H, t, V)."""

    @abstractmethod
    def _convolved(
        self, all_raw: Tensor, *, past: int, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Convolve the new rows, which come after so many older ones: (t, C)."""

    def convolve(self, layer: int, raw: Tensor, *, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Keep what enters a layer's convolution, (t, C), and return what leaves it."""
        width, before = weight.shape[-1], self._before.rows.get(layer)
        past = raw.new_zeros(width - 1, raw.shape[-1]) if before is None else before.raw
        all_raw = torch.cat((past, raw))
        # A copy, because a part of a long prompt would hold the memory of the whole.
        self._made[layer] = LayerRows(all_raw[self._closed_count :].clone(), None)
        found = self._convolved(all_raw, past=len(past), weight=weight, bias=bias)
        return found.to(raw.dtype)

    def _tile_before(self, layer: int) -> OpenTile | InvariantTile | None:
        before = self._before.rows.get(layer)
        return None if before is None else before.tile

    def _keep(self, layer: int, tile: OpenTile | InvariantTile) -> None:
        self._made[layer] = LayerRows(self._made[layer].raw, tile)

    def _sees(self, begin: int, end: int, base: int) -> Tensor:
        """Return which rows from the base on each of these new rows sees: (rows, columns)."""
        start, tree = self._rows.start, self._rows.tree
        columns = torch.arange(base, start + end)
        sees = columns <= torch.arange(start + begin, start + end)[:, None]
        if tree is not None and end == self._rows.count:
            sees[len(sees) - len(tree.ages) :, tree.first - base :] = tree.ages >= 0
        return sees

    def _windows(self, width: int) -> Tensor:
        """Return, for each new row, the places of it and of what comes before it on its path."""
        open_count = self._before.end - self._before.base
        # Before the open rows lie w - 1 older ones, which all rows see.
        seen = functional.pad(self._all_sees, (width - 1, 0), value=True)
        places = torch.arange(seen.shape[1]).expand_as(seen).masked_fill(~seen, -1)
        assert places.shape[1] == width - 1 + open_count + self._rows.count
        return places.topk(width, 1).values.flip(1)

    @cached_property
    def _all_sees(self) -> Tensor:
        return self._sees(0, self._rows.count, self._before.base)


class TilePieces(TextLayers):
    """New rows that are computed in pieces of up to a tile; see `open_tile.py`."""

    @cached_property
    def _closed_count(self) -> int:
        return sum(piece.closed_count for piece in self._pieces)

    @cached_property
    def _pieces(self) -> Sequence[_Piece]:
        count, start = self._rows.count, self._rows.start
        tree_count = 0 if self._rows.tree is None else len(self._rows.tree.ages)
        edges = [0, count]
        if count - tree_count > TILE:  # a prompt: by the edges of tiles
            first = TILE - start % TILE
            edges = [0, *range(first, count - tree_count, TILE), count]
        pieces, base = [], self._before.base
        device = self._rows.kept.keys.device
        for begin, end in pairwise(edges):
            closed_count = 0
            while base + closed_count + TILE <= min(self._most_base, start + begin):
                closed_count += TILE
            base += closed_count
            sees = self._sees(begin, end, base).to(device, non_blocking=True)
            path = Path(sees, open_count=start + begin - base)
            pieces.append(_Piece(begin, end, closed_count, path))
        return pieces

    def _convolved(
        self, all_raw: Tensor, *, past: int, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        width = weight.shape[-1]
        if self._rows.tree is None:
            own = all_raw[past - width + 1 :].T[None].to(weight.dtype)
            return functional.conv1d(own, weight[:, None], bias, groups=len(weight))[0].T
        windows = all_raw[self._windows(width).to(all_raw.device)]  # (rows, w, C)
        found = (windows.float() * weight.T.float()).sum(1)
        return found if bias is None else found + bias

    def recur(self, layer: int, new: RecurrentInput) -> Tensor:
        """See `TextLayers`."""
        before = self._tile_before(layer)
        tile = OpenTile.empty(new) if before is None else cast("OpenTile", before)
        outputs = []
        for piece in self._pieces:
            if piece.closed_count:
                tile = tile.closed(piece.closed_count)
            found, tile = tile.after(new.part(piece.start, piece.end), piece.path)
            outputs.append(found)
        self._keep(layer, tile)
        return torch.cat(outputs, 1)
