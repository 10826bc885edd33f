"""Rows after other rows on an accelerator: flash attention, without a mask of rows times tokens."""

from __future__ import annotations

import math
from array import array

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from paceline_engine.torch_backend.attention_kernels import Attention, takes_flash
from paceline_engine.torch_backend.key_values import KeyValues
from paceline_engine.torch_backend.kv_arena import KeyValueShape, Slabs
from paceline_engine.torch_backend.shared_rows import SharedRows

HEADS, KV_HEADS = 8, 2
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Watched(TorchDispatchMode):
    """Notes of the operators that run, and of the largest tensor that one makes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.names.append(func.__name__)
        is_new = all(each.alias_info is None for each in func._schema.returns)
        if isinstance(made, torch.Tensor) and is_new:
            self.largest = max(self.largest, made.numel())
        return made


def attend(
    device: str,
    *,
    lengths,
    counts,
    width=64,
    value_width=None,
    dtype=torch.bfloat16,
    how=None,
    parents=None,
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, ...]]]:
    """Attend with random states; return the result, and each sequence's queries, keys, values."""
    widths = (width, value_width or width)
    shape = KeyValueShape(1, KV_HEADS, *widths, dtype, torch.device(device))
    slabs, texts = Slabs(shape), []
    generator = None if device == "meta" else torch.Generator(device).manual_seed(3)

    def states(*sizes):
        return torch.randn(*sizes, generator=generator, device=device, dtype=dtype)

    for length, count in zip(lengths, counts, strict=True):
        text = KeyValues(slabs, reserve_length=1 << 14)
        text.make_room(length + count)
        for each in (text.keys, text.values):
            each.copy_(states(*each.shape))
        text.extend(array("I", range(length)))
        texts.append(text)
    rows = SharedRows(
        texts, [range(count) for count in counts], counts, parents=parents, together=True
    )
    queries, keys, values = (
        states(heads, sum(counts), wide)
        for heads, wide in ((HEADS, width), (KV_HEADS, width), (KV_HEADS, widths[1]))
    )
    with Watched() as watched:
        seen = rows.attend(
            0, queries, keys=keys, values=values, how=how or Attention(scale=width**-0.5)
        )
    told = [
        (own, text.until(length + count)[0][0], text.until(length + count)[1][0])
        for own, text, length, count in zip(
            torch.split(queries, list(counts), 1), texts, lengths, counts, strict=True
        )
    ]
    attend.watched = watched
    return seen, told


def by_definition(queries, keys, values) -> torch.Tensor:
    """The last rows of a sequence, in float64: (H, t, D)."""
    count, length = queries.shape[1], keys.shape[2]
    group = HEADS // KV_HEADS
    keys, values = (each[0].double().repeat_interleave(group, 0) for each in (keys, values))
    products = queries.double() @ keys.mT * queries.shape[-1] ** -0.5
    unseen = torch.ones(count, length, dtype=torch.bool, device=keys.device)
    unseen = unseen.triu(length - count + 1)
    return products.masked_fill(unseen, -math.inf).softmax(-1) @ values


@pytest.mark.parametrize("count", [2, 9, 3000])
def test_rows_after_a_prompt_take_flash_attention_and_make_no_mask(count):
    attend("meta", lengths=[4000], counts=[count])
    assert "_scaled_dot_product_flash_attention.default" in attend.watched.names
    assert attend.watched.largest <= HEADS * count * 64  # queries or result, and no mask


@pytest.mark.parametrize(
    "why",
    [
        {"dtype": torch.float32},
        {"width": 12},
        {"width": 512},
        {"value_width": 32},
        {"how": Attention(scale=0.1, window=100)},
        {"parents": [[0, 0, 1]]},
    ],
    ids=lambda why: next(iter(why)),
)
def test_what_flash_attention_does_not_compute_gets_a_mask(why):
    attend("meta", lengths=[400], counts=[4], **why)
    assert "_scaled_dot_product_flash_attention.default" not in attend.watched.names
    assert attend.watched.largest >= 4 * 404


@pytest.mark.parametrize(("capability", "has_it"), [((7, 5), False), ((8, 0), True)], ids=str)
def test_a_gpu_without_flash_attention_is_not_asked_for_it(monkeypatch, capability, has_it):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    with FakeTensorMode():
        queries = torch.empty(HEADS, 4, 64, dtype=torch.float16, device="cuda")
    assert takes_flash(queries, values=queries) is has_it


def test_long_sequences_are_read_where_they_lie():
    # 150,000 tokens of 2 heads of 64 in bfloat16: 38 MB of keys, and as much of values.
    attend("meta", lengths=[150_000, 150_000, 300, 300], counts=[5, 5, 1, 1])
    names = attend.watched.names
    assert names.count("_scaled_dot_product_flash_attention.default") == 2
    assert attend.watched.largest < 150_000 * KV_HEADS * 64


@CUDA
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(
    ("lengths", "counts"),
    [([1], [2]), ([100], [9]), ([4000], [9]), ([4097], [1500]), ([9000, 40], [5, 3])],
    ids=str,
)
def test_on_a_gpu_each_row_sees_what_is_up_to_it(dtype, width, lengths, counts):
    seen, told = attend("cuda", lengths=lengths, counts=counts, width=width, dtype=dtype)
    expected = torch.cat([by_definition(*each) for each in told], 1)
    assert torch.allclose(seen.double(), expected, atol=2e-2)


@CUDA
def test_a_prompt_in_float32_makes_no_products_of_rows_times_tokens():
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attend("cuda", lengths=[0], counts=[8000], dtype=torch.float32)
    assert torch.cuda.max_memory_allocated() - before < 8000 * 8000 * 4
