from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from paceline_engine.torch_backend import packed_linear
from paceline_engine.torch_backend.memory import FreeMemory
from paceline_engine.torch_backend.packed_linear import (
    BLOCKS,
    PackedModules,
    PlainProduct,
    can_pack,
    product_of,
    warm_up,
)

DTYPES = [torch.float32, torch.bfloat16]
COUNTS = [*range(1, 70), 127, 128, 129, 200]


def numbers(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(params=DTYPES, ids=str)
def product(request, monkeypatch):
    """A weight that counts as large."""
    for name in ("_TINY_BYTES", "_SMALL_BYTES"):
        monkeypatch.setattr(packed_linear, name, 0)
    weight, bias = numbers(48, 40, dtype=request.param), numbers(48, dtype=request.param, seed=1)
    if not can_pack([weight]):
        pytest.skip("this processor computes these numbers in another way")
    return product_of(weight, bias, packs=True)


@torch.inference_mode()
def test_packed_weights_give_the_same_products(product):
    hidden = numbers(COUNTS[-1], 40, dtype=product.weight().dtype, seed=2)
    expected = functional.linear(hidden.double(), product.weight().double(), product.bias.double())
    close = 8 * torch.finfo(hidden.dtype).eps * float(expected.abs().max())
    for count in COUNTS:
        actual = product(hidden[:count])
        assert actual.shape == (count, 48)
        assert torch.allclose(actual.double(), expected[:count], atol=close)


@torch.inference_mode()
def test_a_packed_weight_is_held_once_and_can_be_had_back(product):
    weight = numbers(48, 40, dtype=product.weight().dtype)
    assert product.loaded is None
    assert torch.equal(product.weight(), weight)


@torch.inference_mode()
def test_small_weights_are_packed_for_four_rows_and_more_and_tiny_ones_not_at_all(product):
    weight = product.weight()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_linear, "_SMALL_BYTES", weight.nbytes + 1)
        small = product_of(weight, None, packs=True)
        assert (small.loaded is not None) == (weight.dtype == torch.float32)
        assert torch.equal(small.weight(), weight)
        patch.setattr(packed_linear, "_TINY_BYTES", weight.nbytes + 1)
        assert isinstance(product_of(weight, None, packs=True), PlainProduct)


@torch.inference_mode()
def test_a_rows_bits_do_not_depend_on_how_many_rows_there_are(product):
    hidden = numbers(COUNTS[-1], 40, dtype=product.weight().dtype, seed=3)
    expected = product(hidden)
    for count in COUNTS:
        assert torch.equal(product(hidden[:count]), expected[:count])
        assert torch.equal(product(hidden[-count:]), expected[-count:])


@torch.inference_mode()
def test_all_code_is_made_when_a_model_is_loaded(product, monkeypatch):
    computed = []

    class Watched:
        def _linear_pointwise(self, hidden, *rest):
            computed.append(len(hidden))
            return torch.ops.mkldnn._linear_pointwise(hidden, *rest)

    monkeypatch.setattr(packed_linear, "_ONEDNN", Watched())
    other = product_of(product.weight(), None, packs=False)
    warm_up([product, product, other])
    assert computed == [*BLOCKS]


@torch.inference_mode()
def test_only_few_numbers_of_rows_are_ever_computed(product, monkeypatch):
    """The library keeps code for each of them, half a megabyte, until the process ends."""
    computed = set()

    class Watched:
        def _linear_pointwise(self, hidden, *rest):
            computed.add(len(hidden))
            return torch.ops.mkldnn._linear_pointwise(hidden, *rest)

    monkeypatch.setattr(packed_linear, "_ONEDNN", Watched())
    for count in range(1, 1000):
        product(torch.zeros(count, 40, dtype=product.weight().dtype))
    assert len(computed) <= 13
    assert max(computed) <= 64


def test_weights_are_packed_only_where_there_is_memory_for_the_copy_of_one(product, monkeypatch):
    weights = [product.weight(), product.weight()]
    needed = 4 * weights[0].nbytes
    for free, fits in ((needed, True), (needed - 1, False)):
        found = FreeMemory(free, usable_share=1.0)
        monkeypatch.setattr(packed_linear, "free_memory", lambda _, found=found: found)
        assert can_pack(weights) == fits


def test_what_the_library_computes_otherwise_is_left_as_it_is():
    assert not can_pack([torch.zeros(4, 4, dtype=torch.float64)])
    assert not can_pack([torch.zeros(4, 4), torch.zeros(4, 4, dtype=torch.float16)])
    assert not can_pack([torch.zeros(4, 4, device="meta")])


@torch.inference_mode()
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_librarys_linear_modules_give_the_same_without_weights_of_their_own(
    has_bias, monkeypatch
):
    for name in ("_TINY_BYTES", "_SMALL_BYTES"):
        monkeypatch.setattr(packed_linear, name, 0)
    model = nn.Sequential(nn.Linear(8, 6, bias=has_bias), nn.Tanh(), nn.Linear(6, 5, bias=has_bias))
    is_packed = can_pack(model.parameters())
    shapes = [(3, 8), (1, 8), (0, 8), (1, 7, 8), (2, 3, 8), (1, 0, 8)]
    hidden = [numbers(*shape, dtype=torch.float32, seed=4) for shape in shapes]
    before = [model(each) for each in hidden]
    weights = [model[place].weight.clone() for place in (0, 2)]
    modules = PackedModules(model)
    assert [len(model[place].weight) == 0 for place in (0, 2)] == [is_packed] * 2
    after = [model(each) for each in hidden]
    for expected, actual in zip(before, after, strict=True):
        assert actual.shape == expected.shape
        assert torch.allclose(actual, expected, atol=1e-5)
    modules.undo()
    for place, weight in zip((0, 2), weights, strict=True):
        assert torch.equal(model[place].weight, weight)
    assert all(map(torch.equal, [model(each) for each in hidden], before))


@torch.inference_mode()
def test_a_weight_that_another_module_uses_stays_there(monkeypatch):
    for name in ("_TINY_BYTES", "_SMALL_BYTES"):
        monkeypatch.setattr(packed_linear, name, 0)
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9, bias=False))
    model[1].weight = model[0].weight
    ids = torch.arange(9)
    before = model(ids)
    PackedModules(model)
    assert torch.allclose(model(ids), before, atol=1e-5)
