"""Products in eight bits: exact, so that a row's logits do not depend on the rows beside it."""

from __future__ import annotations

import itertools
import platform
from array import array
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from paceline_engine.terms.backend import ModelLoadError
from paceline_engine.torch_backend import int8_linear
from paceline_engine.torch_backend.decoders import choose_decoder, take_sample
from paceline_engine.torch_backend.int8_linear import Int8Product, check_exact
from paceline_engine.torch_backend.invariant import TILE, InvariantRows
from paceline_engine.torch_backend.key_values import KeyValues
from paceline_engine.torch_backend.kv_arena import Slabs
from paceline_engine.torch_backend.library import LibraryDecoder
from paceline_engine.torch_backend.llama import FusedLlama
from paceline_engine.torch_backend.transformers import TransformersBackend
from paceline_engine.torch_backend.whole_products import replace_products
from support.device import on_a_cpu

COUNTS = [*range(1, 10), 31, 63, 64, 65, 130]
SHAPES = [(48, 40), (37, 33), (1, 7), (960, 576)]
VOCABULARY_SIZE = 320
# Beyond a tile of keys.
LENGTH = 70

pytestmark = pytest.mark.skipif(
    platform.machine() not in {"x86_64", "AMD64"} or not torch.cpu._is_vnni_supported(),
    reason="this processor has no exact products in eight bits",
)


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_what_its_formula_says_bit_for_bit(shape, threads):
    weight, bias, hidden = (
        numbers(*shape),
        numbers(shape[0], seed=1),
        numbers(200, shape[1], seed=2),
    )
    product = Int8Product(weight, bias)
    scales = (weight.abs().amax(1) * (1 / 127))[:, None]
    row_scales = hidden.abs().amax(1, keepdim=True) * (1 / 127)
    whole = (hidden / row_scales).round().long() @ (weight / scales).round().long().t()
    expected = whole.float() * scales[:, 0] * row_scales + bias
    for count in COUNTS:
        assert torch.equal(product(hidden[:count]), expected[:count])
        assert torch.equal(product(hidden[-count:]), expected[-count:])


@torch.inference_mode()
def test_a_weight_may_lie_in_any_order():
    weight, hidden = numbers(96, 80), numbers(9, 80, seed=1)
    turned = weight.t().contiguous().t()
    assert torch.equal(Int8Product(turned, None)(hidden), Int8Product(weight, None)(hidden))


@torch.inference_mode()
def test_a_product_is_close_to_that_of_the_numbers_that_were_rounded():
    weight, hidden = numbers(96, 80), numbers(9, 80, seed=1)
    exact = functional.linear(hidden, weight)
    actual = Int8Product(weight, None)(hidden)
    assert float((actual - exact).norm() / exact.norm()) < 0.02
    assert float((Int8Product(weight, None).weight() - weight).abs().max()) <= float(
        weight.abs().max() / 254 + 1e-6
    )


@torch.inference_mode()
def test_rows_and_outputs_of_zeros_are_numbers():
    weight = numbers(6, 8)
    weight[2] = 0
    product = Int8Product(weight, None)
    assert torch.equal(product(torch.zeros(3, 8)), torch.zeros(3, 6))
    assert torch.equal(product(numbers(5, 8))[:, 2], torch.zeros(5))


@torch.inference_mode()
@pytest.mark.parametrize("error", [1, -1])
@pytest.mark.parametrize("count", [1, 2, 3, 12])
def test_a_kernel_that_is_off_by_the_least_is_refused(count, error, monkeypatch):
    """As one that adds in 16 bits, and stops at the largest number there."""
    product = Int8Product(numbers(48, 40), None)
    check_exact([product])
    own = product.of_whole_numbers

    def off(rows):
        found = own(rows)
        if len(rows) == count:
            found[-1, -1] += error * product.scales[-1]
        return found

    monkeypatch.setattr(product, "of_whole_numbers", off)
    with pytest.raises(ModelLoadError, match="VNNI"):
        check_exact([product])


def test_no_second_copy_of_a_weight_is_kept():
    product = Int8Product(numbers(48, 40), None)
    kept = [each for each in vars(product).values() if isinstance(each, torch.Tensor)]
    own = [each for each in kept if not each.is_mkldnn]
    assert len(own) < len(kept), "the packed weight"
    assert max(each.untyped_storage().nbytes() for each in own) <= 48 * 8


def test_sums_that_32_bits_cannot_hold_are_refused(monkeypatch):
    product = Int8Product(numbers(48, 40), None)
    monkeypatch.setattr(int8_linear, "_MOST_SUM", product.reach)
    with pytest.raises(ModelLoadError, match="40"):
        check_exact([product])


def test_more_inputs_than_a_sum_has_room_for_are_refused(monkeypatch):
    monkeypatch.setattr(int8_linear, "_MOST_INPUTS", 39)
    with pytest.raises(ModelLoadError, match="40"):
        check_exact([Int8Product(numbers(48, 40), None)])


def test_a_model_with_more_inputs_than_that_is_refused_at_load(tiny_pair, monkeypatch):
    monkeypatch.setattr(int8_linear, "_MOST_INPUTS", 15)
    with pytest.raises(ModelLoadError, match="the model's width of 32 is too large"):
        TransformersBackend(str(tiny_pair.target), weights="int8")


def llama(**settings):
    torch.manual_seed(3)
    sizes = {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "initializer_range": 0.1,
    }
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **settings})).eval()


class Rounded:
    """A model in eight bits, and texts that are computed in any pieces."""

    def __init__(self, model, *, fused=True):
        with torch.inference_mode():
            sample = take_sample(model)
            with pytest.MonkeyPatch.context() as patch:
                if not fused:
                    patch.setattr(
                        "paceline_engine.torch_backend.decoders.can_fuse", lambda _: False
                    )
                self.decoder = choose_decoder(
                    "a model", model, sample=sample, together=False, packs=False
                )
            assert isinstance(self.decoder, FusedLlama if fused else LibraryDecoder)
            replace_products("a model", model, self.decoder, kind="int8")
        self.shape = sample.shape

    @torch.inference_mode()
    def logits(self, texts, pieces):
        """Compute texts side by side, in such pieces; return all rows' logits of each."""
        slabs = Slabs(self.shape, tile=TILE)
        caches = [KeyValues(slabs, reserve_length=len(text)) for text in texts]
        found = [[] for _ in texts]
        for counts in itertools.zip_longest(*pieces, fillvalue=0):
            rows = [
                (cache, text[cache.length : cache.length + count], own)
                for cache, text, own, count in zip(caches, texts, found, counts, strict=True)
                if count
            ]
            for cache, part, _ in rows:
                cache.make_room(len(part))
            sizes = [len(part) for _, part, _ in rows]
            parts = [array("I", part) for _, part, _ in rows]
            logits = self.decoder(InvariantRows([cache for cache, _, _ in rows], parts, sizes))
            for (cache, _, own), part, scored in zip(
                rows, parts, torch.split(logits[: sum(sizes)], sizes), strict=True
            ):
                cache.extend(part)
                own.append(scored)
        return [torch.cat(own) for own in found]


def text(seed, length=LENGTH):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY_SIZE, (length,), generator=generator).tolist()


def parts_of(length, size):
    return [min(size, length - start) for start in range(0, length, size)]


@pytest.mark.parametrize(
    ("fused", "settings"),
    [
        (True, {}),
        (True, {"attention_bias": True, "mlp_bias": True}),
        (True, {"tie_word_embeddings": True}),
        (False, {}),
    ],
    ids=["fused", "biases", "tied", "the library's"],
)
def test_logits_have_the_same_bits_in_all_divisions_of_a_text(fused, settings):
    """One row or many, prefill or decoding, alone or beside other texts."""
    compare_divisions(Rounded(llama(**settings), fused=fused), sizes=(*range(1, 10), 64))


def test_two_threads_give_the_same_bits_in_all_divisions_too(threads):
    """Long parts, in which the threads' kernels divide the work, and short ones."""
    compare_divisions(Rounded(llama()), sizes=(3, 8, 64))


def compare_divisions(model, *, sizes):
    """Compare a text whole with it in pieces, and beside others."""
    own = text(1)
    (whole,) = model.logits([own], [[len(own)]])
    for size in sizes:
        (logits,) = model.logits([own], [parts_of(len(own), size)])
        assert torch.equal(logits, whole), size
    others = [text(seed, length) for seed, length in ((2, 70), (3, 31), (4, 66))]
    alone = [whole, *(model.logits([each], [[len(each)]])[0] for each in others)]
    for beside in ((1, 1, 1, 1), (5, 2, 9, 2), (70, 7, 3, 64), (2, 70, 31, 5)):
        texts = [own, *others]
        pieces = [parts_of(len(each), size) for each, size in zip(texts, beside, strict=True)]
        for expected, actual in zip(alone, model.logits(texts, pieces), strict=True):
            assert torch.equal(actual, expected), beside


def test_a_model_in_eight_bits_is_close_to_the_model():
    model, own = llama(), text(1)
    with torch.inference_mode():
        before = model(torch.tensor([own])).logits[0]
    (after,) = Rounded(model).logits([own], [[len(own)]])
    assert float((after - before).norm() / before.norm()) < 0.05


def test_the_model_loses_the_weights_that_are_rounded():
    model = llama()
    Rounded(model)
    linears = [each for each in model.modules() if isinstance(each, nn.Linear)]
    assert not any(each.weight.numel() for each in linears)


@pytest.fixture(scope="module")
def loaded(tiny_pair):
    directory = str(tiny_pair.target)
    return SimpleNamespace(
        plain=TransformersBackend(directory),
        int8=TransformersBackend(directory, weights="int8", invariant=True),
    )


@on_a_cpu
def test_a_server_in_eight_bits_says_of_nothing_that_it_would_be_faster(tiny_pair, caplog):
    with caplog.at_level("INFO"):
        TransformersBackend(str(tiny_pair.target), weights="int8")
    assert "would be faster" not in caplog.text


def test_a_server_in_eight_bits_is_another_model(loaded):
    plain, int8 = loaded.plain.description, loaded.int8.description
    assert (plain.dtype, int8.dtype) == ("float32", "int8")
    assert plain.fingerprint != int8.fingerprint
    assert plain.tokenizer_fingerprint == int8.tokenizer_fingerprint
    assert int8.is_invariant


@on_a_cpu
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": "bfloat16"}, "--dtype"),
        ({"invariant": True, "threads": 3}, "--threads"),
    ],
    ids=str,
)
def test_what_cannot_be_computed_in_eight_bits_is_refused(options, reason, tiny_pair):
    with pytest.raises(ModelLoadError, match=reason):
        TransformersBackend(str(tiny_pair.target), weights="int8", **options)


def test_eight_bits_are_for_a_processor(monkeypatch, tiny_pair):
    monkeypatch.setattr(
        "paceline_engine.torch_backend.transformers.usable_device",
        lambda *_, **__: torch.device("cuda"),
    )
    with pytest.raises(ModelLoadError, match="x86-64 CPU"):
        TransformersBackend(str(tiny_pair.target), weights="int8", device="cuda")
