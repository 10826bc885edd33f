from __future__ import annotations

from array import array

import pytest
import torch
from torch import nn
from transformers import (
    DynamicCache,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from paceline_engine.torch_backend import packed_linear
from paceline_engine.torch_backend.decoders import choose_decoder, take_sample
from paceline_engine.torch_backend.families import can_fuse
from paceline_engine.torch_backend.key_values import KeyValues
from paceline_engine.torch_backend.kv_arena import KeyValueShape, Slabs
from paceline_engine.torch_backend.library import LibraryDecoder
from paceline_engine.torch_backend.llama import FusedLlama, _norm
from paceline_engine.torch_backend.packed_linear import PackedProduct, can_pack
from paceline_engine.torch_backend.shared_rows import SharedRows

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def llama(**settings):
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **settings}))


def mistral(**settings):
    return MistralForCausalLM(MistralConfig(**{**SIZES, "sliding_window": None, **settings}))


def qwen2(**settings):
    return Qwen2ForCausalLM(Qwen2Config(**{**SIZES, **settings}))


def qwen3(**settings):
    return Qwen3ForCausalLM(Qwen3Config(**{**SIZES, "head_dim": 12, **settings}))


FUSED = {
    "llama": llama,
    "one key for each query": lambda: llama(num_key_value_heads=4),
    "tied": lambda: llama(tie_word_embeddings=True),
    "biased": lambda: llama(attention_bias=True, mlp_bias=True),
    "heads of another width": lambda: llama(head_dim=20),
    "scaled positions": lambda: llama(rope_parameters=LLAMA3),
    "another activation": lambda: llama(hidden_act="gelu"),
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
}
NOT_FUSED = {
    "a sliding window": lambda: mistral(sliding_window=8),
    "some sliding windows": lambda: qwen2(
        use_sliding_window=True, sliding_window=8, max_window_layers=1
    ),
    "positions that depend on the length": lambda: llama(
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    ),
    "another family": lambda: GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=96, hidden_size=32, intermediate_size=40, num_hidden_layers=1,
            num_attention_heads=2,
        )
    ),
}  # fmt: skip


def built(make, *, seed: int = 0):
    torch.manual_seed(seed)
    model = make().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # they are made as zeros
                parameter.normal_()
            if name.endswith(("q_norm.weight", "k_norm.weight")):  # and these as ones
                parameter.uniform_(0.5, 1.5)
    return model


def text_of(decoder, length):
    layer = decoder.layers[0]
    sizes = (len(decoder.layers), layer._kv_heads, layer._width, layer._width)
    return KeyValues(Slabs(KeyValueShape(*sizes, torch.float32, CPU)), reserve_length=length)


@torch.inference_mode()
def in_chunks(decoder, ids, ends):
    text, rows = text_of(decoder, len(ids)), []
    for start, end in zip((0, *ends), (*ends, len(ids)), strict=True):
        part = array("I", ids[start:end].tolist())
        text.make_room(len(part))
        rows.append(decoder(SharedRows([text], [part], [len(part)])))
        text.extend(part)
    return torch.cat(rows)


@torch.inference_mode()
def by_the_library(model, ids):
    return model(ids[None], past_key_values=DynamicCache()).logits[0]


@pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)
def test_fused_layers_give_the_librarys_logits(make):
    model = built(make)
    assert can_fuse(model)
    ids = torch.randint(96, (40,), generator=torch.Generator().manual_seed(1))
    expected = by_the_library(model, ids)
    for ends in ((), (1, 2, 9, 10, 33), (12,)):
        actual = in_chunks(FusedLlama(model), ids, ends)
        assert torch.allclose(actual, expected, atol=1e-4 * float(expected.abs().max()))


def test_a_model_stays_usable_after_its_layers_were_fused():
    model = built(FUSED["tied"])
    ids = torch.arange(10)
    before = by_the_library(model, ids)
    FusedLlama(model)
    assert torch.allclose(by_the_library(model, ids), before, atol=1e-4)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight *= 2
    assert not torch.allclose(by_the_library(model, ids), before, atol=1e-2)


@torch.inference_mode()
@pytest.mark.parametrize("scale", [1.0, 1e-3, 0.0])
def test_a_small_norm_is_the_librarys(scale):
    norm = LlamaRMSNorm(40, eps=1e-5)
    norm.weight.copy_(torch.rand(40))
    hidden = scale * torch.randn(7, 40, generator=torch.Generator().manual_seed(5))
    assert torch.allclose(_norm(norm)(hidden), norm(hidden), atol=1e-6)


def test_its_weights_are_packed_where_that_is_of_use(monkeypatch):
    monkeypatch.setattr(packed_linear, "_TINY_BYTES", 0)
    model, warm = built(llama), []
    packs = can_pack(model.parameters())
    monkeypatch.setattr("paceline_engine.torch_backend.llama.warm_up", warm.extend)
    decoder = FusedLlama(model)
    each_layers = [each for layer in decoder.layers for each in layer.products]
    assert len(each_layers) == 4 * len(decoder.layers)
    assert {isinstance(each, PackedProduct) for each in each_layers} == {packs}
    assert {id(each) for each in each_layers} < {id(each) for each in warm}


@pytest.mark.parametrize("make", [llama, FUSED["tied"]], ids=["untied", "tied"])
def test_packed_weights_are_in_memory_once_and_can_be_given_back(make, monkeypatch):
    for name in ("_TINY_BYTES", "_SMALL_BYTES"):
        monkeypatch.setattr(packed_linear, name, 0)
    model = built(make)
    if not can_pack(model.parameters()):
        pytest.skip("this processor packs no weights")
    ids = torch.randint(96, (12,), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        before = by_the_library(model, ids)
    decoder = FusedLlama(model)
    linears = [each for each in model.modules() if isinstance(each, nn.Linear)]
    assert not any(each.weight.numel() for each in linears)
    assert torch.allclose(in_chunks(decoder, ids, (5, 6, 9)), before, atol=1e-4)
    decoder.give_back(model)
    with torch.inference_mode():
        assert torch.equal(by_the_library(model, ids), before)


def test_a_tied_head_takes_no_memory_of_its_own():
    model = built(FUSED["tied"])
    FusedLlama(model)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_only_the_wanted_rows_are_scored():
    model = built(llama)
    ids, decoder = torch.arange(9), FusedLlama(model)
    text = text_of(decoder, 20)
    text.make_room(9)
    with torch.inference_mode():
        last = decoder(SharedRows([text], [ids.tolist()], [2]))
    assert last.shape == (2, 96)
    assert torch.allclose(last, by_the_library(model, ids)[-2:], atol=1e-4)


def test_a_text_may_grow_longer_than_the_first_table_of_positions():
    model = built(lambda: llama(num_hidden_layers=1))
    ids = torch.randint(96, (1100,), generator=torch.Generator().manual_seed(2))
    actual = in_chunks(FusedLlama(model), ids, (1000, 1020, 1030))
    assert torch.allclose(actual, by_the_library(model, ids), atol=1e-3)


@pytest.mark.parametrize("make", NOT_FUSED.values(), ids=NOT_FUSED)
def test_what_would_not_be_the_same_is_left_to_the_library(make):
    assert not can_fuse(built(make))


def test_fused_layers_that_are_off_are_not_used(monkeypatch, caplog):
    class Off(FusedLlama):
        def __call__(self, *arguments, **options):
            return super().__call__(*arguments, **options) * 1.01

    def chosen():
        model = built(llama)
        decoder = choose_decoder("a model", model, sample=take_sample(model), together=False)
        # Adapters score with the model's head: the decoder's own, which is packed.
        has_lent = "forward" in vars(model.lm_head)
        return type(decoder), has_lent

    assert chosen() == (FusedLlama, True)
    monkeypatch.setattr("paceline_engine.torch_backend.decoders.FusedLlama", Off)
    assert chosen() == (LibraryDecoder, False)
    assert "a model" in caplog.text
