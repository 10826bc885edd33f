"""What a GGUF file calls a model's sizes and weights, by families of models.

llama.cpp names weights and sizes in its own way, and stores some weights in another order. This
module writes the `config.json` that the transformers library reads, and gives each weight the
library's name. What it does not know it refuses by name: a key that is passed over could be a
scaling of positions or a window, and a model without it answers wrongly.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline_engine.terms.backend import ModelLoadError, few_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from paceline_engine.model_files.gguf_file import GgufFile
    from paceline_engine.model_files.gguf_groups import GgufGroups

_MOST = 1 << 26  # several times the numbers of the largest models
_ROTATIONS = "rope_freqs.weight"
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMS_OF_HEADS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_KEYS = frozenset({
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "tensor_data_layout",
    "vocab_size",
})  # fmt: skip
# What Meta's models of 2024 do to the slow rotations; files have the result alone.
_LOW, _HIGH, _ORIGINAL_LENGTH = 1.0, 4.0, 8192
_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class _Family:
    """How an architecture of GGUF files is one of the library's.

    Attributes:
        model_type: The library's name for it.
        interleaves: In the file the two halves of a head's rows of queries and keys alternate.
        inner: The library's names of a layer's parts.
        biases: The fields of its configuration that say whether a part has biases, and a tensor
            that is there if it has.
        scales: The library's names of further numbers, by their keys.
    """

    model_type: str
    interleaves: bool = False
    inner: Mapping[str, str] = field(default_factory=lambda: _INNER)
    biases: Mapping[str, str] = field(default_factory=dict)
    scales: Mapping[str, str] = field(default_factory=dict)


_ATTENTION_BIAS = {"attention_bias": "blk.0.attn_q.bias"}
_BIASES = {**_ATTENTION_BIAS, "mlp_bias": "blk.0.ffn_gate.bias"}
_GRANITE_SCALES = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "logit_scale": "logits_scaling",
    "residual_scale": "residual_multiplier",
}
_FAMILIES = {
    "granite": _Family("granite", interleaves=True, biases=_BIASES, scales=_GRANITE_SCALES),
    "llama": _Family("llama", interleaves=True, biases=_BIASES),
    "qwen2": _Family("qwen2"),
    "qwen3": _Family("qwen3", inner=_INNER | _NORMS_OF_HEADS, biases=_ATTENTION_BIAS),
    # Each fourth layer turns nothing by its position; files do not say so, and all models do it.
    "smollm3": _Family("smollm3", interleaves=True, biases=_BIASES),
}


class GgufFamily:
    """The sizes and weights of the model in a GGUF file, in the library's words."""

    def __init__(self, file: GgufFile) -> None:
        """Check that a file holds a model of a known family.

        Raises:
            ModelLoadError: It does not, or says what nobody knows.
        """
        self._file = file
        metadata = file.metadata
        self._refuse_other_contents()
        architecture = metadata.get("general.architecture")
        family = _FAMILIES.get(architecture) if isinstance(architecture, str) else None
        if family is None:
            raise self._refusal(
                f"it holds a model of the architecture {str(architecture)[:80]!r}; known are"
                f" {', '.join(sorted(_FAMILIES))}"
            )
        self._family, self._prefix = family, f"{architecture}."
        keys = {key.removeprefix(self._prefix) for key in metadata if key.startswith(self._prefix)}
        # A key that says nothing changes nothing: no experts, no window.
        if unknown := {
            key for key in keys - _KEYS - {*family.scales} if metadata[self._prefix + key]
        }:
            raise self._refusal(
                f"what {few_names(self._prefix + key for key in unknown)} means is unknown"
            )
        # A layer without a tensor is none.
        self._layer_count = self._whole("block_count", most=len(file.tensors))
        self._names = {name: self._library_name(name) for name in file.tensors}
        self.configuration = self._configuration()
        self._check_shapes()

    def named_weights(
        self,
    ) -> Iterator[tuple[str, NDArray[np.float32], str, GgufGroups | None]]:
        """Yield each weight: the library's name, dequantised numbers, kind, and its groups' scales.

        Raises:
            ModelLoadError: The file cannot be read.
        """
        for name, named in self._names.items():
            if named:
                weights, groups = self._file.weights_in_groups(name)
                if self._family.interleaves and re.search(r"\.(q|k)_proj\.", named):
                    order = partial(_halves, head_size=self._head_size)
                    weights = order(weights)
                    groups = None if groups is None else groups.changed(order)
                yield named, weights, self._file.tensors[name].kind, groups

    def _refuse_other_contents(self) -> None:
        metadata = self._file.metadata
        kind = metadata.get("general.type", "model")
        if kind != "model":
            raise self._refusal(f"it holds no model: its general.type is {str(kind)[:80]!r}")
        if metadata.get("split.count", 0) not in {0, 1}:
            raise self._refusal(
                f"it is one of {metadata['split.count']} parts of a model: merge them first, with"
                " `llama-gguf-split --merge`"
            )

    def _configuration(self) -> dict[str, Any]:
        hidden, heads = self._whole("embedding_length"), self._whole("attention.head_count")
        self._head_size = self._whole("attention.key_length", default=max(hidden // heads, 1))
        for key in ("attention.value_length", "rope.dimension_count"):
            if self._whole(key, default=self._head_size) != self._head_size:
                raise self._refusal(
                    f"{self._prefix}{key} is not the size of a head, {self._head_size}"
                )
        embeddings = self._file.tensors.get("token_embd.weight")
        if embeddings is None:
            raise self._refusal("it lacks token_embd.weight")
        key_heads = self._whole("attention.head_count_kv", default=heads)
        if self._head_size % 2 or heads % key_heads:
            raise self._refusal(
                f"{heads} heads of {self._head_size} numbers, and {key_heads} of keys, do not fit"
                " together"
            )
        found: dict[str, Any] = {
            "head_dim": self._head_size,
            "hidden_act": "silu",
            "hidden_size": hidden,
            "intermediate_size": self._whole("feed_forward_length"),
            "max_position_embeddings": self._whole("context_length"),
            "model_type": self._family.model_type,
            "num_attention_heads": heads,
            "num_hidden_layers": self._layer_count,
            "num_key_value_heads": key_heads,
            # The classes' own may be beyond the vocabulary.
            "pad_token_id": None,
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "rope_parameters": self._rotations(),
            "tie_word_embeddings": "output.weight" not in self._file.tensors,
            "vocab_size": embeddings.shape[0],
        }
        for name, tensor in self._family.biases.items():
            found[name] = tensor in self._file.tensors
        for key, name in self._family.scales.items():
            if self._prefix + key in self._file.metadata:
                found[name] = self._number(key)
        return found

    def _check_shapes(self) -> None:
        """Check that each weight is there, in its shape.

        The library would make up what is missing, in the sizes of the configuration, which may be
        larger than any memory.
        """
        config = self.configuration
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        queries = config["num_attention_heads"] * self._head_size
        keys = config["num_key_value_heads"] * self._head_size
        matrices = {
            "embed_tokens": (config["vocab_size"], hidden),
            "lm_head": (config["vocab_size"], hidden),
            "q_proj": (queries, hidden),
            "k_proj": (keys, hidden),
            "v_proj": (keys, hidden),
            "o_proj": (hidden, queries),
            "gate_proj": (inner, hidden),
            "up_proj": (inner, hidden),
            "down_proj": (hidden, inner),
            "q_norm": (self._head_size,),
            "k_norm": (self._head_size,),
        }
        parts = [
            f"model.layers.{layer}.{part}.weight"
            for layer in range(self._layer_count)
            for part in self._family.inner.values()
        ]
        named = {*self._names.values()}
        if missing := {"model.norm.weight", *parts} - named:
            raise self._refusal(f"it lacks {few_names(missing)}")
        for name, library_name in self._names.items():
            *_, module, kind = library_name.split(".") if library_name else ("", "", "")
            expected = matrices.get(module, (hidden,))
            if kind and self._file.tensors[name].shape != (
                expected if kind == "weight" else expected[:1]
            ):
                raise self._refusal(f"its tensor {name} is of another shape than its keys say")

    def _rotations(self) -> dict[str, Any]:
        """Return how positions turn queries and keys, in the library's words."""
        theta = self._number("rope.freq_base", default=10_000.0)
        kind = self._file.metadata.get(f"{self._prefix}rope.scaling.type", "none")
        found: dict[str, Any] = {"rope_theta": theta, "rope_type": "default"}
        if _ROTATIONS in self._file.tensors:
            return found | self._slow_rotations(theta)
        if kind == "none":
            return found
        found["factor"] = self._number("rope.scaling.factor")
        if kind == "linear":
            return found | {"rope_type": "linear"}
        if kind == "yarn":
            length = self._whole("rope.scaling.original_context_length")
            return found | {"rope_type": "yarn", "original_max_position_embeddings": length}
        raise self._refusal(
            f"{self._prefix}rope.scaling.type is {str(kind)[:80]!r}, which is unknown"
        )

    def _slow_rotations(self, theta: float) -> dict[str, Any]:
        """Find what the library calls a table of divisors of the rotations.

        Files of Llama 3.1 and later have the divisors and not what they were made of. All of
        Meta's models have the same limits, and the largest divisor is the factor.
        """
        divisors = self._file.weights(_ROTATIONS).reshape(-1)
        factor = float(str(divisors.max()))
        made = _divisors(theta, factor, head_size=self._head_size)
        if divisors.shape != made.shape or not np.allclose(divisors, made, rtol=_TOLERANCE):
            raise self._refusal(f"what {_ROTATIONS} does to positions is unknown")
        return {
            "factor": factor,
            "high_freq_factor": _HIGH,
            "low_freq_factor": _LOW,
            "original_max_position_embeddings": _ORIGINAL_LENGTH,
            "rope_type": "llama3",
        }

    def _library_name(self, name: str) -> str:
        """Return the library's name of a tensor; empty if the configuration says the same."""
        if name == _ROTATIONS and self._family.interleaves:
            return ""
        if named := _OUTER.get(name):
            return named
        matched = _LAYER.fullmatch(name)
        part = self._family.inner.get(matched[2]) if matched else None
        if matched is None or part is None or int(matched[1]) >= self._layer_count:
            raise self._refusal(
                f"its tensor {name[:80]!r} is none of a {self._family.model_type} model's"
            )
        return f"model.layers.{int(matched[1])}.{part}.{matched[3]}"

    def _whole(self, key: str, *, default: int | None = None, most: int = _MOST) -> int:
        found = self._file.metadata.get(self._prefix + key, default)
        if type(found) is not int or not 0 < found <= most:
            raise self._refusal(
                f"{self._prefix}{key} is {str(found)[:80]}, no number in [1, {most}]"
            )
        return found

    def _number(self, key: str, *, default: float | None = None) -> float:
        found = self._file.metadata.get(self._prefix + key, default)
        if type(found) not in {int, float} or not 0 < found < float("inf"):
            raise self._refusal(f"{self._prefix}{key} is {str(found)[:80]}, no number above 0")
        return float(found)

    def _refusal(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"{self._file.path}: {what}")


def _halves(weights: NDArray[np.float32], head_size: int) -> NDArray[np.float32]:
    """Put a head's rows as the library has them: first all even ones, then all odd ones."""
    pairs = weights.reshape(-1, head_size // 2, 2, *weights.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weights.shape)


def _divisors(theta: float, factor: float, *, head_size: int) -> NDArray[np.float64]:
    """Return by how much Llama 3.1 divides each rotation: 1 for fast ones, `factor` for slow."""
    waves = 2 * np.pi * theta ** (np.arange(0, head_size, 2) / head_size)
    smooth = np.clip((_ORIGINAL_LENGTH / waves - _LOW) / (_HIGH - _LOW), 0, 1)
    return np.asarray(1 / ((1 - smooth) / factor + smooth))
