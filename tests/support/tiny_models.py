"""Tiny random Llama models on disk, made once per test session in milliseconds.

Import the fixtures into a conftest.py to use them. The text is nonsense, but sharp: the two best
logits are far apart, so that rounding does not decide a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

if TYPE_CHECKING:
    from pathlib import Path

_TEXT = ["def draft(prefix):\n    return target(prefix)\n", "import draft, target\n"]
_HEAD_PADDING = 20


@dataclass(frozen=True)
class TinyPair:
    """Directories of a target with four layers, and of a drafter that is its first two."""

    target: Path
    drafter: Path


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    """Give a pair with one tokenizer of 300 tokens; the heads have 20 rows more."""
    root = tmp_path_factory.mktemp("tiny-pair")
    tokenizer = build_tokenizer(300)
    target = build_model(root / "target", tokenizer, layer_count=4, seed=1)
    drafter = build_two_layer_drafter(root / "drafter", target)
    return TinyPair(target, drafter)


@pytest.fixture(scope="session")
def sixteen_token_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a model with a vocabulary of 16, for tests of distributions."""
    words = {f"w{index}": index for index in range(16)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    directory = tmp_path_factory.mktemp("sixteen")
    return build_model(directory, tokenizer, layer_count=2, seed=2, head_padding=0, sharpness=1.0)


def build_tokenizer(size: int) -> Tokenizer:
    """Make a byte-level BPE tokenizer, filled up with special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    missing = size - tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"<|fill-{index}|>" for index in range(missing)])
    return tokenizer


def build_model(
    directory: Path,
    tokenizer: Tokenizer,
    *,
    layer_count: int,
    seed: int,
    head_padding: int = _HEAD_PADDING,
    sharpness: float = 4.0,
) -> Path:
    """Write a random Llama with its tokenizer, and return its directory."""
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size() + head_padding,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layer_count,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        initializer_range=0.1,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.normal_(std=sharpness / config.hidden_size**0.5)
        for layer in list(model.model.layers)[2:]:
            layer.self_attn.o_proj.weight *= 0.25
            layer.mlp.down_proj.weight *= 0.25
    return _save(model, tokenizer, directory)


def build_two_layer_drafter(directory: Path, target_directory: Path) -> Path:
    """Write the first two layers of a model as a model of its own."""
    model = LlamaForCausalLM.from_pretrained(target_directory)
    model.model.layers = model.model.layers[:2]
    model.config.num_hidden_layers = 2
    model.config.layer_types = None
    tokenizer = Tokenizer.from_file(str(target_directory / "tokenizer.json"))
    return _save(model, tokenizer, directory)


def build_wide_model(directory: Path) -> Path:
    """Write a Llama of one layer with weights so large that they are packed."""
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=1024,
        intermediate_size=1024,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
    )
    torch.manual_seed(1)
    return _save(LlamaForCausalLM(config), build_tokenizer(512), directory)


def _save(model: LlamaForCausalLM, tokenizer: Tokenizer, directory: Path) -> Path:
    model.save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory
