"""Forwards whose results for a row follow from its text alone, bit by bit.

A row of a matrix product is computed from that row alone, but by a kernel, and so in an order of
additions, that follows from the product's shape. On a CPU, with one thread, it is the same for
every shape that has a multiple of 4 rows, and as many keys to attend to (bench/LOG.md). So here

- a forward has a multiple of 4 rows, and so do those of it that are scored;
- keys come in tiles. A row sees all of the tile in which it is, with the later ones masked: how
  many keys there are then follows from its position, neither from where its prefix was cut, nor
  from the rows after it;

    keys      | tile 0 | tile 1 | tile 2 |
    rows in tile 1 see |---------------->| of these, each up to itself

- the rows of one text in one tile are attended together with as many neighbours as make them a
  multiple of 4. What those see there is thrown away.

All else in a forward is done to each row by itself. A model for which that does not hold is found
out by `is_invariant`.
"""

from __future__ import annotations

import itertools
import math
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from paceline_engine.backends.attention import SharedRows, attend_slowly
from paceline_engine.backends.key_values import KeyValues

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_engine.backends.attention import Attention
    from paceline_engine.backends.decoders import Decoder
    from paceline_engine.backends.key_values import KeyValueShape

__all__ = ["TILE", "InvariantRows", "is_invariant"]

TILE = 64
"""How many keys a tile has. Smaller ones waste fewer masked keys, and cut prompts into more."""

_MULTIPLE = 4


class InvariantRows(SharedRows):
    """Rows of several texts, filled up to a multiple of 4; see `SharedRows`."""

    def __init__(
        self,
        texts: Sequence[KeyValues],
        token_ids: Sequence[Sequence[int]],
        scored_counts: Sequence[int],
    ) -> None:
        """Build it.

        Args:
            texts: With buffers of whole tiles, and room for their rows.
            token_ids: Of each text's rows, one or more.
            scored_counts: How many of each text's last rows to score. What is scored beyond them
                comes last.
        """
        super().__init__(texts, token_ids, scored_counts)
        self._count = len(self.token_ids)
        scored = torch.arange(self._count)[self.scored]
        self.scored = _filled(scored)
        self.token_ids, self.positions = _filled(self.token_ids), _filled(self.positions)
        ends = torch.tensor(self._counts).cumsum(0).tolist()
        self._tiled = [
            _TiledText(text, text.row_count, range(end - count, end), len(self.token_ids))
            for text, count, end in zip(texts, self._counts, ends, strict=True)
        ]

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, how: Attention
    ) -> Tensor:
        """Keep a layer's new keys and values, (G, T, D), and attend: (H, T, D) to the same."""
        self._keep(layer, keys[:, : self._count], values[:, : self._count])
        return self._attend_in_tiles(
            [(text.keys[layer], text.values[layer]) for text in self._tiled], queries, how
        )

    def keep(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keep a layer's new keys and values; return all texts' tiles side by side."""
        self._keep(layer, keys[:, : self._count], values[:, : self._count])
        return (
            torch.cat([text.keys[layer][0] for text in self._tiled], 1),
            torch.cat([text.values[layer][0] for text in self._tiled], 1),
        )

    def attend_to_made(
        self, queries: Tensor, keys: Tensor, values: Tensor, how: Attention
    ) -> Tensor:
        """Attend to what a layer made of what `keep` returned: (H, T, D)."""
        lengths = [text.length for text in self._tiled]
        parts = (torch.split(each[None], lengths, 2) for each in (keys, values))
        return self._attend_in_tiles(list(zip(*parts, strict=True)), queries, how)

    def _attend_in_tiles(
        self, states: Sequence[tuple[Tensor, Tensor]], queries: Tensor, how: Attention
    ) -> Tensor:
        seen = [
            part
            for text, own in zip(self._tiled, states, strict=True)
            for part in text.attend(queries, *own, how)
        ]
        if (unused := queries.shape[1] - self._count) > 0:
            seen.append(seen[0].new_zeros(len(seen[0]), unused, seen[0].shape[-1]))
        return torch.cat(seen, 1)


class _TiledText:
    """One text's part: its rows in each tile of keys.

    Attributes:
        keys, values: Of each layer, (1, G, length, D): up to the end of the last tile.
    """

    def __init__(self, text: KeyValues, start: int, rows: range, row_count: int) -> None:
        end = start + len(rows)
        self.length = _up_to(TILE, end)
        self.keys, self.values = text.until(self.length)
        edges = [start, *range(_up_to(TILE, start + 1), end, TILE), end]
        self._tiles = [
            _Tile(
                _up_to(TILE, last),
                rows[first - start : last - start],
                range(first, last),
                row_count,
            )
            for first, last in itertools.pairwise(edges)
        ]

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, how: Attention) -> list[Tensor]:
        """Attend with the text's rows of all, (H, T, D): (H, rows, D) for each tile."""
        return [
            tile.attend(queries, keys[:, :, : tile.end], values[:, :, : tile.end], how)
            for tile in self._tiles
        ]


class _Tile:
    """A text's rows that are in one tile of keys, and neighbours.

    Attributes:
        end: Keys up to the end of the tile.
    """

    def __init__(self, end: int, rows: range, positions: range, row_count: int) -> None:
        self.end = end
        count = _up_to(_MULTIPLE, len(rows))
        # At the end of the forward the neighbours are those before them.
        first = min(rows.start, row_count - count)
        self._taken = slice(first, first + count)
        self._own = slice(rows.start - first, rows.stop - first)
        # A neighbour has to see something, or it has no weights at all.
        places = torch.arange(first - rows.start, first - rows.start + count)
        self._positions = positions.start + places.clamp(0, len(rows) - 1)
        self._masks: dict[tuple[int | None, int], Tensor] = {}

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, how: Attention) -> Tensor:
        taken = queries[:, self._taken]
        heads, count, width = taken.shape
        if not how.is_plain:
            mask = self._mask(how.window, taken)
            return attend_slowly(taken, keys[0], values[0], mask, how)[:, self._own]
        kv_heads = keys.shape[1]
        # The heads of a group lie one below the other, as rows: (1, G, H / G * t, D).
        seen = functional.scaled_dot_product_attention(
            taken.reshape(1, kv_heads, -1, width),
            keys,
            values,
            attn_mask=self._mask(how.window, taken, heads // kv_heads),
            scale=how.scale,
        )
        return seen.reshape(heads, count, -1)[:, self._own]

    def _mask(self, window: int | None, like: Tensor, group: int = 1) -> Tensor:
        """Return what is added to the products: (group * t, end)."""
        if (window, group) not in self._masks:
            ages = self._positions[:, None] - torch.arange(self.end)
            hidden = ages < 0
            if window is not None:
                hidden |= ages >= window
            mask = like.new_zeros(hidden.shape).masked_fill_(hidden, -math.inf)
            self._masks[window, group] = mask.repeat(group, 1)
        return self._masks[window, group]


def _up_to(multiple: int, count: int) -> int:
    return -(-count // multiple) * multiple


def _filled(each: Tensor) -> Tensor:
    """Add zeros, up to a multiple of 4."""
    return functional.pad(each, (0, _up_to(_MULTIPLE, len(each)) - len(each)))


# --- the proof at load ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Fed:
    """Two texts of so many rows in each of some forwards; 0: none of the second."""

    first: tuple[int, ...]
    second: tuple[int, ...]


# Across the edge of a tile, in forwards of 4 to 72 rows.
_LENGTH = 72
_WAYS = (
    _Fed((1, 30, 4, 35, 1, 1), (61, 1, 2, 6, 1, 1)),
    _Fed((16, 1, 47, 3, 5), (1, 8, 1, 60, 2)),
)


@torch.inference_mode()
def is_invariant(decoder: Decoder, shape: KeyValueShape, *, most_tokens: int) -> bool:
    """Tell whether two texts get the same bits whole and alone, and in pieces side by side.

    Args:
        most_tokens: The smaller of the vocabulary and the context.
    """
    length = min(_LENGTH, most_tokens)
    texts = [
        [(7919 * place + 31 * (place // 5) + n) % most_tokens for place in range(length)]
        for n in (1, 2)
    ]
    alone = [_scored(decoder, shape, [text], [(length,)])[0] for text in texts]
    for way in _WAYS:
        together = _scored(decoder, shape, texts, [way.first, way.second])
        for expected, actual in zip(alone, together, strict=True):
            if not torch.equal(expected, actual):
                return False
    return True


def _scored(
    decoder: Decoder,
    shape: KeyValueShape,
    texts: Sequence[Sequence[int]],
    pieces: Sequence[Sequence[int]],
) -> list[Tensor]:
    """Feed texts in pieces, and return the logits of all their rows: (L, V) each."""
    caches = [KeyValues(shape, reserve_length=len(text), tile=TILE) for text in texts]
    logits: list[list[Tensor]] = [[] for _ in texts]
    for counts in zip(*pieces, strict=True):
        fed = [
            (cache, array("I", text[cache.length : cache.length + count]), mine)
            for cache, text, count, mine in zip(caches, texts, counts, logits, strict=True)
            if cache.length < len(text)
        ]
        if not fed:
            break
        for cache, part, _ in fed:
            cache.make_room(len(part))
        sizes = [len(part) for _, part, _ in fed]
        rows = InvariantRows([cache for cache, _, _ in fed], [part for _, part, _ in fed], sizes)
        scored = torch.split(decoder(rows)[: sum(sizes)], sizes)
        for (cache, part, mine), own in zip(fed, scored, strict=True):
            cache.extend(part)
            mine.append(own)
    return [torch.cat(own) for own in logits]
