"""EAGLE-3 heads as others publish them: a `config.json` and safetensors, without a card.

Three layouts are read: that of EAGLE's authors, SpecForge and SGLang; that of the speculators
library and vLLM; and that of ModelOpt. They have the same weights under slightly other names, and
say the same facts in other keys. Facts that a layout leaves out are as its own server takes them:

    fact                     EAGLE, SpecForge, ModelOpt          speculators
    sizes                    at the top of config.json           in transformer_layer_config
    feature layers           ids of outputs: one is added        ids of inputs
    norm_before_residual     false                               true

Nothing in these files says for which model exactly a head is. A head for a model of another width
or vocabulary is refused; a head for another model of the same sizes only guesses badly.
"""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load

from paceline.plain_files import read_plain_file
from paceline_engine.model_files.small_files import refuse_pointer
from paceline_engine.terms.backend import ModelLoadError
from paceline_engine.torch_backend.adapters.card import CARD_FILE, AdapterCard
from paceline_engine.torch_backend.adapters.eagle_shape import EagleShape, default_layers

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
PICKLE_FILE = "pytorch_model.bin"
WHOLE = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
"""The kinds of whole numbers with which torch computes."""

_MOST_CONFIG_BYTES = 1 << 20
_MOST_HEADER_BYTES = 8 << 20
_MOST_NUMBER_BYTES = 8  # float64
_MOST_WIDTHS = 64  # of a head's weights without embeddings, in squares of the width
_REACH = 4
_ARCHITECTURES = frozenset({"LlamaForCausalLMEagle3", "Eagle3Speculator", "Eagle3DraftModel"})
_CONVERT = (
    "import sys, torch, safetensors.torch as s; w = torch.load(sys.argv[1],"
    " map_location='cpu', weights_only=True);"
    " s.save_file({k: v.contiguous() for k, v in w.items()}, sys.argv[2])"
)
_OLD_NORMS = {f"aux_norm_{name}.weight": f"fc_norm.{at}.weight" for at, name in
              enumerate(("low", "mid", "high"))}  # fmt: skip


def is_published(directory: Path) -> bool:
    """Whether a directory has a head as others publish it."""
    return not (directory / CARD_FILE).exists() and (directory / CONFIG_FILE).exists()


def read_published(directory: Path, *, model: Any) -> tuple[AdapterCard, dict[str, Tensor]]:
    """Read a published head for a loaded model: a card, and its weights by our names.

    Raises:
        ModelLoadError: it is damaged, a pickle, of a kind that is not known, or for another model.
    """
    name = f"adapter {str(directory)!r}"
    config = _read_config(directory, name)
    try:
        facts = _facts(config, layer_count=model.config.num_hidden_layers)
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ModelLoadError(f"{directory / CONFIG_FILE}: {reason}") from error
    _refuse_other_model(name, facts, model.config)
    state = _read_weights(directory, name, model.config)
    state, shape = _ours(state, facts, name=name)
    try:
        eagle = EagleShape.read(shape)
    except ValueError as error:
        raise ModelLoadError(f"{directory / CONFIG_FILE}: {error}") from error
    card = AdapterCard(
        kind="eagle",
        model=facts["model"],
        fingerprint="",
        reach=_REACH,
        layers=0,
        rank=0,
        exit_rank=0,
        tree=tuple((0,) * depth for depth in range(1, _REACH + 1)),
        weights_sha256="",
        training={},
        eagle=eagle,
    )
    return card, state


def _read_config(directory: Path, name: str) -> dict[str, Any]:
    path = directory / CONFIG_FILE
    try:
        content = read_plain_file(path, most_bytes=_MOST_CONFIG_BYTES)
        refuse_pointer(path, content)
        config = json.loads(content)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{name}: no readable {CONFIG_FILE} ({error})") from error
    if not isinstance(config, dict):
        raise ModelLoadError(f"{path} is no JSON object")
    named = config.get("architectures") or ()
    is_known = isinstance(named, list) and any(str(each) in _ARCHITECTURES for each in named)
    if "speculators_model_type" in config:
        named = config["speculators_model_type"]
        is_known = named == "eagle3"
    if not is_known:
        raise ModelLoadError(
            f"{path} is of no EAGLE-3 head: it is one of {named!r:.200}, and known are"
            f" {', '.join(sorted(_ARCHITECTURES))}, and eagle3 of speculators"
        )
    return config


def _facts(config: dict[str, Any], *, layer_count: int) -> dict[str, Any]:
    """Return what a configuration says, in the same words for all layouts.

    Raises:
        KeyError, OverflowError, TypeError, ValueError: it lacks a fact, or says what is not
            supported.
    """
    is_speculators = "speculators_model_type" in config
    sizes = config["transformer_layer_config"] if is_speculators else config
    own = config.get("eagle_config") or {}
    if not isinstance(sizes, dict) or not isinstance(own, dict):
        raise TypeError("transformer_layer_config and eagle_config are no JSON objects")
    layers_read = config.get("num_aux_hidden_states") or 3
    is_other = own.get("use_aux_hidden_state") is False or layers_read != 3
    if is_other or sizes.get("num_hidden_layers", 1) != 1:
        raise ValueError("only heads of one layer that read three layers of the model are known")
    heads, width = sizes["num_attention_heads"], sizes["hidden_size"]
    if type(heads) is not int or type(width) is not int or heads < 1:
        raise TypeError(f"num_attention_heads {heads!r} and hidden_size {width!r} are no numbers")
    ids = own.get("eagle_aux_hidden_state_layer_ids")
    ids = config.get("eagle_aux_hidden_state_layer_ids", ids) if is_speculators else ids
    if ids is None:
        layers = [*default_layers(layer_count)]
    else:
        if not isinstance(ids, list) or any(type(each) is not int for each in ids):
            raise TypeError(f"eagle_aux_hidden_state_layer_ids {ids!r:.200} are no layers")
        layers = [each + (not is_speculators) for each in ids]
    return {
        "model": _name_of_model(config),
        "width": width,
        "vocabulary": sizes["vocab_size"],
        "feature_layers": layers,
        "draft_vocabulary": config.get("draft_vocab_size") or sizes["vocab_size"],
        "heads": heads,
        "kv_heads": sizes.get("num_key_value_heads", heads),
        "head_width": sizes.get("head_dim") or width // heads,
        "inner_width": sizes["intermediate_size"],
        "activation": sizes.get("hidden_act", "silu"),
        "epsilon": float(sizes.get("rms_norm_eps", 1e-6)),
        "rope": _rope(sizes),
        "norm_before_residual": config.get("norm_before_residual", is_speculators),
        "norm_output": config.get("norm_output", False),
        "norms_together": bool(config.get("norm_before_fc") or own.get("norm_before_fc")),
    }


def _name_of_model(config: dict[str, Any]) -> str:
    """Return the name of the model that a head is for; empty: it is not said."""
    inner: Any = config
    for key in ("speculators_config", "verifier", "name_or_path"):
        inner = inner.get(key) if isinstance(inner, dict) else None
    return str(inner or config.get("target_model_name_or_path") or "")


def _rope(sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of rotations, by the library's present names."""
    found = dict(sizes.get("rope_parameters") or sizes.get("rope_scaling") or {})
    if "type" in found:
        found.setdefault("rope_type", found.pop("type"))
    found.setdefault("rope_type", "default")
    if "rope_theta" not in found:
        found["rope_theta"] = sizes.get("rope_theta", 10000.0)
    return {key: each for key, each in found.items() if each is not None}


def _refuse_other_model(name: str, facts: dict[str, Any], config: Any) -> None:
    for fact, own in (("width", config.hidden_size), ("vocabulary", config.vocab_size)):
        if facts[fact] != own:
            raise ModelLoadError(
                f"{name} is for another model: its {fact} is {facts[fact]!r}, and the model's {own}"
            )


def _read_weights(directory: Path, name: str, config: Any) -> dict[str, Tensor]:
    path, pickled = directory / WEIGHTS_FILE, directory / PICKLE_FILE
    if not path.exists() and pickled.exists():
        places = shlex.join((str(pickled), str(path)))
        raise ModelLoadError(
            f"{name} has pickled weights, which can run code; convert them: python -c"
            f' "{_CONVERT}" {places}'
        )
    # An embedding and a head of the whole vocabulary at most, and the layer.
    most = config.vocab_size * (2 * config.hidden_size + 2) + _MOST_WIDTHS * config.hidden_size**2
    try:
        packed = read_plain_file(path, most_bytes=_MOST_HEADER_BYTES + most * _MOST_NUMBER_BYTES)
    except OSError as error:
        raise ModelLoadError(f"{name}: {WEIGHTS_FILE} is not readable ({error})") from error
    refuse_pointer(path, packed)
    try:
        return load(packed)
    except Exception as error:  # a file is a stranger's, and may break anything
        raise ModelLoadError(f"{name} cannot be loaded: {error}") from error


def _by_our_names(state: dict[str, Tensor], *, name: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for key, each in state.items():
        ours = _OLD_NORMS.get(key, key).replace("layers.0.", "midlayer.", 1)
        if ours in found:
            raise ModelLoadError(f"{name} cannot be loaded: it has {ours} under two names")
        found[ours] = each
    return found


def _ours(
    state: dict[str, Tensor], facts: dict[str, Any], *, name: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return weights by our names, and the shape that belongs to them."""
    found = _by_our_names(state, name=name)
    if "lm_head.weight" not in found:
        raise ModelLoadError(f"{name} cannot be loaded: it lacks lm_head.weight")
    if found["lm_head.weight"].dim() != 2:
        raise ModelLoadError(f"{name} cannot be loaded: its lm_head.weight is of another shape")
    count = len(found["lm_head.weight"])
    can_guess = found.pop("t2d", None)
    if "d2t" not in found and count == facts["vocabulary"]:
        found["d2t"] = torch.zeros(count, dtype=torch.int64)
    offsets = found.get("d2t")
    if can_guess is not None and can_guess.dtype not in (torch.bool, *WHOLE):
        kind = str(can_guess.dtype).removeprefix("torch.")
        raise ModelLoadError(f"{name} cannot be loaded: t2d has {kind}, and needs truth values")
    if (
        can_guess is not None
        and offsets is not None
        and offsets.shape == (count,)
        and offsets.dtype in WHOLE  # what else it may be is refused with the other weights
    ):
        token_ids = torch.arange(count) + offsets
        wanted = can_guess.nonzero().flatten()
        if not torch.equal(wanted, token_ids):
            raise ModelLoadError(f"{name}: t2d and d2t say different draft vocabularies")
    norms = "none"
    if "input_norm.weight" in found:
        norms = "together"
    elif "fc_norm.0.weight" in found:
        norms = "each"
    if facts["norms_together"] and norms != "together":
        raise ModelLoadError(
            f"{name} cannot be loaded: norm_before_fc is true, and it lacks input_norm.weight"
        )
    shape = {key: facts[key] for key in EagleShape.__dataclass_fields__ if key in facts}
    return found, shape | {
        "draft_vocabulary": count,
        "own_head": True,
        "own_embedding": "embed_tokens.weight" in found,
        "feature_norms": norms,
    }
