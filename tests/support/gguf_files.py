"""Writes models as GGUF files, as llama.cpp's converter does: with the `gguf` package's writer."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

if TYPE_CHECKING:
    from pathlib import Path

    from tokenizers import Tokenizer

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_PERMUTED = frozenset({"granite", "llama", "smollm3"})
# Where a block of a quantisation has numbers of 16 bits that multiply the others.
_SCALES = {
    "Q4_K": (144, 256, (0, 2)),
    "Q5_K": (176, 256, (0, 2)),
    "Q6_K": (210, 256, (208,)),
}


@dataclass
class GgufParts:
    """What a file is written of.

    Attributes:
        kind: How weights are quantised.
        kinds: How some are, by their module's last name: "v_proj", "lm_head".
        values: Metadata beside the sizes and the tokenizer, or in their place; None: leave it out.
        tensors: Arrays beside the model's, by name.
        numbers: The weights as the file has them, by the library's names: filled when written.
    """

    architecture: str = "llama"
    kind: str = "F32"
    kinds: dict[str, str] = field(default_factory=dict)
    pre: str = "gpt-2"
    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    numbers: dict[str, torch.Tensor] = field(default_factory=dict)


def write_gguf(path: Path, model: Any, tokenizer: Tokenizer, parts: GgufParts) -> Path:
    """Write a model of the library as a GGUF file."""
    writer = gguf.GGUFWriter(path, parts.architecture)
    known = _sizes(model.config, parts.architecture) | _tokenizer(tokenizer, parts.pre)
    for key, value in (known | parts.values).items():
        if value is not None:
            _add(writer, key, value)
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    is_tied = model.config.tie_word_embeddings
    for name, weight in model.state_dict().items():
        if is_tied and name == "lm_head.weight":
            continue
        own = name.split(".")[-2]
        kind = parts.kinds.get(own, parts.kind)
        stored, numbers = _quantised(weight.float().numpy(), kind)
        parts.numbers[name] = torch.from_numpy(numbers.copy())
        if is_tied and name == "model.embed_tokens.weight":
            parts.numbers["lm_head.weight"] = parts.numbers[name]
        if parts.architecture in _PERMUTED and own in heads:
            stored = _permuted(stored, heads[own])
        raw = Kind.F32 if weight.ndim == 1 else Kind[kind]
        writer.add_tensor(_gguf_name(name), stored, raw_dtype=raw)
    for name, array in parts.tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str) -> str:
    *parts, kind = name.split(".")
    if parts[:2] == ["model", "layers"]:
        return f"blk.{parts[2]}.{_NAMES['.'.join(parts[3:])]}.{kind}"
    return f"{_NAMES['.'.join(parts)]}.{kind}"


def _quantised(numbers: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Return what is stored, and the numbers that it stands for."""
    if numbers.ndim == 1:
        return numbers, numbers
    if kind not in _SCALES:
        stored = gguf.quantize(numbers, Kind[kind])
        if kind in {"F32", "F16"}:
            return stored, stored.astype(np.float32)
        return stored, gguf.dequantize(stored, Kind[kind])
    # The package cannot make these, and knows them: any bytes mean some numbers.
    block_bytes, block, places = _SCALES[kind]
    rows, columns = numbers.shape
    generator = np.random.default_rng(rows * columns)
    stored = generator.integers(0, 256, (rows, columns // block, block_bytes), dtype=np.uint8)
    for place in places:
        stored[..., place : place + 2] = np.full(1, 2e-4, np.float16).view(np.uint8)
    stored = stored.reshape(rows, -1)
    return stored, gguf.dequantize(stored, Kind[kind])


def _permuted(stored: np.ndarray, head_count: int) -> np.ndarray:
    """Let the two halves of each head's rows alternate, as the converter does for Llama."""
    halves = stored.reshape(head_count, 2, stored.shape[0] // head_count // 2, *stored.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(stored.shape))


def _sizes(config: Any, architecture: str) -> dict[str, Any]:
    sizes = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": getattr(config, "head_dim", None),
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    return {f"{architecture}.{key}": value for key, value in sizes.items()}


def _tokenizer(tokenizer: Tokenizer, pre: str) -> dict[str, Any]:
    said = json.loads(tokenizer.to_str())
    added = {each["id"]: each["special"] for each in said["added_tokens"]}
    tokens = [tokenizer.id_to_token(each) for each in range(tokenizer.get_vocab_size())]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [
            (3 if added[each] else 4) if each in added else 1 for each in range(len(tokens))
        ],
        "tokenizer.ggml.merges": [
            each if isinstance(each, str) else " ".join(each) for each in said["model"]["merges"]
        ],
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if key == "general.alignment":
        writer.add_custom_alignment(value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
