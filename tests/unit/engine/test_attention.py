"""Rows of many texts in one forward: each sees its own text, and nothing of the others'."""

from __future__ import annotations

import random
from array import array

import pytest
import torch

from paceline_engine.torch_backend.attention import SideBySide
from paceline_engine.torch_backend.attention_kernels import Attention
from paceline_engine.torch_backend.key_values import KeyValues
from paceline_engine.torch_backend.kv_arena import KeyValueShape, Slabs
from paceline_engine.torch_backend.shared_rows import SharedRows

HEADS, KV_HEADS, WIDTH, LAYERS = 4, 2, 8, 2
SHAPE = KeyValueShape(LAYERS, KV_HEADS, WIDTH, WIDTH, torch.float32, torch.device("cpu"))
PLAIN = Attention(scale=0.3)
HOWS = {
    "plain": PLAIN,
    "a window": Attention(scale=0.3, window=5),
    "a soft cap": Attention(scale=2.0, soft_cap=1.5),
    "sinks": Attention(scale=0.3, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "all": Attention(scale=0.3, window=3, soft_cap=2.0, sinks=torch.zeros(HEADS)),
}


def by_definition(queries, keys, values, *, position: int, how: Attention):
    """What one row sees, head by head: (H, D)."""
    first = 0 if how.window is None else max(0, position + 1 - how.window)
    seen = slice(first, position + 1)
    rows = []
    for head, query in enumerate(queries):
        group = head // (HEADS // KV_HEADS)
        products = keys[group, seen] @ query * how.scale
        if how.soft_cap is not None:
            products = how.soft_cap * torch.tanh(products / how.soft_cap)
        if how.sinks is not None:
            products = torch.cat((products, how.sinks[head : head + 1]))
        weights = products.softmax(-1)[: position + 1 - first]
        rows.append(weights @ values[group, seen])
    return torch.stack(rows)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
def test_each_row_sees_what_is_before_it_in_its_text(how, together):
    chance, generator = random.Random(7), torch.Generator().manual_seed(7)

    def states(heads, count):
        return torch.randn(heads, count, WIDTH, generator=generator)

    slabs = Slabs(SHAPE)
    texts = [KeyValues(slabs, reserve_length=100) for _ in range(5)]
    whole = [[(states(KV_HEADS, 0), states(KV_HEADS, 0))] * LAYERS for _ in texts]
    for text in texts:
        text.make_room(1)
    shared_count = 0
    for _ in range(12):
        chosen = sorted(chance.sample(range(len(texts)), chance.randint(1, len(texts))))
        counts = [chance.choice([1, 1, 1, 2, 3, 9]) for _ in chosen]
        own = [texts[index] for index in chosen]
        for text, count in zip(own, counts, strict=True):
            text.make_room(count)
        parts = [array("I", range(count)) for count in counts]
        rows = SharedRows(own, parts, counts, together=together)
        shared_count += any(isinstance(part, SideBySide) for part in rows._parts)
        for layer in range(LAYERS):
            queries, keys, values = (states(n, sum(counts)) for n in (HEADS, KV_HEADS, KV_HEADS))
            actual = rows.attend(layer, queries, keys=keys, values=values, how=how)
            assert actual.shape == queries.shape
            row = 0
            for index, count in zip(chosen, counts, strict=True):
                kept = whole[index][layer]
                whole[index] = list(whole[index])
                whole[index][layer] = kept = tuple(
                    torch.cat((old, new[:, row : row + count]), 1)
                    for old, new in zip(kept, (keys, values), strict=True)
                )
                for place in range(count):
                    position = texts[index].length + place
                    expected = by_definition(queries[:, row], *kept, position=position, how=how)
                    assert torch.allclose(actual[:, row], expected, atol=1e-5)
                    row += 1
        for text, part in zip(own, parts, strict=True):
            text.extend(part)
    assert shared_count > 2


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
def test_a_trees_row_sees_the_text_and_its_ancestors(how, together):
    """As if the path to it were the text; also where the tree has come in several forwards."""
    chance, generator = random.Random(8), torch.Generator().manual_seed(8)

    def states(heads, count):
        return torch.randn(heads, count, WIDTH, generator=generator)

    for held in (0, 3, 9):
        slabs = Slabs(SHAPE)
        texts = [KeyValues(slabs, reserve_length=100) for _ in range(3)]
        columns = [[] for _ in texts]  # of each row its keys and values
        for step, counts in enumerate(([held + 1, held + 2, 4], [5, 1, 2], [1, 6, 3], [4, 4, 4])):
            # The last text is a chain beside the trees.
            own_parents = [
                [chance.randint(0, len(text.tree) + n) for n in range(count - (step == 0))]
                for text, count in zip(texts[:2], counts, strict=False)
            ]
            parents = [own if step else own[len(own) :] for own in own_parents] + [()]
            for text, count in zip(texts, counts, strict=True):
                text.make_room(count)
            parts = [array("I", range(count)) for count in counts]
            rows = SharedRows(texts, parts, counts, parents=parents, together=together)
            assert len(rows._parts) == (1 if step == 3 else 3)
            queries, keys, values = (states(n, sum(counts)) for n in (HEADS, KV_HEADS, KV_HEADS))
            actual = rows.attend(1, queries, keys=keys, values=values, how=how)
            row = 0
            for text, part, own, seen in zip(texts, parts, parents, columns, strict=True):
                seen.extend((keys[:, row + n], values[:, row + n]) for n in range(len(part)))
                text.extend(part, own)
                first = text.row_count - len(part)
                for place in range(first, text.row_count):
                    path = list(range(min(place + 1, text.length)))
                    if place >= text.length:
                        up = [*text.tree.ancestors(place - text.length)]
                        path += [text.length + each for each in reversed(up)]
                    position = len(path) - 1
                    assert int(rows.positions[row]) == position
                    kept = (torch.stack([seen[n][k] for n in path], 1) for k in range(2))
                    expected = by_definition(queries[:, row], *kept, position=position, how=how)
                    assert torch.allclose(actual[:, row], expected, atol=1e-5)
                    row += 1


def test_rows_say_where_they_are_and_which_are_scored():
    texts = [KeyValues(Slabs(SHAPE), reserve_length=100) for _ in range(3)]
    for text, length in zip(texts, (0, 4, 7), strict=True):
        text.make_room(20)
        text.extend(array("I", range(length)))
    rows = SharedRows(texts, [[5, 6, 7], [8], [9, 10]], [1, 0, 2])
    assert rows.token_ids.tolist() == [5, 6, 7, 8, 9, 10]
    assert rows.positions.tolist() == [0, 1, 2, 4, 7, 8]
    assert rows.longest == 9
    assert torch.arange(6)[rows.scored].tolist() == [2, 4, 5]
    assert torch.arange(3)[SharedRows(texts[:1], [[5, 6, 7]], [0]).scored].tolist() == []


def test_a_forward_that_is_not_over_has_changed_nothing():
    text = KeyValues(Slabs(SHAPE), reserve_length=100)
    new = torch.ones(KV_HEADS, 3, WIDTH)
    for part in ([1, 2, 3], [4, 5, 6]):
        text.make_room(3)
        rows = SharedRows([text], [part], [3])
        rows.attend(0, torch.ones(HEADS, 3, WIDTH), keys=new * part[0], values=new, how=PLAIN)
        text.extend(array("I", part[:2]))
    assert text.token_ids.tolist() == [1, 2, 4, 5]
    assert text.until(4)[0][0][0, 0, :, 0].tolist() == [1, 1, 4, 4]


def test_of_a_tree_the_path_that_the_next_prefix_takes_is_moved_to_the_texts_end():
    text = KeyValues(Slabs(SHAPE), reserve_length=100)
    text.make_room(7)
    text.keys[:] = torch.arange(text.capacity)[:, None]
    text.values[:] = torch.arange(text.capacity)[:, None] + 100
    text.extend(array("I", [1, 2, 30, 31, 32, 33, 34]), (0, 0, 1, 2, 4))
    assert (text.length, text.row_count) == (2, 7)
    assert text.missing_length(array("I", [1, 2, 31, 33, 34, 9])) == 1
    for other in ([1, 3, 31, 33, 34, 9], [2, 2, 31, 33], [1], [1, 2], [1, 2, 33]):
        common = 0 if other[0] == 2 else 1 if other[1:2] != [2] else 2
        left = len(other) - min(common, len(other) - 1)
        assert text.missing_length(array("I", other)) == left
    assert text.keep(array("I", [1, 2, 31, 33, 34, 9])) == 5
    assert (text.token_ids.tolist(), len(text.tree)) == ([1, 2, 31, 33, 34], 0)
    keys, values = text.until(5)
    assert keys[1][0, 1, :, 3].tolist() == [0, 1, 3, 5, 6]
    assert values[0][0, 0, :, 0].tolist() == [100, 101, 103, 105, 106]


def test_buffers_that_grow_keep_a_tree():
    text = KeyValues(Slabs(SHAPE), reserve_length=100)
    text.make_room(40)
    text.keys[:] = torch.arange(text.capacity)[:, None]
    text.extend(array("I", range(40)), [0] * 30)
    text.make_room(60)
    assert text.keys[1, 0, 1, :40, 3].tolist() == list(range(40))


def test_buffers_grow_to_what_is_reserved_and_beyond_only_if_they_must():
    text, capacities = KeyValues(Slabs(SHAPE), reserve_length=100), []
    for count in (2, 40, 30, 28, 20):
        text.make_room(count)
        text.extend(array("I", [0] * count))
        capacities.append(text.capacity)
    assert capacities == [64, 64, 100, 100, 120]


def test_buffers_follow_a_reservation_that_grows_and_keep_what_is_in_them():
    text = KeyValues(Slabs(SHAPE), reserve_length=70)
    text.make_room(70)
    text.extend(array("I", range(70)))
    text.keys[:] = torch.arange(70)[:, None]
    text.reserve(500)
    text.make_room(1)
    assert text.capacity == 142
    assert text.until(70)[0][1][0, 1, :, 3].tolist() == list(range(70))


def test_a_text_that_is_cleared_gives_its_memory_back():
    text = KeyValues(Slabs(SHAPE), reserve_length=70)
    text.make_room(70)
    assert text.byte_count == 70 * SHAPE.bytes_per_token
    text.clear()
    assert (text.length, text.byte_count) == (0, 0)
