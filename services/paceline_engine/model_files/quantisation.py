"""How a folder's weights are quantised, as its config.json says it; unknown ways are refused.

This is decided before a weight is read, or fetched from a hub. `torch_backend/stored_weights.py`
reads the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline_engine.model_files.small_files import DECODER_PARTS
from paceline_engine.terms.backend import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_FIELDS = ("quantization_config", "compression_config")
_BITS = frozenset({4, 8})
_COMPRESSED = "compressed-tensors"
_COMPRESSED_FORMATS = frozenset({
    "dense",
    "float-quantized",
    "int-quantized",
    "mixed-precision",
    "naive-quantized",
    "pack-quantized",
})  # fmt: skip
# What would change a forward, and is not computed here.
_UNKNOWN_PARTS = ("transform_config", "sparsity_config")
_GPTQ = "gptq"
_GPTQ_FORMATS = frozenset({_GPTQ, "gptq_v2"})
_FP8 = frozenset({"fp8", "fbgemm_fp8"})
_KNOWN = f"{_COMPRESSED}, gptq, awq, fp8"
_FROM_ORIGINAL = (
    "serve the model that it was made from, with --weights int8 on a CPU, or quantise that model"
    f" with llm-compressor to {_COMPRESSED}; --backend vllm knows more formats"
)
_CONVERSIONS = {
    "bitsandbytes": "save it with transformers after model.dequantize(), or give --backend vllm",
    "torchao": _FROM_ORIGINAL,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantisation:
    """How weights are stored.

    Attributes:
        method: Who wrote them: compressed-tensors, gptq, awq, fp8 or fbgemm_fp8.
        bits: Of a number that is packed with others; 8 where none is.
        group_sizes: How many of an output's numbers may have one scale; 0: all of them. Empty: as
            the shapes say.
        block: The rows and columns that have one scale, in fp8; None: as the shapes say.
        rounds_rows: Whether the rows of products are rounded to eight bits, too (W8A8).
        zeros_less_one: Whether zero points are stored less one, as GPTQ's first format has them.
    """

    method: str
    bits: int = 8
    group_sizes: frozenset[int] = frozenset()
    block: tuple[int, int] | None = None
    rounds_rows: bool = False
    zeros_less_one: bool = False


def find_quantisation(name: str, config: Mapping[str, Any]) -> Quantisation | None:
    """Find how a model's weights are quantised; None: they are not.

    Args:
        name: The model's.
        config: Its config.json.

    Raises:
        ModelLoadError: They are quantised in a way that is not known here.
    """
    parts = [config, *(config.get(each) for each in DECODER_PARTS)]
    found = [
        each for part in parts if isinstance(part, dict) for key in _FIELDS
        if (each := part.get(key)) is not None
    ]  # fmt: skip
    if not found:
        return None
    try:
        return _quantisation(found[0])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(
            f"model {name!r}: config.json has a quantization_config that is not usable: {error}"
        ) from error
    except ModelLoadError as error:
        raise ModelLoadError(f"model {name!r}: {error}") from None


def _quantisation(found: Mapping[str, Any]) -> Quantisation:
    method = found.get("quant_method")
    if method == _COMPRESSED or (method is None and "config_groups" in found):
        return _of_compressed_tensors(found)
    if method in _FP8:
        return Quantisation(method=method, block=_block(found.get("weight_block_size")))
    if method not in {_GPTQ, "awq"}:
        advice = _CONVERSIONS.get(str(method), _FROM_ORIGINAL)
        raise ModelLoadError(f"weights of {method!r} are not read, but {_KNOWN}: {advice}")
    bits, version = found["bits"], str(found.get("version") or "gemm").lower()
    if bits not in _BITS or (method == "awq" and (bits != 4 or version != "gemm")):
        raise ModelLoadError(
            f"weights of {method} in {bits!r} bits, version {version!r}, are not read:"
            f" {_FROM_ORIGINAL}"
        )
    written = found.get("checkpoint_format") or _GPTQ
    if method == _GPTQ and written not in _GPTQ_FORMATS:
        raise ModelLoadError(
            f"weights of {method} in the checkpoint_format {written!r:.80} are not read:"
            f" {_FROM_ORIGINAL}"
        )
    return Quantisation(
        method=method,
        bits=bits,
        group_sizes=_group_sizes([found]),
        zeros_less_one=method == written == _GPTQ,
    )


def _of_compressed_tensors(found: Mapping[str, Any]) -> Quantisation:
    groups = [*found["config_groups"].values()]
    formats = {found.get("format"), *(each.get("format") for each in groups)} - {None}
    if unknown := formats - _COMPRESSED_FORMATS:
        raise ModelLoadError(
            f"weights of {_COMPRESSED} in the format {min(unknown)!r} are not read:"
            f" {_FROM_ORIGINAL}"
        )
    for key in _UNKNOWN_PARTS:
        if (part := found.get(key)) and part.get("format") != "dense":
            raise ModelLoadError(f"its {key} is not computed: {_FROM_ORIGINAL}")
    if any(each.get("output_activations") for each in groups):
        raise ModelLoadError(f"its output_activations are not computed: {_FROM_ORIGINAL}")
    weights = [each["weights"] for each in groups if each.get("weights")]
    bits = {each["num_bits"] for each in weights}
    if not bits <= _BITS:
        raise ModelLoadError(
            f"weights of {_COMPRESSED} in {sorted(bits)} bits are not read: {_FROM_ORIGINAL}"
        )
    blocks = {_block(each.get("block_structure")) for each in weights} - {None}
    rows = [each.get("input_activations") or {} for each in groups]
    return Quantisation(
        method=_COMPRESSED,
        bits=min(bits, default=8),
        group_sizes=_group_sizes(weights),
        block=next(iter(blocks)) if len(blocks) == 1 else None,
        rounds_rows=all((each.get("type"), each.get("num_bits")) == ("int", 8) for each in rows),
    )


def _group_sizes(found: Sequence[Mapping[str, Any]]) -> frozenset[int]:
    """Return the sizes of groups that weights may have; -1 and null are a whole output's."""
    if all("group_size" not in each for each in found):
        return frozenset()
    return frozenset(max(0, int(each.get("group_size") or 0)) for each in found)


def _block(found: Any) -> tuple[int, int] | None:
    """Return the rows and columns of a block: of [128, 128], or of "128x128"."""
    if found is None:
        return None
    sides = found.split("x") if isinstance(found, str) else found
    rows, columns = map(int, sides)
    if not (rows > 0 and columns > 0):
        raise ValueError(f"a block of {rows} rows and {columns} columns")
    return rows, columns
