"""Sequences attended where they lie are what they are one by one.

The tables are tested anywhere, with kernels made of torch's operators. The kernels themselves need
a GPU; or Triton, which comes with torch's CUDA wheels alone:

    TRITON_INTERPRET=1 pytest tests/unit/engine/test_in_place.py
"""

from __future__ import annotations

import os
import random
from array import array

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paceline_engine.torch_backend.attention import TextRows
from paceline_engine.torch_backend.attention_kernels import Attention
from paceline_engine.torch_backend.in_place import TextsInPlace, in_place_kernels
from paceline_engine.torch_backend.key_values import KeyValues
from paceline_engine.torch_backend.kv_arena import KeyValueShape, Slabs
from paceline_engine.torch_backend.shared_rows import SharedRows
from support import kernels_on_cpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_GPU = torch.cuda.is_available()
NEEDS_GPU = pytest.mark.skipif(not HAS_GPU or INTERPRETED, reason="needs a GPU")
DEVICE = torch.device("cuda" if HAS_GPU and not INTERPRETED else "cpu")
if HAS_GPU or INTERPRETED:
    from paceline_engine.torch_backend import in_place_kernels as kernels
else:
    kernels = kernels_on_cpu
LAYERS = 3
# Query heads, key heads, widths of keys and values.
SIZES = {"grouped": (8, 2, 64, 64), "seven a group": (7, 1, 32, 32), "odd widths": (4, 4, 20, 12)}
WHAT = {
    "one row each": ([5, 300, 1, 77], [1, 1, 1, 1]),
    "blocks": ([5, 300, 90], [9, 2, 16]),
    "beside a part of a prompt": ([40, 200, 0, 65], [1, 30, 50, 5]),
    "one that is long": ([1500, 3], [4, 1]),
    "a long one behind a part of a prompt": ([40, 0, 900], [2, 30, 3]),
    "alone": ([130], [1]),
}


def attended(sizes, lengths, counts, *, how, parents=None, dtype=torch.float32):
    """Return what was kept and seen in place, and one by one."""
    heads, kv_heads, width, value_width = sizes
    generator = torch.Generator(DEVICE).manual_seed(sum(lengths))
    slabs = Slabs(KeyValueShape(LAYERS, kv_heads, width, value_width, dtype, DEVICE))
    texts = []
    for length, count in zip(lengths, counts, strict=True):
        text = KeyValues(slabs, reserve_length=1 << 12)
        text.make_room(length + count)
        for each in (text.keys, text.values):
            each.zero_()[..., :length, :].normal_(generator=generator)
        text.extend(array("I", range(length)))
        texts.append(text)

    def states(number, wide):
        made = torch.empty(number, sum(counts), wide, dtype=dtype, device=DEVICE)
        return made.normal_(generator=generator)

    queries, keys = states(heads, width), states(kv_heads, width)
    values = states(kv_heads, value_width)
    rows = [
        TextRows(text, count, own)
        for text, count, own in zip(texts, counts, parents or [()] * len(texts), strict=True)
    ]
    together = TextsInPlace(rows, kernels)
    together.keep(1, keys, values)
    seen = together.attend(1, queries, how=how)
    for each, new in ((0, keys), (1, values)):
        own = torch.split(new, counts, 1)
        for row, expected in zip(rows, own, strict=True):
            assert torch.equal(row.states[each][1][0, :, row.start :], expected)
            assert not row.states[each][2][0, :, row.start :].any()  # another layer's
    apart = [
        row.attend(1, own, how=how)
        for row, own in zip(rows, torch.split(queries, counts, 1), strict=True)
    ]
    return seen, torch.cat(apart, 1)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("lengths", "counts"), WHAT.values(), ids=WHAT)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_rows_see_in_place_what_they_see_one_by_one(sizes, lengths, counts, window):
    how = Attention(scale=0.2, window=window)
    seen, expected = attended(sizes, lengths, counts, how=how)
    assert torch.allclose(seen, expected, atol=2e-5)


def test_trees_beside_other_rows_are_attended_too():
    parents = [[], [0, 0, 1], []]
    seen, expected = attended(
        SIZES["grouped"], [30, 50, 200], [1, 3, 2], how=Attention(scale=0.2), parents=parents
    )
    assert torch.allclose(seen, expected, atol=2e-5)


@pytest.mark.parametrize("seed", range(3))
def test_any_sequences(seed):
    chance = random.Random(seed)
    lengths = [chance.choice([0, 1, 63, 64, 65, 255, 600]) for _ in range(5)]
    counts = [chance.choice([1, 1, 3, 16]) for _ in lengths]
    seen, expected = attended(SIZES["grouped"], lengths, counts, how=Attention(scale=0.2))
    assert torch.allclose(seen, expected, atol=2e-5)


@NEEDS_GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_on_a_gpu(dtype):
    for lengths, counts in WHAT.values():
        seen, expected = attended(
            SIZES["grouped"], lengths, counts, how=Attention(scale=0.125), dtype=dtype
        )
        assert torch.allclose(seen, expected, atol=3e-2)


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest tensor has that an operator makes."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and func._schema.returns[0].alias_info is None:
            self.numbers = max(self.numbers, made.numel())
        return made


@pytest.mark.skipif(kernels is kernels_on_cpu, reason="needs a GPU or Triton")
def test_parts_of_a_long_sequence_take_no_memory_for_the_rows_of_others():
    with Largest() as largest:
        attended(SIZES["grouped"], [2500, 0], [1, 400], how=Attention(scale=0.2))
    buffers_of_the_longest = LAYERS * 2 * 4096 * 64  # nine parts of all rows would be more
    assert largest.numbers == buffers_of_the_longest


def test_kernels_are_chosen_by_all_that_decides_whether_they_fit(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "paceline_engine.torch_backend.shared_rows.in_place_kernels",
        lambda *_, **sizes: asked.append(sizes),
    )
    slabs = Slabs(KeyValueShape(1, 2, 16, 12, torch.float32, torch.device("cpu")))
    texts = [KeyValues(slabs, reserve_length=64) for _ in range(2)]
    for text in texts:
        text.make_room(1)
    rows = SharedRows(texts, [[1], [2]], [1, 1], together=True)
    states = torch.ones(12, 2, 16)
    for _ in range(2):
        rows.attend(
            0, states, keys=states[:2], values=states[:2, :, :12], how=Attention(scale=0.25)
        )
    assert asked == [{"kv_heads": 2, "group": 6, "key_width": 16, "value_width": 12}]


@NEEDS_GPU
def test_kernels_that_do_not_fit_are_not_launched_in_a_forward(caplog):
    sizes = {"kv_heads": 1, "group": 8, "key_width": 256, "value_width": 256}
    assert in_place_kernels(DEVICE, torch.float32, **sizes) is None
    assert "attended one by one" in caplog.text


@NEEDS_GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_has_the_kernels(dtype):
    sizes = {"kv_heads": 8, "group": 4, "key_width": 128, "value_width": 128}
    assert in_place_kernels(DEVICE, dtype, **sizes) is not None
    assert in_place_kernels(torch.device("cpu"), dtype, **sizes) is None
