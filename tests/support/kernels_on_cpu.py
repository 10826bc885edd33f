"""What the kernels of `in_place_kernels.py` do, step by step on a CPU, from the same tables."""

from __future__ import annotations

import ctypes
import math

import numpy as np
import torch
from torch import Tensor


def keep(keys, values, *, layer, table, like) -> None:
    for new, all_of_it, first in ((keys, like[0], 0), (values, like[1], 3)):
        heads, _, width = new.shape
        for row, entry in enumerate(table.tolist()):
            for head in range(heads):
                place = entry[first] + entry[first + 1] * layer + entry[first + 2] * head
                _at(all_of_it, place, width).copy_(new[head, row])


def attend(queries, *, layer, table, like, kv_heads, rows, splits, scale, window) -> Tensor:
    heads, count, _ = queries.shape
    seen = queries.new_full((count, heads, like[1].shape[-1]), math.nan)
    group = heads // kv_heads
    assert splits >= 1
    for tile in table.tolist():
        first, row_count, start = tile[6:]
        assert row_count <= rows
        for kv_head in range(kv_heads if row_count else 0):
            keys, values = (
                _at(
                    all_of_it,
                    place + layer_step * layer + head_step * kv_head,
                    (start + row_count) * all_of_it.shape[-1],
                ).view(-1, all_of_it.shape[-1])
                for all_of_it, (place, layer_step, head_step) in (
                    (like[0], tile[:3]),
                    (like[1], tile[3:6]),
                )
            )
            for row in range(row_count):
                end = start + row + 1
                begin = 0 if window is None else max(0, end - window)
                own = queries[kv_head * group : (kv_head + 1) * group, first + row]
                weights = (own @ keys[begin:end].T * scale).softmax(-1)
                seen[first + row, kv_head * group : (kv_head + 1) * group] = (
                    weights @ values[begin:end]
                )
    return seen


def _at(like: Tensor, place: int, count: int) -> Tensor:
    """The numbers at a place, counted from a tensor's."""
    assert like.dtype == torch.float32
    address = like.data_ptr() + place * like.itemsize
    memory = (ctypes.c_float * count).from_address(address)
    return torch.from_numpy(np.ctypeslib.as_array(memory))
