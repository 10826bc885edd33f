"""The architecture, and growing a deeper model from a trained shallow one."""

from __future__ import annotations

import copy

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from vocabulary import END_OF_TEXT_ID, PAD_ID, VOCABULARY_SIZE

CONTEXT = 1024
WIDTH = 192
_HEADS = 3
_INITIAL_STD = 0.02
_INHERITED_SHARE = 0.7  # A copied layer's weights keep this share; noise replaces the rest.


def build_model(*, layers: int, width: int = WIDTH) -> LlamaForCausalLM:
    """Build an untrained model of the family: three heads share the width, and MLPs have 8/3 of it.

    Args:
        layers: How deep it is.
        width: A multiple of 6: heads rotate pairs.
    """
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=_HEADS,
        num_key_value_heads=_HEADS,
        head_dim=width // _HEADS,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=_INITIAL_STD,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_TEXT_ID,
        pad_token_id=PAD_ID,
    )
    return LlamaForCausalLM(config)


def grow(source: LlamaForCausalLM, *, layers: int, seed: int) -> LlamaForCausalLM:
    """Make a deeper model that computes exactly what the source computes.

    Layer j of the new model descends from source layer `j * old // layers`. The first descendant
    is that layer; the others are noisy copies whose two output projections are zero, so that they
    add nothing until training moves them. Without the noise copies of one layer would receive the
    same gradient and stay alike.

    Args:
        source: A trained model.
        layers: Layers of the new model, at least as many as the source has.
        seed: Of the noise.

    Invariants:
        The new model's logits equal the source's (`recipe.py` checks it at every growth).
    """
    generator = torch.Generator().manual_seed(seed)
    old = source.config.num_hidden_layers
    grown = build_model(layers=layers)
    grown.model.embed_tokens.load_state_dict(source.model.embed_tokens.state_dict())
    grown.model.norm.load_state_dict(source.model.norm.state_dict())
    previous = -1
    for index, layer in enumerate(grown.model.layers):
        ancestor = index * old // layers
        state = copy.deepcopy(source.model.layers[ancestor].state_dict())
        if ancestor == previous:
            state = {name: _mutate(name, w, generator=generator) for name, w in state.items()}
        layer.load_state_dict(state)
        previous = ancestor
    return grown


def place(
    model: LlamaForCausalLM, device: str, *, dtype: torch.dtype = torch.float32
) -> LlamaForCausalLM:
    """Move a model, in place, and return it."""
    nn.Module.to(model, device=device, dtype=dtype)
    return model


def _mutate(name: str, weight: torch.Tensor, *, generator: torch.Generator) -> torch.Tensor:
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return torch.zeros_like(weight)
    if weight.dim() < 2:
        return weight
    noise = torch.randn(weight.shape, generator=generator).to(weight.device) * weight.std()
    noise_share = (1 - _INHERITED_SHARE**2) ** 0.5  # Keeps the variance.
    return torch.add(weight * _INHERITED_SHARE, noise, alpha=noise_share)
