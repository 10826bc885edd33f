"""A GGUF file that is broken, foreign or hostile is refused in one line, at no cost."""

from __future__ import annotations

import os
import random
import struct
import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline_engine.model_files.files import find_model_files
from paceline_engine.model_files.gguf_file import GgufFile
from paceline_engine.terms.backend import ModelLoadError
from support.gguf_files import GgufParts, write_gguf
from support.tiny_models import build_tokenizer

HUGE = 1 << 60
UINT32, FLOAT32, STRING, ARRAY = 4, 6, 8, 9


def text(value):
    content = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(content)) + content


def pair(key, kind, value):
    return text(key) + struct.pack("<I", kind) + value


def items(kind, count, content=b""):
    return struct.pack("<IQ", kind, count) + content


def info(name, shape, kind, offset):
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dimensions + struct.pack("<IQ", kind, offset)


def header(*pairs, infos=(), version=3, keys=None, tensors=None):
    counts = (len(infos) if tensors is None else tensors, len(pairs) if keys is None else keys)
    start = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join((*pairs, *infos))
    return start + bytes(-len(start) % 32)


LLAMA = pair("general.architecture", STRING, text("llama"))
BROKEN = {
    b"": "no GGUF file: it begins with b''",
    b"GGU": "no GGUF file: it begins with b'GGU'",
    b"PK\x03\x04" + bytes(99): "no GGUF file",
    b"tjgg" + bytes(99): "of a format older than GGUF: convert the model again",
    b"version https://git-lfs.github.com/spec/v1\noid": "Git LFS pointer",
    b"GGUF": "cut off: it has 4 bytes, and ends in its header",
    header(version=1): "of GGUF version 1, and 2 and 3 are known",
    header(version=4): "of GGUF version 4, and 2 and 3 are known",
    b"GGUF" + struct.pack(">IQQ", 3, 0, 0): "written for big-endian machines",
    header(keys=HUGE): f"it says that it has 0 tensors and {HUGE} keys",
    header(tensors=HUGE): f"it says that it has {HUGE} tensors and 0 keys",
    header(keys=9000): "cut off",
    header(LLAMA, LLAMA): "it has the key 'general.architecture' twice",
    header(pair("k" * 2000, UINT32, bytes(4))): "a key' has 2000 bytes",
    header(pair("k", STRING, struct.pack("<Q", HUGE))): "has 1152921504606846976 bytes",
    header(pair("k", STRING, text(b"\xff"))): "'k' is no text",
    header(pair("k", 99, bytes(8))): "'k' is of an unknown type, 99",
    header(pair("k", ARRAY, items(ARRAY, 1, items(UINT32, 0)))): "'k' is of an unknown type, 9",
    header(pair("k", ARRAY, items(UINT32, HUGE))): f"'k' has {HUGE} items",
    header(pair("k", ARRAY, items(STRING, HUGE))): f"'k' has {HUGE} items",
    header(pair("k", ARRAY, items(UINT32, 1 << 22))): "cut off",
    header(pair("k", ARRAY, items(STRING, 1 << 22))): "cut off",
    header(
        pair("general.alignment", UINT32, struct.pack("<I", 48))
    ): "alignment is 48, and no power",
    header(pair("general.alignment", UINT32, bytes(4))): "general.alignment is 0",
    header(infos=[info("w", (HUGE, 32), 0, 0)]): "cut off",
    header(infos=[info("w", (32,), 0, HUGE)]): "does not follow the one before it",
    header(infos=[info("w", (), 0, 0)]): "tensor 'w' has 0 dimensions",
    header(infos=[info("w", (1,) * 5, 0, 0)]): "tensor 'w' has 5 dimensions",
    header(infos=[info("w", (0, 32), 0, 0)]): r"'w', F32, cannot have the shape \[32, 0\]",
    header(infos=[info("w", (33,), 2, 0)]): r"'w', Q4_0, cannot have the shape \[33\]",
    header(infos=[info("w", (32,), 99, 0)]): "tensor 'w' is type 99, which cannot be dequantised",
    header(infos=[info("w", (32,), 24, 0)]): "tensor 'w' is I8, which cannot be dequantised",
    header(infos=[info("w", (8,), 0, 0)] * 2): "it has the tensor 'w' twice",
    header(infos=[info("v", (8,), 0, 0), info("w", (8,), 0, 0)]) + bytes(64): "does not follow",
    header(infos=[info("w", (8,), 0, 0)]) + bytes(31): "cut off: it has",
    header(infos=[info("w", (8,), 0, 0)]) + bytes(33): "too long: it has",
}


def refusal_of(path):
    """Return why a file is refused, and check that it is one line and cost no memory."""
    tracemalloc.start()
    try:
        with pytest.raises(ModelLoadError) as refusal:
            find_model_files(str(path))
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 600
    return str(refusal.value)


@pytest.mark.parametrize(("content", "reason"), BROKEN.items(), ids=range(len(BROKEN)))
def test_a_broken_header_is_refused_by_what_is_wrong_with_it(content, reason, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=reason):
        find_model_files(str(path))
    assert refusal_of(path).startswith(str(path))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Give a function that writes a good file with some metadata of its own."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    model, tokenizer = LlamaForCausalLM(config), build_tokenizer(300)
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    return lambda **options: write_gguf(path, model, tokenizer, GgufParts(**options))


def test_a_file_that_is_cut_off_anywhere_is_refused(whole, tmp_path):
    content = whole().read_bytes()
    path = tmp_path / "cut.gguf"
    for length in (*range(0, 4096, 61), *range(4096, len(content) - 32, 4999)):
        path.write_bytes(content[:length])
        with pytest.raises(ModelLoadError, match=r"cut off|no GGUF file"):
            find_model_files(str(path))


def test_a_file_with_wrong_bytes_is_refused_or_means_something(whole, tmp_path):
    content, draws = bytearray(whole().read_bytes()), random.Random(3)
    path, refused = tmp_path / "bad.gguf", 0
    for _ in range(300):
        wrong = content.copy()
        for _ in range(draws.randrange(1, 4)):
            wrong[draws.randrange(4, 12_000)] = draws.randrange(256)
        path.write_bytes(wrong)
        with suppress(ModelLoadError):
            find_model_files(str(path))
            refused -= 1
        refused += 1
    assert refused > 50


FOREIGN = {
    "another architecture": ({"general.architecture": "mamba"}, "architecture 'mamba'; known are"),
    "an adapter": ({"general.type": "adapter"}, "holds no model: its general.type is 'adapter'"),
    "a part": ({"split.count": 3}, "one of 3 parts of a model: merge them first"),
    "an unknown key": (
        {"llama.attention.sliding_window": 9},
        "llama.attention.sliding_window means",
    ),
    "experts": ({"llama.expert_count": 8}, "what llama.expert_count means is unknown"),
    "no context length": (
        {"llama.context_length": None},
        "llama.context_length is None, no number",
    ),
    "a huge size": ({"llama.feed_forward_length": 4_000_000_000}, "is 4000000000, no number in"),
    "another size": ({"llama.feed_forward_length": 64}, "is of another shape than its keys say"),
    "heads that do not fit": ({"llama.attention.head_count_kv": 3}, "do not fit together"),
    "many layers": ({"llama.block_count": 60_000}, "block_count is 60000, no number in [1, 21]"),
    "a layer too many": (
        {"llama.block_count": 3},
        "lacks model.layers.2.input_layernorm.weight, model.layers.2.mlp.down_proj.weight",
    ),
    "fewer layers": ({"llama.block_count": 1}, "is none of a llama model's"),
    "partial rotations": ({"llama.rope.dimension_count": 8}, "is not the size of a head, 16"),
    "unknown positions": (
        {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0},
        "llama.rope.scaling.type is 'longrope', which is unknown",
    ),
    "no epsilon": ({"llama.attention.layer_norm_rms_epsilon": 0.0}, "is 0.0, no number above 0"),
    "another tokenizer": ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model is 'bert'"),
    "no tokens": ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is not a list of str"),
    "tokens twice": ({"tokenizer.ggml.tokens": ["a"] * 300}, "two of its tokens are the same"),
    "no types": ({"tokenizer.ggml.token_type": None}, "token_type is not a list of int values"),
    "letters that are exchanged": (
        {"tokenizer.ggml.precompiled_charsmap": [1, 2]},
        "what tokenizer.ggml.precompiled_charsmap means is unknown",
    ),
    "few types": ({"tokenizer.ggml.token_type": [1]}, "300 tokens have 1 types"),
    "an end beyond": ({"tokenizer.ggml.eos_token_id": 300}, "eos_token_id is 300, and it has 300"),
    "a merge of three": ({"tokenizer.ggml.merges": ["a b c"]}, "merges is not of two tokens"),
    "a large template": ({"tokenizer.chat_template": "x" * 300_000}, "has more than 262144 bytes"),
}


@pytest.mark.parametrize(("values", "reason"), FOREIGN.values(), ids=FOREIGN)
def test_a_model_that_cannot_be_served_is_refused_by_name(values, reason, whole):
    assert reason in refusal_of(whole(values=values))


def test_a_tensor_that_is_none_of_the_models_is_refused(whole):
    stray = np.zeros(8, dtype=np.float32)
    path = whole(tensors={"blk.0.attn_sinks.weight": stray})
    assert "its tensor 'blk.0.attn_sinks.weight' is none of a llama model's" in refusal_of(path)
    path = whole(tensors={"rope_freqs.weight": stray + 3})
    assert "what rope_freqs.weight does to positions is unknown" in refusal_of(path)


def test_what_is_no_file_is_refused(tmp_path):
    assert "No such file" in refusal_of(tmp_path / "none.gguf")
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "is not a regular file" in refusal_of(tmp_path / "pipe.gguf")
    (tmp_path / "notes.txt").write_text("These are no weights.")
    assert "is no GGUF file: it begins with b'Thes'" in refusal_of(tmp_path / "notes.txt")


def test_a_file_that_shrinks_before_it_is_read_is_refused(whole, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(whole().read_bytes())
    file = GgufFile.read(path)
    os.truncate(path, path.stat().st_size // 2)
    last = max(file.tensors.values(), key=lambda each: each.begin)
    with pytest.raises(ModelLoadError, match="was changed while the model was loaded"):
        file.weights(last.name)
