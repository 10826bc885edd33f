"""Where texts lie: short ones side by side, with zeros beyond each, and gone with the last."""

from __future__ import annotations

import math
import weakref
from array import array

import pytest
import torch

from paceline_engine.torch_backend import kv_arena as module
from paceline_engine.torch_backend.attention import SideBySide, TextRows
from paceline_engine.torch_backend.attention_kernels import Attention
from paceline_engine.torch_backend.key_values import KeyValues
from paceline_engine.torch_backend.kv_arena import KeyValueShape, Slabs
from paceline_engine.torch_backend.shared_rows import SharedRows
from support.native_memory import resident_bytes

HEADS, WIDTH, LAYERS = 2, 4, 3
SHAPE = KeyValueShape(LAYERS, HEADS, WIDTH, WIDTH, torch.float32, torch.device("cpu"))
PLAIN = Attention(scale=0.5)


def text_of(slabs: Slabs, length: int, *, reserve: int = 1 << 20) -> KeyValues:
    text = KeyValues(slabs, reserve_length=reserve)
    text.make_room(length)
    text.extend(array("I", range(length)))
    return text


def states(*shape: int, value: float | None = None):
    return torch.randn(*shape) if value is None else torch.full(shape, value)


def attend(rows, layer, count, *, value):
    queries, keys, values = (states(HEADS, count, WIDTH, value=value) for _ in range(3))
    return rows.attend(layer, queries, keys=keys, values=values, how=PLAIN)


def forward(texts, counts, *, value=None):
    """One row or more of each text; what it gave, and in which parts it was computed."""
    for text, count in zip(texts, counts, strict=True):
        text.make_room(count)
    rows = SharedRows(texts, [range(count) for count in counts], counts)
    total = sum(counts)
    seen = [attend(rows, layer, total, value=value) for layer in range(LAYERS)]
    for text, count in zip(texts, counts, strict=True):
        text.extend(array("I", range(count)))
    return seen, rows._parts


def test_short_texts_lie_side_by_side_each_with_room_for_as_much():
    slabs = Slabs(SHAPE)
    texts = [text_of(slabs, length) for length in (5, 30, 31, 9, 40)]
    assert [text.capacity for text in texts] == [64, 64, 64, 64, 80]
    *short, longer = (text.place for text in texts)
    assert [place.address for place in short] == [(short[0].slab.number, n) for n in range(4)]
    assert (longer.slab.length, longer.index) == (128, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_that_no_text_has_come_to_is_not_taken(dtype):
    """What a place has room for beyond its text is in no budget."""
    shape = KeyValueShape(16, 8, 128, 128, dtype, torch.device("cpu"))
    text = KeyValues(Slabs(shape), reserve_length=513)
    text.make_room(300)
    assert text.place is not None
    place_bytes = text.place.slab.length * shape.bytes_per_token
    assert resident_bytes(text.keys) + resident_bytes(text.values) < place_bytes / 8
    for each in (text.keys, text.values):
        assert each.data_ptr() % 64 == 0
        assert not each.any()


def test_a_text_takes_memory_for_its_own_place_and_not_for_its_slab():
    """Also where pages are large: NumPy asks for pages of 2 MiB, which are zeroed when touched."""
    shape = KeyValueShape(16, 4, 64, 64, torch.float32, torch.device("cpu"))
    text = KeyValues(Slabs(shape), reserve_length=64)
    text.make_room(64)
    for layer in range(shape.layers):
        TextRows(text, 64).keep(layer, *(torch.ones(4, 64, 64) for _ in range(2)))
    assert text.place is not None
    slab_bytes = text.place.slab.keys.nbytes + text.place.slab.values.nbytes
    assert slab_bytes >= 100 << 20
    place_bytes = 2 * 16 * 4 * 64 * 64 * 4
    assert place_bytes <= resident_bytes(text.keys) + resident_bytes(text.values) < 20 << 20


def test_texts_side_by_side_with_as_many_rows_are_one_part_of_a_forward():
    slabs = Slabs(SHAPE)
    texts = [text_of(slabs, length) for length in (5, 9, 3, 20, 8, 7)]
    _, parts = forward(texts, [1, 1, 1, 4, 4, 1])
    assert [type(part) is SideBySide for part in parts] == [True, True, False]
    assert [part.count for part in parts] == [3, 8, 1]
    _, parts = forward([texts[0], texts[2], texts[3]], [1, 1, 1])
    assert [part.count for part in parts] == [1, 2]


def test_texts_side_by_side_keep_each_its_own_rows_in_every_layer_and_head():
    slabs = Slabs(SHAPE)
    texts = [text_of(slabs, length) for length in (5, 9, 3)]
    starts = [text.row_count for text in texts]
    for text in texts:
        text.make_room(2)
    rows = SharedRows(texts, [range(2)] * 3, [2] * 3)
    new = [[states(HEADS, 6, WIDTH) for _ in range(2)] for _ in range(LAYERS)]
    for layer, (keys, values) in enumerate(new):
        rows.attend(layer, states(HEADS, 6, WIDTH), keys=keys, values=values, how=PLAIN)
    assert [type(part) for part in rows._parts] == [SideBySide]
    for index, (text, start) in enumerate(zip(texts, starts, strict=True)):
        for kind, kept in enumerate(text.between(start, 2)):
            for layer in range(LAYERS):
                own = new[layer][kind][:, 2 * index : 2 * index + 2]
                assert torch.equal(kept[layer], own)


def test_a_place_is_free_when_nobody_holds_it():
    slabs = Slabs(SHAPE)
    texts = [text_of(slabs, 5) for _ in range(4)]
    del texts[1]
    texts[2].clear()
    assert [text_of(slabs, 5).place.index for _ in range(2)] == [1, 1]
    kept = [text_of(slabs, 5) for _ in range(3)]
    assert [text.place.index for text in kept] == [1, 3, 4]


def test_a_slab_is_gone_with_the_last_of_its_places():
    slabs = Slabs(SHAPE)
    texts = [text_of(slabs, 5) for _ in range(3)]
    slab = weakref.ref(texts[0].place.slab)
    del texts[:2]
    assert slab() is not None
    texts[0].make_room(100)
    assert slab() is None
    assert texts[0].place.slab.length == 256


def test_a_full_slab_is_followed_by_another_one(monkeypatch):
    monkeypatch.setattr(module, "_SLAB_BYTES", 2 * 64 * SHAPE.bytes_per_token)
    slabs = Slabs(SHAPE)
    texts = [text_of(slabs, 5) for _ in range(5)]
    first = texts[0].place.slab.number
    assert [text.place.address for text in texts] == [
        (first + n // 2, n % 2) for n in range(5)
    ]  # fmt: skip
    _, parts = forward(texts, [1] * 5)
    assert [part.count for part in parts] == [2, 2, 1]


def test_long_texts_have_slabs_of_their_own():
    slabs = Slabs(SHAPE)
    for _ in range(2):
        place = slabs.place(1025)
        assert (place.index, place.slab.length) == (0, 1025)
        assert place.slab.keys.shape == (1, LAYERS, HEADS, 1025, WIDTH)


def test_what_a_text_left_behind_is_not_seen_by_the_next_one_there():
    slabs = Slabs(SHAPE)
    texts = [text_of(slabs, 1) for _ in range(2)]
    forward(texts, [40, 40], value=math.nan)
    beside = text_of(slabs, 1)
    del texts[:]
    texts = [text_of(slabs, 1), text_of(slabs, 1), beside]
    assert [text.place.index for text in texts] == [0, 1, 2]
    forward(texts[1:2], [30], value=1.0)
    seen, parts = forward(texts, [1, 1, 1], value=1.0)
    assert len(parts) == 1
    assert all(layer.isfinite().all() for layer in seen)


@pytest.mark.parametrize("fails", [False, True])
def test_what_was_taken_back_is_not_seen_beside_a_longer_text(fails):
    slabs = Slabs(SHAPE)
    short, longer = text_of(slabs, 3), text_of(slabs, 30)
    prefix = short.token_ids
    short.make_room(9)
    rows = SharedRows([short], [range(9)], [9])
    for layer in range(LAYERS):
        attend(rows, layer, 9, value=math.nan)
    if fails:
        short.settle()
    else:
        short.extend(array("I", range(9)))
        short.keep(prefix)
    seen, parts = forward([short, longer], [1, 1], value=1.0)
    assert len(parts) == 1
    assert all(layer.isfinite().all() for layer in seen)


def test_a_text_that_moves_takes_its_rows_along():
    slabs = Slabs(SHAPE)
    beside, text = text_of(slabs, 5), text_of(slabs, 40)
    text.keys[:] = torch.arange(text.capacity)[:, None]
    text.values[:] = torch.arange(text.capacity)[:, None] + 0.5
    place = text.place
    text.make_room(80)
    assert text.place is not place
    keys, values = text.until(40)
    assert keys[2][0, 1, :, 3].tolist() == [*range(40)]
    assert values[0][0, 0, :, 0].tolist() == [n + 0.5 for n in range(40)]
    assert beside.place.index == 0


def test_a_text_that_may_have_more_stays_where_there_is_room():
    slabs = Slabs(SHAPE)
    text = text_of(slabs, 40, reserve=70)
    place = text.place
    assert text.capacity == 70
    text.reserve(128)
    text.make_room(60)
    assert (text.place, text.capacity) == (place, 128)
