"""Tiny LoRA adapters on disk, as PEFT writes them, and the models that they are merged into.

The merged model is the oracle: another folder whose plain weights are W + scale * B A, made here by
the definition, in float64, without anything of the engine.
"""

from __future__ import annotations

import json
import re
import shutil
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

if TYPE_CHECKING:
    from pathlib import Path

EVERY_PROJECTION = r".*\.(q|k|v|o|gate|up|down)_proj"


def write_lora(
    directory: Path,
    model_directory: Path,
    *,
    seed: int = 1,
    rank: int = 4,
    alpha: float = 8,
    modules: str = EVERY_PROJECTION,
    ranks: dict[str, int] | None = None,
    strength: float = 0.6,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """Write a random adapter that changes what a model says, and return its directory.

    Args:
        modules: A pattern of the linear modules that it changes.
        ranks: The ranks of modules, by the ends of their names, where they are others.
        config: What its adapter_config.json says besides, or instead.
    """
    model = AutoModelForCausalLM.from_pretrained(model_directory)
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, module in model.named_modules():
        if not (isinstance(module, torch.nn.Linear) and re.fullmatch(modules, name)):
            continue
        own = next((it for end, it in (ranks or {}).items() if name.endswith(f".{end}")), rank)
        for half, shape in {
            "A": (own, module.in_features),
            "B": (module.out_features, own),
        }.items():
            drawn = torch.randn(shape, generator=generator) * strength / shape[1] ** 0.5
            state[f"base_model.model.{name}.lora_{half}.weight"] = drawn.to(dtype)
    said = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "nobody/knows",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.05,
        "target_modules": ["q_proj"],
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "rank_pattern": ranks or {},
        "alpha_pattern": {},
        "init_lora_weights": True,
        "megatron_config": None,
        "megatron_core": "megatron.core",
        "inference_mode": True,
    }
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text(json.dumps(said | config))
    save_file(state, directory / "adapter_model.safetensors")
    return directory


@torch.no_grad()
def merge(model_directory: Path, lora: Path, directory: Path) -> Path:
    """Write the model that an adapter makes of a model, with plain weights."""
    config = json.loads((lora / "adapter_config.json").read_text())
    state = load_file(lora / "adapter_model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(model_directory)
    for name, module in model.named_modules():
        key = f"base_model.model.{name}.lora_{{}}.weight"
        if key.format("A") not in state:
            continue
        down, up = (state[key.format(half)].double() for half in "AB")
        alpha = next(
            (it for end, it in config["alpha_pattern"].items() if name.endswith(end)),
            config["lora_alpha"],
        )
        divisor = len(down) ** 0.5 if config["use_rslora"] else len(down)
        module.weight.copy_(module.weight.double() + alpha / divisor * up @ down)
    model.save_pretrained(directory)
    shutil.copy(model_directory / "tokenizer.json", directory)
    return directory
