"""Compiled code attends as torch does, to keys and values where they lie."""

from __future__ import annotations

import ctypes
import mmap
from array import array
from dataclasses import dataclass
from functools import cache

import pytest
import torch

from paceline_engine.torch_backend import attention_tables, compiled_steps
from paceline_engine.torch_backend.attention_kernels import Attention
from paceline_engine.torch_backend.attention_tables import MOST_ATTENDED, AttentionLayer
from paceline_engine.torch_backend.compiled_attention import agreeing_counts, can_attend
from paceline_engine.torch_backend.compiled_steps import (
    Steps,
    compile_steps,
)
from paceline_engine.torch_backend.invariant import TILE, InvariantRows
from paceline_engine.torch_backend.key_values import KeyValues
from paceline_engine.torch_backend.kv_arena import KeyValueShape, Slabs
from paceline_engine.torch_backend.shared_rows import SharedRows
from unit.engine.test_compiled_steps import MKL_ADDS_ALIKE, AttendedByTorch, Computed

LAYERS = 3
# Both sides of a vector of 16 keys, of a tile, and of a split of 512 and its halves.
LENGTHS = (0, 1, 15, 16, 17, 62, 63, 64, 383, 384, 511, 512, 513, 1030)


@dataclass(frozen=True)
class Heads:
    group: int
    kv_heads: int
    width: int

    @property
    def heads(self):
        return self.group * self.kv_heads

    def texts(self, lengths, *, room=40):
        """Return sequences of so many tokens; nothing may be read behind them."""
        shape = KeyValueShape(
            LAYERS, self.kv_heads, self.width, self.width, torch.float32, torch.device("cpu")
        )
        slabs, generator = Slabs(shape), torch.Generator().manual_seed(1)
        texts = [KeyValues(slabs, reserve_length=length + room) for length in lengths]
        for text, length in zip(texts, lengths, strict=True):
            text.make_room(length + room)
            for each in (text.keys, text.values):
                each.normal_(generator=generator)
                each[..., length:, :] = torch.nan
            text.extend(array("I", range(length)))
        return texts

    def states(self, count):
        generator = torch.Generator().manual_seed(2)
        return torch.randn(self.heads + 2 * self.kv_heads, count, self.width, generator=generator)

    def attend(self, steps, rows, states, *, layer=1):
        how = AttentionLayer(
            layer, heads=self.heads, kv_heads=self.kv_heads, width=self.width, scale=self.scale
        )
        return steps.attend(states, rows.spans, how)

    @property
    def scale(self):
        return self.width**-0.5

    def attend_slowly(self, texts, counts, states, *, layer=1):
        """Attend in float64, row by row."""
        queries, keys, values = states.double().split([self.heads, self.kv_heads, self.kv_heads])
        seen, first = [], 0
        for text, count in zip(texts, counts, strict=True):
            own = slice(first, first + count)
            first += count
            kept = (each[layer, 0, :, : text.length].double() for each in (text.keys, text.values))
            all_keys, all_values = (
                torch.cat((old, new[:, own]), 1).repeat_interleave(self.group, 0)
                for old, new in zip(kept, (keys, values), strict=True)
            )
            for row in range(count):
                until = text.length + row + 1
                products = all_keys[:, :until] @ queries[:, own.start + row, :, None] * self.scale
                seen.append((products.softmax(1) * all_values[:, :until]).sum(1))
        return torch.stack(seen, 1)


@pytest.fixture(scope="module")
def agreed_counts(steps):
    """With how many rows of such heads the code has torch's bits, which one thread finds out."""
    return cache(
        lambda heads: agreeing_counts(
            steps, Attention(scale=heads.scale), group=heads.group, width=heads.width
        )
    )


HEADS = [Heads(3, 3, 64), Heads(1, 2, 32), Heads(4, 1, 128), Heads(7, 2, 96)]


@torch.inference_mode()
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("count", [1, 3, MOST_ATTENDED])
def test_a_row_sees_its_sequence_up_to_itself(heads, count, steps):
    for length in LENGTHS:
        texts, states = heads.texts([length]), heads.states(count)
        expected = heads.attend_slowly(texts, [count], states)
        rows = SharedRows(texts, [array("I", range(count))], [count])
        actual = heads.attend(steps, rows, states)
        torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=2e-6)


@torch.inference_mode()
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_sequences_side_by_side_do_not_see_each_other(heads, steps):
    lengths, counts = (70, 0, 3, 600), (2, 4, 1, 9)
    texts, states = heads.texts(lengths), heads.states(sum(counts))
    expected = heads.attend_slowly(texts, counts, states)
    rows = SharedRows(texts, [array("I", range(count)) for count in counts], counts)
    actual = heads.attend(steps, rows, states)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=2e-6)


@torch.inference_mode()
def test_with_threads_that_nobody_knows_one_thread_attends(steps, monkeypatch):
    monkeypatch.setattr(compiled_steps, "_OPENMP", ("no_function_of_this_name",))
    alone, heads = compile_steps(), Heads(3, 3, 64)
    assert alone.thread_count == 1
    found = []
    for each in (steps, alone):
        texts, states = heads.texts([70, 600]), heads.states(4)
        found.append(
            heads.attend(each, SharedRows(texts, [array("I", [1, 2])] * 2, [2, 2]), states)
        )
    assert torch.equal(*found)


@torch.inference_mode()
def test_new_keys_and_values_are_kept_and_nothing_else_is_written(steps):
    heads, lengths, counts = Heads(2, 3, 32), (20, 64), (3, 2)
    texts, states = heads.texts(lengths), heads.states(sum(counts))
    before = [(text.keys.clone(), text.values.clone()) for text in texts]
    rows = SharedRows(texts, [array("I", range(count)) for count in counts], counts)
    heads.attend(steps, rows, states, layer=2)
    first = 0
    for text, (keys, values), count in zip(texts, before, counts, strict=True):
        for kept, old, new in ((text.keys, keys, states[6:9]), (text.values, values, states[9:])):
            old[2, 0, :, text.length : text.length + count] = new[:, first : first + count]
            assert torch.equal(kept.nan_to_num(99), old.nan_to_num(99))
        first += count


@torch.inference_mode()
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_whole_tiles_have_the_bits_of_torchs_kernel(heads, steps, agreed_counts):
    """Also where rows are in two tiles, and sequences lie side by side in the same tile."""
    agreed, compared = agreed_counts(heads), 0
    for lengths, counts in (
        ((62,), (5,)),
        ((0,), (16,)),
        ((441, 70), (9, 3)),
        ((20, 30, 40), (1, 1, 1)),
        ((510,), (4,)),
        ((1000, 63), (1, 31)),
    ):
        found = []
        for by_torch in (False, True):
            texts, states = heads.texts(lengths, room=2 * TILE), heads.states(sum(counts) + 4)
            for text in texts:
                for each in (text.keys, text.values):
                    each.nan_to_num_(0)
            ids = [array("I", range(count)) for count in counts]
            rows = InvariantRows(texts, ids, counts)
            if not rows.spans.kernel_counts <= agreed:
                break
            states = states[:, : len(rows.token_ids)].contiguous()
            queries, keys, values = states.split([heads.heads, heads.kv_heads, heads.kv_heads])
            if by_torch:
                how = Attention(scale=heads.scale)
                found.append(rows.attend(1, queries, keys=keys, values=values, how=how))
            else:
                found.append(heads.attend(steps, rows, states))
        else:
            assert torch.equal(*found), (lengths, counts)
            compared += 1
    assert compared > 0 or not MKL_ADDS_ALIKE


@torch.inference_mode()
def test_rows_that_fill_a_forward_up_see_nothing(steps):
    heads = Heads(2, 2, 32)
    rows = InvariantRows(heads.texts([70]), [array("I", [1])], [1])
    seen = heads.attend(steps, rows, heads.states(len(rows.token_ids)))
    assert len(rows.token_ids) == 4
    assert seen[:, 0].all()
    assert not seen[:, 1:].any()


@torch.inference_mode()
@pytest.mark.parametrize("place", [0, 20, 69])
def test_what_is_no_number_stays_none(place, steps):
    heads = Heads(2, 2, 32)
    texts, states = heads.texts([70, 70]), heads.states(4)
    texts[0].keys[1, 0, 1, place, 3] = torch.nan
    rows = SharedRows(texts, [array("I", [1, 2])] * 2, [2, 2])
    seen = heads.attend(steps, rows, states)
    assert seen[2:, :2].isnan().all()
    assert not seen[:2].isnan().any()
    assert not seen[:, 2:].isnan().any()


@torch.inference_mode()
def test_nothing_is_read_behind_the_last_key(steps):
    """The process would end."""
    heads, page = Heads(1, 1, 32), mmap.PAGESIZE
    (text,), states = heads.texts([60], room=4), heads.states(1)
    kept, length = [], 61 * 32 * 4
    for name in ("keys", "values"):
        memory = mmap.mmap(-1, 3 * page)
        end = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + 2 * page
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(end), page, 0) == 0
        whole = torch.frombuffer(
            memory, dtype=torch.float32, offset=2 * page - length, count=length // 4
        )
        setattr(text, name, whole.view(1, 1, 1, 61, 32))
        kept.append(memory)
    seen = heads.attend(steps, SharedRows([text], [array("I", [1])], [1]), states, layer=0)
    assert seen.isfinite().all()


@pytest.mark.skipif(not MKL_ADDS_ALIKE, reason="MKL adds otherwise on this processor")
def test_torchs_order_is_known_for_usual_heads(steps):
    for group, width in ((1, 64), (8, 128)):
        found = agreeing_counts(steps, Attention(scale=width**-0.5), group=group, width=width)
        assert found >= {4, 8, 16, 32}, (group, width)


def test_a_bit_that_differs_leaves_so_many_rows_to_torch(steps, monkeypatch):
    how, own = Attention(scale=0.2), Steps.attend
    honest = agreeing_counts(steps, how, group=2, width=32)

    def off(self, states, spans, layer):
        seen = own(self, states, spans, layer)
        if states.shape[1] == 8:
            seen[-1, -1, -1] = seen[-1, -1, -1].nextafter(torch.tensor(torch.inf))
        return seen

    monkeypatch.setattr(Steps, "attend", off)
    assert agreeing_counts(steps, how, group=2, width=32) == honest - {8}


@pytest.mark.parametrize(
    ("how", "width"),
    [
        (Attention(scale=1, window=100), 64),
        (Attention(scale=1, soft_cap=30.0), 64),
        (Attention(scale=1, sinks=torch.zeros(4)), 64),
        (Attention(scale=1), 288),
    ],
    ids=["a window", "a soft cap", "sinks", "wide heads"],
)
def test_what_the_code_does_not_compute_is_left_to_torch(how, width):
    assert can_attend(Attention(scale=1), width=256)
    assert not can_attend(how, width=width)


def rows_of(texts, counts, **options):
    return SharedRows(texts, [array("I", range(count)) for count in counts], counts, **options)


def test_trees_and_many_rows_are_left_to_torch():
    texts = Heads(1, 1, 32).texts([5, 5])
    assert rows_of(texts, [MOST_ATTENDED - 1, 1]).spans is not None
    assert rows_of(texts, [MOST_ATTENDED, 1]).spans is None
    assert rows_of(texts, [3, 1], parents=[(0, 1), ()]).spans is None


@pytest.fixture
def told(monkeypatch):
    """With how many rows compiled code attended."""
    counts, own = [], Steps.attend

    def attend(self, states, spans, how):
        counts.append(states.shape[1])
        return own(self, states, spans, how)

    monkeypatch.setattr(Steps, "attend", attend)
    return counts


@pytest.mark.parametrize("kind", ["plain", "packed"])
def test_a_model_attends_with_few_rows_so_and_with_many_by_torch(kind, steps, told):
    model = Computed(kind=kind)
    assert model.decoder.use_steps(steps)
    told.clear()
    pieces = [[MOST_ATTENDED, 1, MOST_ATTENDED + 1, 5]]
    actual = model.logits(pieces, rows=SharedRows)
    assert {*told} == {MOST_ATTENDED, 1, 5}
    told.clear()
    torch.testing.assert_close(actual, model.logits(pieces, rows=AttendedByTorch))
    assert told == []


def test_where_bits_count_rows_that_do_not_agree_are_torchs(steps, told, monkeypatch):
    model = Computed()
    expected = model.logits([[3, 9, 1]], rows=InvariantRows)
    monkeypatch.setattr(
        "paceline_engine.torch_backend.compiled_layers.agreeing_counts",
        lambda *_, **__: frozenset({4}),
    )
    assert model.decoder.use_steps(steps)
    told.clear()
    assert torch.equal(model.logits([[3, 9, 1]], rows=InvariantRows), expected)
    assert {*told} == {4}


def test_a_forward_makes_one_table_for_all_layers(steps, monkeypatch):
    model, own, made = Computed(), attention_tables.Spans, []
    assert model.decoder.use_steps(steps)
    monkeypatch.setattr(
        "paceline_engine.torch_backend.shared_rows.Spans",
        lambda *arguments, **options: made.append(1) or own(*arguments, **options),
    )
    model.logits([[3, 1]], rows=SharedRows)
    assert len(made) == 2
