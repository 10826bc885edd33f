"""The sizes of an EAGLE head (`eagle.py`), and the checks of those that a card names."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import Any, Literal, TypeAlias, get_args

from transformers.activations import ACT2FN

FeatureNorms: TypeAlias = Literal["none", "together", "each"]
_FEATURE_COUNT = 3
# A larger number would be a mistake.
_MOST_SIZE = 1 << 20
_MOST_ROPE = 1e12
# Kinds of rotations that are the same in a longer sequence, and the parameters that each needs.
_ROPE_KINDS = {
    "default": {"rope_theta"},
    "linear": {"rope_theta", "factor"},
    "llama3": {
        "rope_theta",
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    },
}
_ROPE_NUMBERS = _ROPE_KINDS["llama3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleShape:
    """The sizes of a head, and how it is computed.

    Attributes:
        feature_layers: The layers of the target whose inputs it reads, ascending.
        draft_vocabulary: N, the tokens that it can guess.
        heads, kv_heads, head_width: H, G and D.
        inner_width: The width inside of its MLP.
        activation: The MLP's activation, by the library's name.
        epsilon: That of its norms.
        rope: The parameters of its rotations, by the library's names.
        own_head: Whether it has rows of its own for the draft vocabulary; else they are those of
            the target's head.
        own_embedding: Whether it has an embedding of its own; else it reads the target's.
        norm_before_residual: Whether the residual stream begins after the norm of the features.
        norm_output: Whether the next step reads the output after the norm, not before it.
        feature_norms: Which norms stand before features are reduced: none, one for the three
            together, or one for each.
    """

    feature_layers: tuple[int, ...]
    draft_vocabulary: int
    heads: int
    kv_heads: int
    head_width: int
    inner_width: int
    rope: dict[str, Any]
    activation: str = "silu"
    epsilon: float = 1e-6
    own_head: bool = False
    own_embedding: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    feature_norms: FeatureNorms = "none"

    @classmethod
    def like(cls, config: Any, *, draft_vocabulary: int) -> EagleShape:
        """Return the shape of a head like one of a model's own layers."""
        layers = config.num_hidden_layers
        heads = config.num_attention_heads
        return cls(
            feature_layers=default_layers(layers),
            draft_vocabulary=min(draft_vocabulary, config.vocab_size),
            heads=heads,
            kv_heads=config.num_key_value_heads,
            head_width=getattr(config, "head_dim", None) or config.hidden_size // heads,
            inner_width=config.intermediate_size,
            activation=config.hidden_act,
            epsilon=config.rms_norm_eps,
            rope={key: each for key, each in config.rope_parameters.items() if each is not None},
        )

    @classmethod
    def read(cls, found: Any) -> EagleShape:
        """Check a shape that was read from a card.

        Raises:
            ValueError: it is none.
        """
        if not isinstance(found, dict):
            raise ValueError("eagle: not an object")
        fields = cls.__dataclass_fields__
        if unknown := found.keys() - fields.keys():
            raise ValueError(f"eagle: unknown key {min(unknown)!r}")
        needed = {name for name, each in fields.items() if each.default is MISSING}
        if missing := needed - found.keys():
            raise ValueError(f"eagle: {min(missing)} is missing")
        shape = cls(**{**found, "feature_layers": _checked_layers(found["feature_layers"])})
        _check_numbers(shape)
        for key in ("own_head", "own_embedding", "norm_before_residual", "norm_output"):
            if type(getattr(shape, key)) is not bool:
                raise ValueError(f"eagle: {key} {getattr(shape, key)!r} is not true or false")
        for key, known in (("feature_norms", get_args(FeatureNorms)), ("activation", ACT2FN)):
            value = getattr(shape, key)
            if type(value) is not str or value not in known:
                raise ValueError(f"eagle: {key} {value!r} is not known")
        _check_rope(shape.rope)
        return shape


def _checked_layers(found: Any) -> tuple[int, ...]:
    if not (
        isinstance(found, list)
        and len(found) == _FEATURE_COUNT
        and all(type(each) is int and 0 <= each <= _MOST_SIZE for each in found)
        and found == sorted(found)
    ):
        raise ValueError(f"eagle: feature_layers {found!r} is no ascending list of three layers")
    return tuple(found)


def _check_numbers(shape: EagleShape) -> None:
    for key in ("draft_vocabulary", "heads", "kv_heads", "head_width", "inner_width"):
        value = getattr(shape, key)
        if type(value) is not int or not 1 <= value <= _MOST_SIZE:
            raise ValueError(f"eagle: {key} {value!r} is not in [1, {_MOST_SIZE}]")
    if shape.heads % shape.kv_heads or shape.head_width % 2:
        raise ValueError("eagle: heads are no multiple of kv_heads, or head_width is odd")
    if type(shape.epsilon) is not float or not 0 < shape.epsilon < 1:
        raise ValueError(f"eagle: epsilon {shape.epsilon!r} is not in (0, 1)")


def _check_rope(found: Any) -> None:
    if not isinstance(found, dict) or not {*found} <= _ROPE_NUMBERS | {"rope_type"}:
        raise ValueError(f"eagle: rope {found!r:.200} has other keys than {sorted(_ROPE_NUMBERS)}")
    kind = found.get("rope_type", "default")
    if type(kind) is not str or kind not in _ROPE_KINDS:
        raise ValueError(f"eagle: rope_type {kind!r} is none of {', '.join(_ROPE_KINDS)}")
    if missing := _ROPE_KINDS[kind] - found.keys():
        raise ValueError(f"eagle: rope lacks {min(missing)}")
    for key in found.keys() & _ROPE_NUMBERS:
        if type(found[key]) not in {int, float} or not 0 < found[key] < _MOST_ROPE:
            raise ValueError(f"eagle: {key} {found[key]!r} is not in (0, {_MOST_ROPE:g})")


def default_layers(layer_count: int) -> tuple[int, ...]:
    """Return the layers whose inputs are read by default: EAGLE's second, middle and third last."""
    wanted = (2, layer_count // 2, layer_count - 3)
    return tuple(sorted(min(max(1, layer), layer_count - 1) for layer in wanted))
