"""Triton kernels for rows of many sequences whose keys and values lie in buffers of their own.

See `in_place.py`, which builds their tables.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 64
_LOG2_E = 1.4426950408889634


def keep(
    keys: Tensor,
    values: Tensor,
    *,
    layer: int,
    table: Tensor,
    like: tuple[Tensor, Tensor],
) -> None:
    """Write a layer's new keys and values, (G, T, D) each, where the table says.

    Args:
        layer: The number of the layer.
        table: (T, 6) int64: where the first layer's and head's key lies, and the value; the steps
            to the next layer and to the next head of each. In numbers, from the start of `like`.
        like: Keys, and values, of any sequence.
    """
    heads, rows, width = keys.shape
    _keep[(rows, heads)](
        like[0],
        like[1],
        table,
        layer,
        keys,
        values,
        keys.stride(0),
        keys.stride(1),
        values.stride(0),
        values.stride(1),
        WIDTH=width,
        VALUE_WIDTH=values.shape[-1],
        MOST_WIDTH=triton.next_power_of_2(max(width, values.shape[-1])),
    )


@triton.jit(do_not_specialize=["layer"])  # type: ignore[untyped-decorator]
def _keep(  # type: ignore[no-untyped-def]
    all_keys,
    all_values,
    table,
    layer,
    keys,
    values,
    keys_head,
    keys_row,
    values_head,
    values_row,
    WIDTH: tl.constexpr,  # noqa: N803
    VALUE_WIDTH: tl.constexpr,  # noqa: N803
    MOST_WIDTH: tl.constexpr,  # noqa: N803
):
    row, head = tl.program_id(0), tl.program_id(1)
    entry = table + row * 6
    column = tl.arange(0, MOST_WIDTH)
    key_place = tl.load(entry) + tl.load(entry + 1) * layer + tl.load(entry + 2) * head
    value_place = tl.load(entry + 3) + tl.load(entry + 4) * layer + tl.load(entry + 5) * head
    key = tl.load(keys + head * keys_head + row * keys_row + column, mask=column < WIDTH)
    tl.store(all_keys + key_place + column, key, mask=column < WIDTH)
    value = tl.load(
        values + head * values_head + row * values_row + column, mask=column < VALUE_WIDTH
    )
    tl.store(all_values + value_place + column, value, mask=column < VALUE_WIDTH)


def attend(
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
    """Attend to all tokens up to each row's own, in the order of tiles: (T, H, D) from (H, T, D).

    A tile is one or several rows of a sequence that follow one another.

    Args:
        table: (tiles, 9) int64: where the first layer's and head's first key lies, the steps to the
            next layer and head; the same of values; the tile's first row among the queries, how
            many rows it has, and the position of the first.
        like: As `keep` takes them.
        kv_heads: G.
        rows: The most rows of a tile: a power of two. Each number compiles kernels of its own.
        splits: Into how many parts each sequence is divided.
        scale: The factor of the products.
        window: How many tokens a row sees, itself included; None: all before it.
    """
    heads, count, width = queries.shape
    value_width = like[1].shape[-1]
    group = heads // kv_heads
    tile_rows = max(16, rows * triton.next_power_of_2(group))
    seen = queries.new_empty((count, heads, value_width))
    parts, weights = seen, seen
    if splits > 1:
        # Of tiles' rows, and not of all: a part of a prompt beside them has thousands.
        places = (splits, len(table) * rows, heads)
        parts = queries.new_empty((*places, value_width), dtype=torch.float32)
        weights = queries.new_empty(places, dtype=torch.float32)
    _attend[(len(table), kv_heads, splits)](
        seen,
        parts,
        weights,
        like[0],
        like[1],
        table,
        layer,
        queries,
        queries.stride(0),
        queries.stride(1),
        len(table) * rows,
        scale * _LOG2_E,
        -1 if window is None else window,
        splits,
        TILE=rows,
        GROUP=group,
        KV_HEADS=kv_heads,
        ROWS=tile_rows,
        WIDTH=width,
        VALUE_WIDTH=value_width,
        MOST_WIDTH=triton.next_power_of_2(max(width, 16)),
        MOST_VALUE_WIDTH=triton.next_power_of_2(max(value_width, 16)),
        BLOCK=_BLOCK,
        IS_SPLIT=splits > 1,
        HAS_WINDOW=window is not None,
        PRECISION="ieee" if queries.dtype == torch.float32 else "tf32",
        num_warps=8 if tile_rows > 64 else 4,
    )
    if splits > 1:
        _combine[(len(table) * rows, heads)](
            seen,
            parts,
            weights,
            table,
            len(table) * rows,
            heads,
            splits,
            TILE=rows,
            VALUE_WIDTH=value_width,
            MOST_VALUE_WIDTH=triton.next_power_of_2(value_width),
        )
    return seen


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["layer", "tile_row_count", "window", "splits"]
)
def _attend(  # type: ignore[no-untyped-def]
    seen,
    parts,
    weights,
    all_keys,
    all_values,
    table,
    layer,
    queries,
    queries_head,
    queries_row,
    tile_row_count,
    scale,
    window,
    splits,
    TILE: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    KV_HEADS: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    VALUE_WIDTH: tl.constexpr,  # noqa: N803
    MOST_WIDTH: tl.constexpr,  # noqa: N803
    MOST_VALUE_WIDTH: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    IS_SPLIT: tl.constexpr,  # noqa: N803
    HAS_WINDOW: tl.constexpr,  # noqa: N803
    PRECISION: tl.constexpr,  # noqa: N803
):
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    entry = table + tile * 9
    key_place = tl.load(entry) + tl.load(entry + 1) * layer + tl.load(entry + 2) * kv_head
    value_place = tl.load(entry + 3) + tl.load(entry + 4) * layer + tl.load(entry + 5) * kv_head
    # So that a thread loads 16 bytes at once.
    if WIDTH % 16 == 0:
        key_place = tl.multiple_of(key_place, 16)
    if VALUE_WIDTH % 16 == 0:
        value_place = tl.multiple_of(value_place, 16)
    first_row, row_count, start = tl.load(entry + 6), tl.load(entry + 7), tl.load(entry + 8)

    # The heads of a group lie one below the other, as rows of the tile.
    index = tl.arange(0, ROWS)
    row, head = index // GROUP, index % GROUP
    is_row = row < row_count
    position = start + row
    heads = KV_HEADS * GROUP
    query_head = kv_head * GROUP + head
    column = tl.arange(0, MOST_WIDTH)
    value_column = tl.arange(0, MOST_VALUE_WIDTH)
    query = tl.load(
        queries
        + query_head[:, None] * queries_head
        + (first_row + row)[:, None] * queries_row
        + column[None, :],
        mask=is_row[:, None] & (column < WIDTH)[None, :],
        other=0.0,
    )

    length = start + row_count
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(start + 1 - window, 0) // BLOCK * BLOCK
    blocks = tl.cdiv(length - first, BLOCK)
    own = tl.cdiv(blocks, splits) * BLOCK
    begin = first + split * own
    end = tl.minimum(begin + own, length)

    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, MOST_VALUE_WIDTH], tl.float32)
    for block in range(begin, end, BLOCK):
        token = block + tl.arange(0, BLOCK)
        is_there = token < end
        key = tl.load(
            all_keys + key_place + (token * WIDTH)[None, :] + column[:, None],
            mask=is_there[None, :] & (column < WIDTH)[:, None],
            other=0.0,
        )
        products = tl.dot(query, key, input_precision=PRECISION) * scale
        is_seen = is_there[None, :] & (token[None, :] <= position[:, None])
        if HAS_WINDOW:
            is_seen &= token[None, :] > position[:, None] - window
        products = tl.where(is_seen, products, float("-inf"))
        larger = tl.maximum(largest, tl.max(products, 1))
        # A row that has seen nothing so far has no largest number to take away.
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        weight = tl.exp2(products - shift[:, None])
        kept = tl.exp2(largest - shift)
        total = total * kept + tl.sum(weight, 1)
        value = tl.load(
            all_values + value_place + (token * VALUE_WIDTH)[:, None] + value_column[None, :],
            mask=is_there[:, None] & (value_column < VALUE_WIDTH)[None, :],
            other=0.0,
        )
        sums = sums * kept[:, None] + tl.dot(
            weight.to(value.dtype), value, input_precision=PRECISION
        )
        largest = larger

    safe = tl.where(total == 0.0, 1.0, total)
    result = sums / safe[:, None]
    is_kept = is_row[:, None] & (value_column < VALUE_WIDTH)[None, :]
    if IS_SPLIT:
        place = (split * tile_row_count + tile * TILE + row) * heads + query_head
        tl.store(parts + place[:, None] * VALUE_WIDTH + value_column[None, :], result, mask=is_kept)
        tl.store(weights + place, largest + tl.log2(total), mask=is_row)
    else:
        place = (first_row + row) * heads + query_head
        tl.store(
            seen + place[:, None] * VALUE_WIDTH + value_column[None, :],
            result.to(seen.dtype.element_ty),
            mask=is_kept,
        )


@triton.jit(do_not_specialize=["tile_row_count", "splits"])  # type: ignore[untyped-decorator]
def _combine(  # type: ignore[no-untyped-def]
    seen,
    parts,
    weights,
    table,
    tile_row_count,
    heads,
    splits,
    TILE: tl.constexpr,  # noqa: N803
    VALUE_WIDTH: tl.constexpr,  # noqa: N803
    MOST_VALUE_WIDTH: tl.constexpr,  # noqa: N803
):
    tile_row, head = tl.program_id(0), tl.program_id(1)
    entry, row = table + tile_row // TILE * 9, tile_row % TILE
    # A tile may have fewer rows; nothing was computed for the others.
    is_row = row < tl.load(entry + 7)
    place = tile_row * heads + head
    column = tl.arange(0, MOST_VALUE_WIDTH)
    is_there = column < VALUE_WIDTH
    largest = tl.load(weights + place)
    for split in range(1, splits):
        largest = tl.maximum(largest, tl.load(weights + split * tile_row_count * heads + place))
    total = tl.full([], 0.0, tl.float32)
    sums = tl.zeros([MOST_VALUE_WIDTH], tl.float32)
    for split in range(splits):
        own = split * tile_row_count * heads + place
        weight = tl.exp2(tl.load(weights + own) - largest)
        sums += weight * tl.load(parts + own * VALUE_WIDTH + column, mask=is_there, other=0.0)
        total += weight
    tl.store(
        seen + ((tl.load(entry + 6) + row) * heads + head) * VALUE_WIDTH + column,
        (sums / total).to(seen.dtype.element_ty),
        mask=is_there & is_row,
    )
