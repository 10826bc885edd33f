"""Tiny models in memory, and adapters with all sorts of weights."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from paceline_engine.model_files.files import find_model_files
from paceline_engine.torch_backend.adapters.card import AdapterCard, model_fingerprint
from paceline_engine.torch_backend.adapters.eagle_shape import EagleShape
from paceline_engine.torch_backend.adapters.files import WEIGHTS_FILE, build_adapter, pack_weights


def tiny_model(*, dtype=torch.float64, **settings):
    """Build a random model of four layers, with two heads to each key."""
    torch.manual_seed(5)
    sizes = {
        "vocab_size": 40,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **settings}))
    return model.to(dtype).requires_grad_(False).eval()


def eagle_adapter(model, *, reach=3, token_ids=range(1, 31), **shape):
    """Build an EAGLE head that can guess some tokens; its weights are still to be set."""
    like = EagleShape.like(model.config, draft_vocabulary=len(token_ids))
    sizes = {"reach": reach, "layers": 0, "rank": 0, "exit_rank": 0}
    adapter = build_adapter("eagle", model, **sizes, eagle=replace(like, **shape))
    adapter.choose_tokens(torch.tensor([*token_ids]))
    return adapter


def random_adapter(kind, model, *, reach=3, layers=2, rank=4, exit_rank=2, **shape):
    """Build an adapter all of whose weights do something."""
    if kind == "eagle":
        adapter = eagle_adapter(model, reach=reach, **shape).to(model.dtype)
    else:
        adapter = build_adapter(
            kind, model, reach=reach, layers=layers, rank=rank, exit_rank=exit_rank
        ).to(model.dtype)
    generator = torch.Generator().manual_seed(7)
    adapter.start_from(model, generator=generator)
    for parameter in adapter.parameters():
        noise = torch.empty_like(parameter).normal_(std=0.3, generator=generator)
        parameter.data.add_(noise)
    return adapter.requires_grad_(False)


def write_adapter(directory, model_directory, *, kind, tree, reach=3, rank=4, shape=None, **card):
    """Write a random adapter for a model on disk, and return its directory."""
    model = AutoModelForCausalLM.from_pretrained(model_directory)
    adapter = random_adapter(kind, model, reach=reach, rank=rank, **(shape or {}))
    packed, checksum = pack_weights(adapter, dtype=torch.float32)
    directory.mkdir()
    (directory / WEIGHTS_FILE).write_bytes(packed)
    has_streams = kind == "streams"
    said = {
        "kind": kind,
        "model": "tiny",
        "fingerprint": model_fingerprint(find_model_files(str(model_directory), revision=None)),
        "reach": reach,
        "layers": adapter.upper_layers,
        "rank": rank * has_streams,
        "exit_rank": 2 * has_streams,
        "tree": tree,
        "weights_sha256": checksum,
        "training": {},
        "eagle": getattr(adapter, "shape", None),
    }
    AdapterCard(**{**said, **card}).write(directory)
    return directory
