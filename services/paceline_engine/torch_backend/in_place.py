"""Rows of several sequences on a GPU, attended where they lie: a few launches for all sequences.

Theory of operation
-------------------

Each sequence has buffers of its own, of any size and anywhere on the device. Operators of torch
take one tensor for all sequences, so each sequence costs launches of its own, or its keys and
values are copied to others'. The kernels of `in_place_kernels.py` take tables instead, which say
where each sequence lies:

    rows    | row 0: seq. A, place 7 | row 1: seq. A, place 8 | row 2: seq. B, place 90 |
    tiles   | tile 0: rows 0 and 1, after 7 tokens of seq. A  | tile 1: row 2, ...      |

A table is made once in a forward and serves all layers. A layer's new keys and values are written
by one launch (`keep`), and all tiles are attended by one or two (`attend`): long sequences are
divided into parts, which a second launch puts together by their weights.

Trees and long parts of prompts are attended one by one (`TextRows.attend`).
"""

from __future__ import annotations

import logging
from array import array
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor

from paceline_engine.terms.backend import first_line
from paceline_engine.torch_backend.attention import FEW_ROWS, TextRows
from paceline_engine.torch_backend.attention_kernels import Attention
from paceline_engine.torch_backend.key_values import KeyValues
from paceline_engine.torch_backend.kv_arena import KeyValueShape, Slabs

if TYPE_CHECKING:
    from collections.abc import Sequence

_log = logging.getLogger(__name__)

# So many programs keep a GPU of some hundred multiprocessors busy.
_PROGRAMS = 256
# A part of a sequence is at least so long, and a sequence has at most so many parts.
_LEAST_PART, _MOST_SPLITS = 256, 32


class Tables:
    """The tables of some sequences' rows.

    Attributes:
        rows: 6 numbers for each row; see `in_place_kernels.keep`.
        tiles: 9 numbers for each tile; see `in_place_kernels.attend`.
        tile_rows: The most rows of a tile: 1 or FEW_ROWS.
        alone: The sequences that have no tile, each with its first row's number.
        longest: The length of the longest sequence with a tile.
    """

    def __init__(self, texts: Sequence[TextRows], *, like: KeyValues) -> None:
        """Build them of sequences in the order of their rows; places are told from `like`."""
        self.rows: list[int] = []
        self.tiles: list[int] = []
        self.alone: list[tuple[TextRows, int]] = []
        self.tile_rows = 1
        self.longest = end = 0
        key_width, value_width = like.keys.shape[-1], like.values.shape[-1]
        for text in texts:
            begin, end = end, end + text.count
            keys, values = text.kept.places_from(like)
            for slot in range(text.start, text.length):
                self.rows += (keys[0] + slot * key_width, *keys[1:])
                self.rows += (values[0] + slot * value_width, *values[1:])
            if text.tree is not None or text.count > FEW_ROWS:
                self.alone.append((text, begin))
                continue
            self.tiles += (*keys, *values, begin, text.count, text.start)
            self.longest = max(self.longest, text.length)
            if text.count > 1:
                self.tile_rows = FEW_ROWS


class RowsInPlace:
    """Rows whose keys and values lie where tables on the device say.

    Args:
        kernels: Write and attend.
        like: The sequence from which places are told.
        rows, tiles: The tables on the device, int64, flat or not; see `Tables`.
        tile_rows: The most rows of a tile.
        longest: The length of the longest sequence with a tile.

    Letters: T rows in all, H heads, G key and value heads, D their width.
    """

    def __init__(
        self,
        kernels: Kernels,
        *,
        like: KeyValues,
        rows: Tensor,
        tiles: Tensor,
        tile_rows: int,
        longest: int,
    ) -> None:
        self._kernels = kernels
        self._like = (like.keys, like.values)
        self._kv_heads = like.keys.shape[2]
        self._rows, self._tiles = rows.view(-1, 6), tiles.view(-1, 9)
        self._tile_rows = tile_rows
        self._splits = splits_of(len(self._tiles) * self._kv_heads, longest=longest)

    def keep(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Keep a layer's new keys and values: (G, T, D)."""
        self._kernels.keep(keys, values, layer=layer, table=self._rows, like=self._like)

    def attend(self, layer: int, queries: Tensor, *, how: Attention) -> Tensor:
        """Attend to what is kept of a layer: (T, H, D) from (H, T, D).

        Only rows of tiles are computed; others are left as the allocator gave them.
        """
        return self._kernels.attend(
            queries,
            layer=layer,
            table=self._tiles,
            like=self._like,
            kv_heads=self._kv_heads,
            rows=self._tile_rows,
            splits=self._splits,
            scale=how.scale,
            window=how.window,
        )


class TextsInPlace:
    """The rows of a forward's sequences, (T,) in all."""

    def __init__(self, texts: Sequence[TextRows], kernels: Kernels) -> None:
        """Build it of sequences in the order of their rows."""
        first = texts[0].kept
        tables = Tables(texts, like=first)
        self._alone = tables.alone
        told = torch.tensor(tables.rows + tables.tiles).to(first.keys.device, non_blocking=True)
        self._in_place = RowsInPlace(
            kernels,
            like=first,
            rows=told[: len(tables.rows)],
            tiles=told[len(tables.rows) :],
            tile_rows=tables.tile_rows,
            longest=tables.longest,
        )

    def keep(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Keep a layer's new keys and values: (G, T, D)."""
        self._in_place.keep(layer, keys, values)

    def attend(self, layer: int, queries: Tensor, *, how: Attention) -> Tensor:
        """Attend to what is kept of a layer: (H, T, D) from the same."""
        seen = self._in_place.attend(layer, queries, how=how)
        for text, start in self._alone:
            own = text.attend(layer, queries.narrow(1, start, text.count), how=how)
            seen.narrow(0, start, text.count).copy_(own.transpose(0, 1))
        return seen.transpose(0, 1)


def splits_of(programs: int, *, longest: int) -> int:
    """Return into how many parts to divide sequences, so that a device is busy.

    Args:
        programs: How many programs attend to whole sequences.
        longest: The length of the longest one.
    """
    return max(1, min(_PROGRAMS // max(1, programs), longest // _LEAST_PART, _MOST_SPLITS))


class Kernels(Protocol):
    """The module `in_place_kernels`."""

    def keep(
        self,
        keys: Tensor,
        values: Tensor,
        *,
        layer: int,
        table: Tensor,
        like: tuple[Tensor, Tensor],
    ) -> None:
        """Write a layer's new keys and values."""

    def attend(
        self,
        queries: Tensor,
        *,
        layer: int,
        table: Tensor,
        like: tuple[Tensor, Tensor],
        kv_heads: int,
        rows: int,
        splits: int,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Attend to all tokens up to each row's own: (T, H, D) from (H, T, D)."""


@lru_cache
def in_place_kernels(
    device: torch.device,
    dtype: torch.dtype,
    *,
    kv_heads: int,
    group: int,
    key_width: int,
    value_width: int,
) -> Kernels | None:
    """Return the kernels, if they work for such keys and values; else None.

    A tile has the rows of all query heads of a group, so large groups of wide heads may take more
    of a multiprocessor's memory than it has: then the kernels fail when they are launched.

    Args:
        device: The device.
        dtype: Of queries, keys and values.
        kv_heads: G.
        group: How many query heads each of them has.
        key_width: The width of keys and queries.
        value_width: The width of values.

    Cost: the first call compiles them, in some seconds, and compares them with torch's.
    """
    if device.type != "cuda":
        return None
    try:
        from paceline_engine.torch_backend import in_place_kernels

        kernels = cast("Kernels", in_place_kernels)
        slabs = Slabs(KeyValueShape(1, kv_heads, key_width, value_width, dtype, device))
        texts = [_random_text(KeyValues(slabs, reserve_length=2048), n) for n in (70, 1500)]
        for counts in ((1, 1), (3, 16)):
            rows = [TextRows(text, count) for text, count in zip(texts, counts, strict=True)]
            off = _difference(rows, kernels, group=group)
            if not off < torch.finfo(dtype).eps * 16:
                _log.warning("sequences are attended one by one: the kernels are off by %g", off)
                return None
    except Exception as error:  # noqa: BLE001 - Triton needs a C compiler, and may break anywhere
        _log.warning("sequences are attended one by one, which is slower: %s", first_line(error))
        return None
    return kernels


def _random_text(text: KeyValues, length: int) -> KeyValues:
    text.make_room(length + FEW_ROWS)
    generator = torch.Generator(text.keys.device).manual_seed(length)
    for each in (text.keys, text.values):
        each.normal_(generator=generator)
    text.extend(array("I", range(length)))
    return text


def _difference(rows: Sequence[TextRows], kernels: Kernels, *, group: int) -> float:
    """Return by how much what the kernels compute differs from what torch does."""
    first = rows[0].kept.keys
    how = Attention(scale=first.shape[-1] ** -0.5)
    count = sum(text.count for text in rows)
    generator = torch.Generator(first.device).manual_seed(1)
    queries = first.new_empty(group * first.shape[2], count, first.shape[-1])
    queries.normal_(generator=generator)
    seen = TextsInPlace(rows, kernels).attend(0, queries, how=how)
    own = torch.split(queries, [text.count for text in rows], 1)
    expected = [text.attend(0, each, how=how) for text, each in zip(rows, own, strict=True)]
    return float((seen - torch.cat(expected, 1)).abs().max())
