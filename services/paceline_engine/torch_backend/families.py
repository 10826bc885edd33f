"""What follows from a library model's class and configuration, and the library's own log."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)
from transformers.utils import logging as transformers_logging

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    # Some families have "moe" in the names of all their modules, with experts or without.
    names = (type(module).__name__.lower() for module in model.modules())
    return any("expert" in name or name.endswith("moe") for name in names)


@contextmanager
def quiet_library() -> Iterator[None]:
    """Turn off the library's line for each foreign weight: our own line has a count."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
