"""Writes folders of quantised models, number by number, in the layouts that people's tools write.

Each folder has a twin with the numbers that the quantised weights stand for, as plain safetensors.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

GROUP = 32
BLOCK = 48  # no divisor of any side
SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
"""Of a Llama whose inputs make groups, in the words of its configuration."""
_AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass
class Weight:
    """A quantised weight: what is stored, and what it stands for.

    Attributes:
        parts: Tensors by the last part of their names.
        numbers: (O, I) float32.
        whole: The whole numbers, (O, I); None: there are none.
    """

    parts: dict[str, torch.Tensor]
    numbers: torch.Tensor
    whole: torch.Tensor | None = None


@dataclass(frozen=True)
class Layout:
    """How to write a weight, and what config.json says of it."""

    write: Callable[[np.ndarray], Weight]
    config: Mapping[str, Any]


def write_folder(model: Any, tokenizer: Any, folder: Path, layout: Layout) -> dict[str, Weight]:
    """Write a model of the library to `folder / "quantised"` and its twin to `folder / "plain"`."""
    quantised, plain = folder / "quantised", folder / "plain"
    model.save_pretrained(plain)
    tokenizer.save(str(plain / "tokenizer.json"))
    tensors = load_file(plain / "model.safetensors")
    weights = {
        name.removesuffix(".weight"): layout.write(each.float().numpy())
        for name, each in tensors.items()
        if name.endswith("proj.weight")
    }
    quantised.mkdir()
    kept = {name: each for name, each in tensors.items() if not name.endswith("proj.weight")}
    stored = {
        f"{module}.{part}": tensor.contiguous()
        for module, weight in weights.items()
        for part, tensor in weight.parts.items()
    }
    save_file(kept | stored, quantised / "model.safetensors")
    twins = {f"{module}.weight": weight.numbers for module, weight in weights.items()}
    save_file(kept | twins, plain / "model.safetensors")
    for path in plain.glob("*.json"):
        (quantised / path.name).write_text(path.read_text())
    config = json.loads((plain / "config.json").read_text())
    written = {**config, "quantization_config": layout.config}
    (quantised / "config.json").write_text(json.dumps(written))
    return weights


def _words(numbers: np.ndarray, *, bits: int, places: tuple[int, ...] | None = None) -> Any:
    """Pack unsigned numbers of a row, in such places, into words of 32 bits."""
    count = 32 // bits
    order = places or tuple(range(count))
    rows, columns = numbers.shape
    words = np.zeros((rows, -(-columns // count)), dtype=np.uint32)
    for word in range(words.shape[1]):
        for place, column in enumerate(order):
            if word * count + column < columns:
                found = numbers[:, word * count + column].astype(np.uint32)
                words[:, word] |= found << np.uint32(bits * place)
    return torch.from_numpy(words.view(np.int32).copy())


def _rounded(
    weight: np.ndarray, *, group: int, low: int, high: int, shift: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return whole numbers, scales and zero points of groups of inputs; scales as in float16."""
    outputs, inputs = weight.shape
    grouped = weight.reshape(outputs, inputs // group, group)
    if shift:
        least, most = grouped.min(-1), grouped.max(-1)
        scales = ((most - least) / (high - low)).astype(np.float16).astype(np.float32)
        zeros = np.clip(np.round(low - least / scales), low, high)
    else:
        scales = (np.abs(grouped).max(-1) / high).astype(np.float16).astype(np.float32)
        zeros = np.zeros_like(scales)
    whole = np.clip(np.round(grouped / scales[..., None] + zeros[..., None]), low, high)
    return whole.reshape(outputs, inputs), scales, zeros


def _meant(whole: Any, scales: Any, zeros: Any, groups: Any) -> torch.Tensor:
    """Return what numbers stand for, computed in float64 and rounded once."""
    found = (whole.astype(np.float64) - zeros[:, groups]) * scales[:, groups].astype(np.float64)
    return torch.from_numpy(found.astype(np.float32))


def _groups(inputs: int, group: int, *, shuffled: bool = False) -> np.ndarray:
    groups = np.arange(inputs) // group
    return np.random.default_rng(3).permutation(groups) if shuffled else groups


def _whole_in_order(weight: np.ndarray) -> Weight:
    """Return numbers of eight bits that are not packed, whose groups do not lie side by side."""
    whole, scales, zeros = _rounded(weight, group=GROUP, low=-128, high=127)
    groups = _groups(weight.shape[1], GROUP, shuffled=True)
    parts = {
        "weight": torch.from_numpy(whole.astype(np.int8)),
        "weight_scale": torch.from_numpy(scales),
        "weight_g_idx": torch.from_numpy(groups.astype(np.int32)),
    }
    return Weight(parts, _meant(whole, scales, zeros, groups))


def _without_order(weight: np.ndarray) -> Weight:
    """Return packed numbers with the tensor of an order, as it is where there is none."""
    found = _packed(weight)
    found.parts["weight_g_idx"] = torch.full(weight.shape[1:], -1, dtype=torch.int32)
    return found


def _w8a8(weight: np.ndarray, *, of_outputs: bool = True) -> Weight:
    whole, scales, zeros = _rounded(weight, group=weight.shape[1], low=-128, high=127)
    whole[0, 0] = -128  # tools write it, though no rounding here makes it
    if not of_outputs:
        scales[:] = scales.max()
    stored = torch.from_numpy(whole.astype(np.int8))
    parts = {
        "weight": stored,
        "weight_scale": torch.from_numpy(scales if of_outputs else scales[:1, 0]),
    }
    return Weight(parts, _meant(whole, scales, zeros, _groups(weight.shape[1], 1 << 30)), stored)


def _packed(
    weight: np.ndarray, *, bits: int = 4, group: int | None = GROUP, shift: bool = False,
    shuffled: bool = False,
) -> Weight:  # fmt: skip
    outputs, inputs = weight.shape
    low, high = -(1 << bits - 1), (1 << bits - 1) - 1
    group = group or inputs
    whole, scales, zeros = _rounded(weight, group=group, low=low, high=high, shift=shift)
    groups = _groups(inputs, group, shuffled=shuffled)
    parts = {
        "weight_packed": _words(whole - low, bits=bits),
        "weight_scale": torch.from_numpy(scales).half(),
        "weight_shape": torch.tensor([outputs, inputs]),
    }
    if shift:
        parts["weight_zero_point"] = _words((zeros - low).T, bits=bits).T
    if shuffled:
        parts["weight_g_idx"] = torch.from_numpy(groups.astype(np.int32))
    return Weight(parts, _meant(whole, scales, zeros, groups))


def _gptq(
    weight: np.ndarray, *, bits: int = 4, less_one: int = 1, shuffled: bool = False
) -> Weight:
    inputs = weight.shape[1]
    # No zero point may be 0: less one it would borrow from the next.
    whole, scales, zeros = _rounded(weight, group=GROUP, low=1, high=(1 << bits) - 1, shift=True)
    groups = _groups(inputs, GROUP, shuffled=shuffled)
    parts = {
        "qweight": _words(whole, bits=bits).T,
        "qzeros": _words((zeros - less_one).T, bits=bits),
        "scales": torch.from_numpy(scales.T.copy()).half(),
        "g_idx": torch.from_numpy(groups.astype(np.int32)),
    }
    return Weight(parts, _meant(whole, scales, zeros, groups))


def _awq(weight: np.ndarray) -> Weight:
    whole, scales, zeros = _rounded(weight, group=GROUP, low=0, high=15, shift=True)
    parts = {
        "qweight": _words(whole.T, bits=4, places=_AWQ_PLACES),
        "qzeros": _words(zeros.T, bits=4, places=_AWQ_PLACES),
        "scales": torch.from_numpy(scales.T.copy()).half(),
    }
    return Weight(parts, _meant(whole, scales, zeros, _groups(weight.shape[1], GROUP)))


def _fp8(
    weight: np.ndarray, *, rows: int, columns: int, name: str, is_scalar: bool = False
) -> Weight:
    outputs, inputs = weight.shape
    counts = -(-outputs // rows), -(-inputs // columns)
    scales = np.random.default_rng(outputs).uniform(0.5, 2, counts).astype(np.float32) * 2e-3
    cells = np.arange(outputs)[:, None] // rows, np.arange(inputs)[None] // columns
    spread = scales[cells]
    stored = torch.from_numpy(weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    numbers = stored.double() * torch.from_numpy(spread).double()
    scale = torch.from_numpy(scales)
    return Weight(
        {"weight": stored, name: scale.reshape(()) if is_scalar else scale}, numbers.float()
    )


def _compressed(
    kind: str, form: str, *, rows: Mapping[str, Any] | None = None, **weights: Any
) -> Any:
    group = {"targets": ["Linear"], "weights": {"type": kind, **weights}, "input_activations": rows}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
    }


_EIGHT = {"type": "int", "num_bits": 8, "dynamic": True, "strategy": "token"}
_FP8_ROWS = {"type": "float", "num_bits": 8, "dynamic": True}
_PACKED = _compressed("int", "pack-quantized", num_bits=4, group_size=GROUP)
_SCALE, _INVERSE = "weight_scale", "weight_scale_inv"
_WHOLE = 1 << 20  # larger than any side

LAYOUTS = {
    "w8a8": Layout(_w8a8, _compressed("int", "int-quantized", rows=_EIGHT, num_bits=8)),
    "w8a8, one scale": Layout(
        lambda weight: _w8a8(weight, of_outputs=False),
        _compressed("int", "int-quantized", rows=_EIGHT, num_bits=8),
    ),
    "w8a16": Layout(
        lambda weight: _packed(weight, bits=8, group=None),
        _compressed("int", "pack-quantized", num_bits=8, strategy="channel"),
    ),
    "w8a16 with zero points": Layout(
        lambda weight: _packed(weight, bits=8, group=None, shift=True),
        _compressed("int", "pack-quantized", num_bits=8, strategy="channel"),
    ),
    "w4a16": Layout(_packed, _PACKED),
    "w4a16 with zero points": Layout(lambda weight: _packed(weight, shift=True), _PACKED),
    "w4a16 in another order": Layout(lambda weight: _packed(weight, shuffled=True), _PACKED),
    "w4a16 with an order that is not set": Layout(_without_order, _PACKED),
    "w4a16 in groups of 16": Layout(
        lambda weight: _packed(weight, group=GROUP // 2),
        _compressed("int", "pack-quantized", num_bits=4, group_size=GROUP // 2),
    ),
    "w8a16 in another order": Layout(
        _whole_in_order, _compressed("int", "int-quantized", num_bits=8, group_size=GROUP)
    ),
    "gptq": Layout(
        _gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": None},
    ),
    "gptq in another order": Layout(
        lambda weight: _gptq(weight, shuffled=True),
        {"quant_method": "gptq", "bits": 4, "desc_act": True, "checkpoint_format": "gptq"},
    ),
    "gptq in eight bits": Layout(
        lambda weight: _gptq(weight, bits=8), {"quant_method": "gptq", "bits": 8}
    ),
    "gptq, second format": Layout(
        lambda weight: _gptq(weight, less_one=0),
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
    ),
    "awq": Layout(_awq, {"quant_method": "awq", "bits": 4, "version": "gemm"}),
    "fp8 in blocks": Layout(
        lambda weight: _fp8(weight, rows=BLOCK, columns=BLOCK, name=_INVERSE),
        {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]},
    ),
    "fp8 in blocks of all outputs": Layout(
        lambda weight: _fp8(weight, rows=_WHOLE, columns=BLOCK, name=_INVERSE),
        {"quant_method": "fp8", "weight_block_size": [_WHOLE, BLOCK]},
    ),
    "fp8, one scale": Layout(
        lambda weight: _fp8(weight, rows=_WHOLE, columns=_WHOLE, name=_SCALE, is_scalar=True),
        {"quant_method": "fp8", "activation_scheme": "static"},
    ),
    "fp8 of outputs": Layout(
        lambda weight: _fp8(weight, rows=1, columns=_WHOLE, name=_SCALE),
        _compressed("float", "float-quantized", rows=_FP8_ROWS, num_bits=8, strategy="channel"),
    ),
    "fp8 in compressed blocks": Layout(
        lambda weight: _fp8(weight, rows=BLOCK, columns=BLOCK, name=_SCALE),
        _compressed(
            "float", "float-quantized", rows=_FP8_ROWS, num_bits=8, block_structure=[BLOCK, BLOCK]
        ),
    ),
}  # fmt: skip
"""By a name for people; a name begins with the kind of its computation."""
