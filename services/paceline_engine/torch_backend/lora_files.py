"""Reads the weights of LoRA adapters, and refuses those that are not for the model."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load
from torch import Tensor, nn

from paceline_engine.model_files.lora_folder import LORA_WEIGHTS
from paceline_engine.model_files.small_files import read_content
from paceline_engine.terms.backend import ModelLoadError, few_names, first_line
from paceline_engine.torch_backend.memory import free_memory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline_engine.model_files.lora_folder import LoraFolder

_MOST_BYTES = 4 << 30
# The file's content and its tensors are in memory together.
_COPIES_OF_FILE = 2
# The factors, and at most three times as much where those of q, k and v become one with zeros.
_COPIES_OF_FACTORS = 4
_KNOWN_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_PREFIX = "base_model.model."
_KEY = re.compile(r"(?P<module>[\w.-]+)\.lora_(?P<half>[AB])(\.default)?\.weight")
# An embedding looks up, lm_head computes the scored rows alone, and an expert those that chose it.
_REFUSED_MODULES = frozenset({"embed_tokens", "lm_head", "wte", "embed_in", "embed_out", "experts"})


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """An adapter's factors by the linear modules that they belong to.

    Attributes:
        name: By which requests ask for it.
        digest: SHA-256 of all that decides what it adds.
        factors: For each module A, (R, inputs), and B with the scale, (outputs, R): in the model's
            dtype, on its device.
    """

    name: str
    digest: str
    factors: Mapping[str, tuple[Tensor, Tensor]]


@torch.inference_mode()
def load_lora(folder: LoraFolder, model: Any, *, device: torch.device) -> LoraAdapter:
    """Load an adapter for a loaded model.

    Args:
        model: Of the transformers library; its linear modules may have lost their weights.
        device: Where it computes.

    Raises:
        ModelLoadError: The file is too large, damaged, or not for this model.
    """
    told = f"LoRA adapter {folder.name!r}"
    most_bytes = free_memory(torch.device("cpu")).byte_count // _COPIES_OF_FILE
    packed = read_content(folder.weights, most_bytes=min(_MOST_BYTES, most_bytes))
    try:
        state = load(packed)
    except Exception as error:  # a file is a stranger's, and may break anything
        reason = first_line(error)
        raise ModelLoadError(f"{told}: {LORA_WEIGHTS} cannot be loaded: {reason}") from error
    del packed
    halves = _halves(told, state)
    modules = {name: _linear(told, model, name) for name in halves}
    _refuse_other_numbers(told, state)
    needed = _COPIES_OF_FACTORS * model.dtype.itemsize * sum(it.numel() for it in state.values())
    if needed > (free := free_memory(device).byte_count):
        raise ModelLoadError(f"{told}: its weights take {needed} bytes, and {free} are free")
    digest = hashlib.sha256()
    factors = {}
    for name, (down, up) in sorted(halves.items()):
        scale = folder.scale_of(name)
        _check_shapes(told, name, modules[name], down=down, up=up, rank=folder.rank_of(name))
        digest.update(json.dumps([name, scale, *map(_content_digest, (down, up))]).encode())
        scaled = up.to(torch.promote_types(up.dtype, torch.float32)) * scale
        factors[name] = (down.to(device, model.dtype), scaled.to(device, model.dtype))
        if not all(bool(torch.isfinite(each).all()) for each in factors[name]):
            raise ModelLoadError(
                f"{told}: {name[:120]} has weights that are no numbers, or with scale {scale:g}"
                f" too large for {model.dtype}"
            )
    return LoraAdapter(folder.name, digest.hexdigest(), factors)


def lora_fingerprint(model_fingerprint: str, adapter: LoraAdapter) -> str:
    """Return the fingerprint of a model with an adapter."""
    return hashlib.sha256(json.dumps([model_fingerprint, adapter.digest]).encode()).hexdigest()


def _halves(told: str, state: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A and B of each module, by its name in the model."""
    if not state:
        raise ModelLoadError(f"{told}: {LORA_WEIGHTS} is empty")
    found: dict[str, dict[str, Tensor]] = {}
    foreign = []
    for key, tensor in state.items():
        match = _KEY.fullmatch(key)
        if match is None:
            foreign.append(key)
            continue
        half, module = match["half"], match["module"].removeprefix(_PREFIX)
        if half in found.setdefault(module, {}):
            raise ModelLoadError(f"{told}: {LORA_WEIGHTS} has {module[:120]} lora_{half} twice")
        found[module][half] = tensor
    if foreign:
        raise ModelLoadError(
            f"{told}: {LORA_WEIGHTS} has weights that are no factors of LoRA:"
            f" {few_names(map(repr, foreign))}"
        )
    if halved := [name for name, halves in found.items() if len(halves) == 1]:
        raise ModelLoadError(f"{told}: one of two factors is missing of {few_names(halved)}")
    return {name: (halves["A"], halves["B"]) for name, halves in found.items()}


def _linear(told: str, model: Any, name: str) -> nn.Linear:
    """Return a module that an adapter changes."""
    if not _REFUSED_MODULES.isdisjoint(name.split(".")):
        raise ModelLoadError(f"{told}: adapters of {name[:120]} are not supported")
    try:
        module = model.get_submodule(name)
    except AttributeError:
        raise ModelLoadError(f"{told} is for another model: this one has no {name[:120]}") from None
    if type(module) is not nn.Linear:
        raise ModelLoadError(f"{told}: {name[:120]} is no linear module, and others are not known")
    return module


def _check_shapes(
    told: str, name: str, module: nn.Linear, *, down: Tensor, up: Tensor, rank: int
) -> None:
    wanted = ((rank, module.in_features), (module.out_features, rank))
    for half, tensor, shape in zip("AB", (down, up), wanted, strict=True):
        if tensor.shape != shape:
            raise ModelLoadError(
                f"{told}: lora_{half} of {name[:120]} is {list(tensor.shape)}, and with this model"
                f" and rank {rank} it is {list(shape)}"
            )


def _refuse_other_numbers(told: str, state: Mapping[str, Tensor]) -> None:
    for key, tensor in state.items():
        if tensor.dtype not in _KNOWN_DTYPES:
            known = ", ".join(str(each).removeprefix("torch.") for each in _KNOWN_DTYPES)
            raise ModelLoadError(f"{told}: {key[:120]} is of {tensor.dtype}, not of {known}")


def _content_digest(tensor: Tensor) -> list[object]:
    """Digest what a tensor holds, and how."""
    content = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return [str(tensor.dtype), list(tensor.shape), hashlib.sha256(content).hexdigest()]
