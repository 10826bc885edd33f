"""A model in a GGUF file computes what the numbers in the file say, and has its tokens and ends."""

from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import (
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from paceline_engine.model_files.files import find_model_files
from paceline_engine.terms.backend import ModelLoadError
from paceline_engine.torch_backend.model_loading import count_tokens, load_model
from support.gguf_files import GgufParts, write_gguf
from support.tiny_models import build_tokenizer

SIZES = {
    "vocab_size": 300,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "rms_norm_eps": 1e-6,
}
KINDS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q6_K"]
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


GRANITE = {
    "attention_multiplier": 0.0625,
    "embedding_multiplier": 12.0,
    "logits_scaling": 8.0,
    "residual_multiplier": 0.25,
}


def scaled(kind, *, original=None):
    return {
        "llama.rope.scaling.type": kind,
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": original,
    }


def divisors_of_llama_3(head_size=128):
    """Divide the rotations as the converter of llama.cpp does, one after the other."""
    found = []
    for index in range(0, head_size, 2):
        wave = 2 * math.pi * LLAMA3["rope_theta"] ** (index / head_size)
        if wave < 8192 / 4:
            found.append(1.0)
        elif wave > 8192:
            found.append(32.0)
        else:
            smooth = (8192 / wave - 1) / 3
            found.append(1 / ((1 - smooth) / 32 + smooth))
    return np.array(found, dtype=np.float32)


def llama(**settings):
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **settings}))


FAMILIES = {
    "llama": (llama, GgufParts()),
    "llama with tied embeddings": (lambda: llama(tie_word_embeddings=True), GgufParts()),
    "llama with biases": (lambda: llama(attention_bias=True, mlp_bias=True), GgufParts()),
    "llama with heads of another size": (lambda: llama(head_dim=64), GgufParts()),
    "llama with linear positions": (
        lambda: llama(rope_parameters=LINEAR),
        GgufParts(values=scaled("linear")),
    ),
    "llama with yarn": (
        lambda: llama(rope_parameters=YARN),
        GgufParts(values=scaled("yarn", original=64)),
    ),
    "llama 3.2": (
        lambda: llama(head_dim=128, rope_parameters=LLAMA3),
        GgufParts(tensors={"rope_freqs.weight": divisors_of_llama_3()}),
    ),
    "granite": (
        lambda: GraniteForCausalLM(GraniteConfig(**SIZES, **GRANITE)),
        GgufParts(
            "granite",
            values={
                "granite.attention.scale": GRANITE["attention_multiplier"],
                "granite.embedding_scale": GRANITE["embedding_multiplier"],
                "granite.logit_scale": GRANITE["logits_scaling"],
                "granite.residual_scale": GRANITE["residual_multiplier"],
            },
        ),
    ),
    "smollm3": (
        lambda: SmolLM3ForCausalLM(
            SmolLM3Config(
                **{
                    **SIZES,
                    "num_hidden_layers": 4,
                    "bos_token_id": 0,
                    "eos_token_id": 0,
                    "pad_token_id": 0,
                }
            )
        ),
        GgufParts("smollm3"),
    ),
    "qwen2": (lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)), GgufParts("qwen2")),
    "qwen3": (lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=64)), GgufParts("qwen3")),
}


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(300)


def randomised(model):
    """Let no norm and no bias be what it is when nobody sets it."""
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            weight.data.uniform_(0.5, 1.5) if "norm" in name else weight.data.normal_(std=0.2)
    return model.eval()


@pytest.fixture
def small(tmp_path, tokenizer):
    """Give a function that writes a small model with some metadata, and returns its path."""

    def write(**options):
        torch.manual_seed(1)
        model = llama(hidden_size=32, intermediate_size=64, num_attention_heads=2)
        return write_gguf(tmp_path / "tiny.Q8_0.gguf", model, tokenizer, GgufParts(**options))

    return write


@torch.no_grad()
def logits_of(model):
    return model(torch.arange(2, 200, 2)[None]).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_computes_what_the_library_computes(family, tokenizer, tmp_path):
    torch.manual_seed(7)
    build, parts = FAMILIES[family]
    model = randomised(build())
    path = write_gguf(tmp_path / "model.gguf", model, tokenizer, parts)
    loaded = load_model(find_model_files(str(path)), dtype="float32")
    assert type(loaded) is type(model)
    assert torch.equal(logits_of(loaded), logits_of(model))


@pytest.mark.parametrize("kind", KINDS)
def test_each_quantisation_is_the_numbers_that_it_stands_for(kind, tokenizer, tmp_path):
    torch.manual_seed(8)
    model, parts = randomised(llama()), GgufParts(kind=kind)
    path = write_gguf(tmp_path / "model.gguf", model, tokenizer, parts)
    files = find_model_files(str(path))
    named = {name: torch.from_numpy(weights) for name, weights, *_ in files.gguf.named_weights()}
    assert named.keys() == parts.numbers.keys()
    assert all(weights.dtype == torch.float32 for weights in named.values())
    model.load_state_dict(parts.numbers)
    assert torch.equal(logits_of(load_model(files, dtype="float32")), logits_of(model))
    served = load_model(files, dtype="bfloat16").state_dict()
    rounded = {name: weights.to(torch.bfloat16) for name, weights in parts.numbers.items()}
    assert all(torch.equal(served[name], weights) for name, weights in rounded.items())


def test_a_folder_with_one_gguf_file_is_that_model_by_the_folders_name(small, tmp_path):
    alone = find_model_files(str(small()))
    folder = tmp_path / "folder"
    folder.mkdir()
    shutil.copy(alone.directory, folder / "any.gguf")
    (folder / "README.md").write_text("who made it")
    within = find_model_files(str(folder))
    assert (alone.name, within.name) == ("tiny.Q8_0", "folder")
    assert within.fingerprint("float32") == alone.fingerprint("float32")
    shutil.copy(alone.directory, folder / "other.gguf")
    with pytest.raises(ModelLoadError, match=r"several GGUF files, any\.gguf, other\.gguf: give"):
        find_model_files(str(folder))


def test_a_folder_with_safetensors_is_not_its_gguf_file(small, tiny_pair, tmp_path):
    folder = shutil.copytree(tiny_pair.target, tmp_path / "folder")
    shutil.copy(small(), folder)
    assert find_model_files(str(folder)).gguf is None


def test_the_fingerprint_covers_what_is_computed_and_not_how_it_is_written(small):
    def fingerprint(**options):
        return find_model_files(str(small(**options))).fingerprint("float32")

    before = fingerprint()
    notes = {"general.name": "renamed", "general.quantized_by": "somebody"}
    assert fingerprint(values=notes | {"general.alignment": 64}) == before
    others = [
        fingerprint(kind="Q8_0"),
        fingerprint(values={"llama.rope.freq_base": 5e5}),
        fingerprint(pre="smollm"),
        fingerprint(values={"tokenizer.ggml.eos_token_id": 0}),
    ]
    assert len({before, *others}) == 1 + len(others)


def test_a_file_that_changes_while_it_is_loaded_is_refused(small):
    path = small()
    files = find_model_files(str(path))
    path.write_bytes(path.read_bytes())
    with pytest.raises(ModelLoadError, match="was changed while the model was loaded"):
        load_model(files, dtype="float32")


def test_tokens_ends_templates_and_sampling_are_found(small, tokenizer):
    files = find_model_files(
        str(
            small(
                values={
                    "tokenizer.ggml.bos_token_id": 297,
                    "tokenizer.ggml.eos_token_id": 0,
                    "tokenizer.ggml.eot_token_id": 299,
                    "tokenizer.ggml.padding_token_id": 298,
                    "tokenizer.ggml.fim_pre_token_id": 290,
                    "tokenizer.ggml.fim_suf_token_id": 291,
                    "tokenizer.ggml.fim_mid_token_id": 292,
                    "tokenizer.chat_template": "{{ bos_token }}{{ messages[0]['content'] }}",
                    "tokenizer.chat_templates": ["tool_use", "../stray"],
                    "tokenizer.chat_template.../stray": "a name that leads elsewhere",
                    "tokenizer.chat_template.tool_use": "with tools",
                    "general.sampling.temp": 0.5,
                    "general.sampling.top_k": 20,
                }
            )
        )
    )
    assert files.tokens.end_ids == (0, 299)
    named = {"bos_token": 297, "eos_token": 0, "pad_token": 298}
    assert files.tokens.named == {name: tokenizer.id_to_token(it) for name, it in named.items()}
    assert (files.tokens.fim.prefix, files.tokens.fim.suffix, files.tokens.fim.middle) == (
        290,
        291,
        292,
    )
    assert files.chat_template.source == "{{ bos_token }}{{ messages[0]['content'] }}"
    assert {*files.templates} == {"default", "tool_use"}
    assert files.templates["tool_use"].source == "with tools"
    assert files.sampling_defaults == {"temperature": 0.5, "top_k": 20}


def test_rows_of_a_head_beyond_the_tokens_are_no_tokens(small, tokenizer):
    tokens = [tokenizer.id_to_token(each) for each in range(290)]
    types = [3, *[1] * 289]
    padded = {
        "tokenizer.ggml.tokens": [*tokens, *(f"[PAD{each}]" for each in range(10))],
        "tokenizer.ggml.token_type": [*types, *[5] * 10],
    }
    files = find_model_files(str(small(values=padded)))
    assert count_tokens(files) == files.vocabulary_size == 290
    assert load_model(files, dtype="float32").config.vocab_size == 300


def plain(model):
    """Leave out what is not set."""
    return {name: value for name, value in model.items() if value not in (None, False)}


def test_a_model_that_is_loaded_has_the_tokenizer_that_it_was_written_with(small, tokenizer):
    files = find_model_files(str(small()))
    text = "def draft(prefix):\n    return target(  12)<|end|>"
    own = Tokenizer.from_str(files.tokenizer.decode())
    assert own.encode(text).ids == tokenizer.encode(text).ids
    assert json.loads(files.tokenizer)["model"] == plain(json.loads(tokenizer.to_str())["model"])
