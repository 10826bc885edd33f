"""Adapters on disk: safetensors and a card. Damaged, foreign or too new ones are refused."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load, save
from torch import nn

from paceline.plain_files import read_plain_file
from paceline_engine.model_files.small_files import refuse_pointer
from paceline_engine.terms.backend import ModelLoadError, few_names
from paceline_engine.torch_backend.adapters.card import AdapterCard
from paceline_engine.torch_backend.adapters.eagle import EagleHead
from paceline_engine.torch_backend.adapters.low_rank import low_rank_linears
from paceline_engine.torch_backend.adapters.medusa import MedusaHeads
from paceline_engine.torch_backend.adapters.published import WHOLE, is_published, read_published
from paceline_engine.torch_backend.adapters.streams import Streams
from paceline_engine.torch_backend.families import can_fuse

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from paceline_engine.torch_backend.adapters.card import AdapterKind
    from paceline_engine.torch_backend.adapters.eagle_shape import EagleShape

WEIGHTS_FILE = "adapter.safetensors"

_MOST_NUMBER_BYTES = 8  # float64
_MOST_HEADER_BYTES = 8 << 20
# In smaller numbers weights are quantised, and need scales.
_NUMBERS = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter with its model's dtype, on its model's device, and its card."""

    card: AdapterCard
    module: MedusaHeads | Streams | EagleHead


def build_adapter(
    kind: AdapterKind,
    model: Any,
    *,
    reach: int,
    layers: int,
    rank: int,
    exit_rank: int,
    eagle: EagleShape | None = None,
) -> MedusaHeads | Streams | EagleHead:
    """Build an adapter of a kind for a loaded model; see `AdapterCard` for the sizes.

    Raises:
        ModelLoadError: the model is not one that can have it, or has fewer layers.
    """
    config = model.config
    if not can_fuse(model):
        raise ModelLoadError(
            f"{type(model).__name__} is not of the families that can have adapters (Llama,"
            " Mistral, Qwen 2 and Qwen 3 with full attention)"
        )
    if kind == "medusa":
        return MedusaHeads(
            reach=reach, width=config.hidden_size, vocabulary_size=model.lm_head.out_features
        )
    if kind == "eagle":
        if eagle is None:
            raise ModelLoadError("an adapter of the kind eagle needs a card with its shape")
        _refuse_shape(eagle, config)
        return EagleHead(
            eagle,
            reach=reach,
            width=config.hidden_size,
            vocabulary_size=model.lm_head.out_features,
        )
    if not 1 <= layers <= config.num_hidden_layers:
        raise ModelLoadError(f"{layers} upper layers of a model with {config.num_hidden_layers}")
    return Streams(
        reach=reach,
        width=config.hidden_size,
        layer_shapes=[_shapes(layer) for layer in model.model.layers[-layers:]],
        rank=rank,
        exit_rank=exit_rank,
    )


def pack_weights(adapter: nn.Module, *, dtype: torch.dtype) -> tuple[bytes, str]:
    """Return an adapter's weights as a safetensors file in a dtype, and its SHA-256."""
    state = {
        key: tensor.to("cpu", dtype if tensor.is_floating_point() else tensor.dtype)
        for key, tensor in adapter.state_dict().items()
    }
    packed = save({key: tensor.contiguous() for key, tensor in state.items()})
    return packed, hashlib.sha256(packed).hexdigest()


def load_adapter(directory: Path, *, model: Any, fingerprint: str) -> LoadedAdapter:
    """Load an adapter for a loaded model.

    Args:
        directory: With card and weights; or with an EAGLE-3 head as others publish it.
        model: Of the transformers library.
        fingerprint: The model's; see `model_fingerprint`.

    Raises:
        ModelLoadError: it is damaged, for another model, or of another version.
    """
    name = f"adapter {str(directory)!r}"
    shapes: Mapping[str, Tensor]
    if is_published(directory):
        card, state = read_published(directory, model=model)
        with torch.device("meta"):
            shapes = _build(card, model).state_dict()
    else:
        card, shapes, state = _read_own(directory, name, model=model, fingerprint=fingerprint)
    _refuse_foreign(name, state, shapes)
    module = _build(card, model)
    module.load_state_dict(state)
    _refuse_broken(name, state)
    # The dtype of lm_head, because the model's own forward ends there.
    like = model.lm_head.weight
    module.to(like.device, like.dtype).requires_grad_(False).eval()
    if isinstance(module, EagleHead):
        _refuse_vocabulary(name, module)
        module.take_head(model)  # the model may lose its own weights to packed ones
    return LoadedAdapter(card, module)


def _read_own(
    directory: Path, name: str, *, model: Any, fingerprint: str
) -> tuple[AdapterCard, Mapping[str, Tensor], dict[str, Tensor]]:
    """Read an adapter with a card: the card, the weights that it wants, and those there are."""
    card = AdapterCard.read(directory)
    if card.fingerprint != fingerprint:
        raise ModelLoadError(
            f"{name} is for a model {card.model!r} with fingerprint {card.fingerprint[:12]}, and"
            f" this one has {fingerprint[:12]}; a model that was only saved anew needs the"
            " config.json with which the adapter was made"
        )
    # On the meta device, without memory, because a card may ask for too much memory.
    with torch.device("meta"):
        shapes = _build(card, model).state_dict()
    most_bytes = _MOST_HEADER_BYTES + sum(
        each.numel() * _MOST_NUMBER_BYTES for each in shapes.values()
    )
    try:
        packed = read_plain_file(directory / WEIGHTS_FILE, most_bytes=most_bytes)
    except OSError as error:
        raise ModelLoadError(f"{name}: {WEIGHTS_FILE} is not readable ({error})") from error
    refuse_pointer(directory / WEIGHTS_FILE, packed)
    if hashlib.sha256(packed).hexdigest() != card.weights_sha256:
        raise ModelLoadError(f"{name}: {WEIGHTS_FILE} is damaged: its card has another checksum")
    try:
        return card, shapes, load(packed)
    except Exception as error:  # a file is a stranger's, and may break anything
        raise ModelLoadError(f"{name} cannot be loaded: {error}") from error


def _build(card: AdapterCard, model: Any) -> MedusaHeads | Streams | EagleHead:
    return build_adapter(
        card.kind,
        model,
        reach=card.reach,
        layers=card.layers,
        rank=card.rank,
        exit_rank=card.exit_rank,
        eagle=card.eagle,
    )


def _refuse_shape(shape: EagleShape, config: Any) -> None:
    """Refuse a head of another model, by what its card says."""
    if shape.feature_layers[-1] >= config.num_hidden_layers:
        raise ModelLoadError(
            f"the head reads what enters layer {shape.feature_layers[-1]}, and the model has"
            f" {config.num_hidden_layers}"
        )
    if shape.draft_vocabulary > config.vocab_size:
        raise ModelLoadError(
            f"the head guesses {shape.draft_vocabulary} tokens, and the model has"
            f" {config.vocab_size}"
        )


def _refuse_vocabulary(name: str, head: EagleHead) -> None:
    """Refuse a draft vocabulary that does not ascend, or has tokens that the model lacks."""
    token_ids = head.draft_token_ids
    ascends = bool((token_ids.diff() > 0).all())
    if not ascends or int(token_ids[0]) < 0 or int(token_ids[-1]) >= head.vocabulary_size:
        raise ModelLoadError(
            f"{name}: its draft vocabulary (d2t) does not ascend within the model's"
            f" {head.vocabulary_size} tokens"
        )


def _refuse_foreign(name: str, state: Mapping[str, Tensor], shapes: Mapping[str, Tensor]) -> None:
    """Refuse weights of another adapter in one line, however many there are."""
    if missing := shapes.keys() - state.keys():
        raise ModelLoadError(f"{name} cannot be loaded: it lacks {few_names(missing)}")
    if foreign := state.keys() - shapes.keys():
        raise ModelLoadError(f"{name} cannot be loaded: it has foreign {few_names(foreign)}")
    if odd := [key for key, like in shapes.items() if state[key].shape != like.shape]:
        raise ModelLoadError(
            f"{name} cannot be loaded: of another shape than its card says: {few_names(odd)}"
        )
    for key, like in shapes.items():
        needed, kinds = (
            ("floating-point", _NUMBERS) if like.is_floating_point() else ("whole", WHOLE)
        )
        if state[key].dtype not in kinds:
            kind = str(state[key].dtype).removeprefix("torch.")
            raise ModelLoadError(
                f"{name} cannot be loaded: {key} has {kind}, and needs {needed} numbers"
            )


def _shapes(layer: nn.Module) -> list[tuple[int, int]]:
    return [(each.in_features, each.out_features) for each in low_rank_linears(layer)]


def _refuse_broken(name: str, state: dict[str, Tensor]) -> None:
    for key, tensor in state.items():
        if not bool(torch.isfinite(tensor).all()):
            raise ModelLoadError(f"{name}: {key} has weights that are no numbers")
