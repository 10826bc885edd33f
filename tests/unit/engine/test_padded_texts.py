"""Texts attended together, as on an accelerator: as one by one, and with bounded padding."""

from __future__ import annotations

import random
from array import array

import pytest
import torch
from torch.nn import functional

from paceline_engine.torch_backend.attention_kernels import Attention
from paceline_engine.torch_backend.key_values import KeyValues
from paceline_engine.torch_backend.kv_arena import KeyValueShape, Slabs
from paceline_engine.torch_backend.shared_rows import SharedRows

HEADS, KV_HEADS, WIDTH = 4, 2, 8
SHAPE = KeyValueShape(1, KV_HEADS, WIDTH, WIDTH, torch.float32, torch.device("cpu"))
HOWS = {"plain": Attention(scale=0.3), "a window": Attention(scale=0.3, window=9)}


def texts_of(lengths) -> list[KeyValues]:
    slabs, generator = Slabs(SHAPE), torch.Generator().manual_seed(3)
    texts = []
    for length in lengths:
        text = KeyValues(slabs, reserve_length=1 << 14)
        text.make_room(length + 300)
        for each in (text.keys, text.values):
            each.copy_(torch.randn(each.shape, generator=generator))
        text.extend(array("I", range(length)))
        texts.append(text)
    return texts


def attend(texts, counts, how, *, parents=None, together) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    rows = SharedRows(
        texts, [range(count) for count in counts], counts, parents=parents, together=together
    )
    queries, keys, values = (
        torch.randn(heads, sum(counts), WIDTH, generator=generator)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    return rows.attend(0, queries, keys=keys, values=values, how=how)


def kernels(monkeypatch) -> list[tuple[int, int]]:
    """Note of each call of a kernel how many tokens it reads, and how large its mask is."""
    called, real = [], functional.scaled_dot_product_attention

    def watched(queries, keys, values, attn_mask=None, **options):
        called.append((len(keys) * keys.shape[2], 0 if attn_mask is None else attn_mask.numel()))
        return real(queries, keys, values, attn_mask=attn_mask, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", watched)
    return called


@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
@pytest.mark.parametrize("seed", range(6))
def test_texts_together_are_what_they_are_one_by_one(how, seed):
    chance = random.Random(seed)
    lengths = [chance.choice([0, 3, 90, 250, 256, 500, 700, 1500]) for _ in range(8)]
    counts = [chance.choice([1, 1, 2, 5, 16, 17, 40]) for _ in lengths]
    parents = [
        [chance.randint(0, n) for n in range(count - 1)] if chance.random() < 0.3 else []
        for count in counts
    ]
    texts = texts_of(lengths)
    expected = attend(texts, counts, how, parents=parents, together=False)
    actual = attend(texts, counts, how, parents=parents, together=True)
    assert torch.allclose(actual, expected, atol=1e-5)


def test_a_long_text_beside_short_ones_is_not_what_they_are_padded_to(monkeypatch):
    lengths = [5000, *[300] * 10, *[200] * 21]
    called, texts = kernels(monkeypatch), texts_of(lengths)
    attend(texts, [1] * len(texts), HOWS["plain"], together=True)
    assert len(called) == 3
    assert sum(tokens for tokens, _ in called) == sum(lengths) + len(lengths)


def test_padding_doubles_at_most_what_is_read_of_longer_texts(monkeypatch):
    lengths = [257, 300, 511, 512, 600, 1000, 1025, 2047, 1500, 4000]
    called, texts = kernels(monkeypatch), texts_of(lengths)
    attend(texts, [1] * len(texts), HOWS["plain"], together=True)
    assert len(called) < len(texts)
    assert sum(tokens for tokens, _ in called) < 2 * (sum(lengths) + len(lengths))


def test_a_part_of_a_prompt_beside_streams_pads_none_of_their_rows(monkeypatch):
    called, texts = kernels(monkeypatch), texts_of([200] * 8 + [50])
    attend(texts, [1] * 8 + [190], HOWS["plain"], together=True)
    (_, beside), (tokens, own) = called
    assert beside == 8 * (HEADS // KV_HEADS) * 201
    assert tokens == 240
    assert own <= 190 * (HEADS // KV_HEADS) * 240
