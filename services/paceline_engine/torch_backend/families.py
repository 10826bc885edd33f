"""What follows from a library model's class and configuration."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

_FAMILY = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
# Rotations that are others in a longer sequence.
_CHANGING = frozenset({"dynamic", "longrope"})


def can_fuse(model: Any) -> bool:
    """Whether a model is one that FusedLlama computes alike."""
    if type(model) not in _FAMILY:
        return False
    config = model.config
    layer_types = getattr(config, "layer_types", None) or ()
    plain_weights = all(
        type(module) is nn.Linear
        for name, module in model.named_modules()
        if name.endswith(("_proj", "lm_head"))
    )
    return (
        plain_weights
        and {*layer_types} <= {"full_attention"}
        and (type(model) is not MistralForCausalLM or config.sliding_window is None)
        and not rotations_change(config)
    )


def rotations_change(config: Any) -> bool:
    """Whether a token's rotation depends on the longest sequence of the forward."""
    parameters = getattr(config, "rope_parameters", None) or {}
    # One set, or one for each kind of layer.
    sets = [parameters, *(each for each in parameters.values() if isinstance(each, dict))]
    return any(each.get("rope_type") in _CHANGING for each in sets)


def has_experts(model: Any) -> bool:
    """Whether some layer's products have as many rows as chose an expert."""
    names = (type(module).__name__.lower() for module in model.modules())
    return any("experts" in name or "moe" in name for name in names)
