"""The model's own forward: the main stream, which adapters read and never change.

Letters: B sequences, T tokens each, N layers, E the model's width, G key and value heads, D their
width, V the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Trunk:
    """The main stream over some sequences.

    Attributes:
        token_ids: (B, T) the sequences.
        entering: (B, T, E) what the upper layers get.
        last: (B, T, E) what the head gets: after the last layer and its norm.
        logits: (B, T, V) the model's own.
        keys, values: Of each upper layer, rotated by position: (B, G, T, D).
        features: The inputs of the wanted layers side by side, (B, T, number of them * E); or None.
    """

    token_ids: Tensor
    entering: Tensor
    last: Tensor
    logits: Tensor
    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    features: Tensor | None = None


def compute_trunk(
    model: Any,
    token_ids: Tensor,
    *,
    upper_layers: int = 0,
    feature_layers: Sequence[int] = (),
    learns: bool = False,
) -> Trunk:
    """Do the model's own forward, and keep what adapters read of it.

    Args:
        model: A causal model of the transformers library, as loaded.
        token_ids: (B, T) int64, from the sequences' first token on.
        upper_layers: How many of the last layers have rows beside the main stream's.
        feature_layers: The layers whose inputs are kept as features.
        learns: Whether the model itself is trained with what is made of this.

    Invariants:
        The logits are bitwise the model's: nothing but its own forward makes them
        (tests/unit/engine/test_streams.py).
    """
    layers = model.config.num_hidden_layers
    cache = DynamicCache()
    with torch.set_grad_enabled(learns):
        output = model.model(
            token_ids,
            past_key_values=cache,
            use_cache=True,
            output_hidden_states=upper_layers > 0 or bool(feature_layers),
        )
        last = output.last_hidden_state
        logits = model.lm_head(last)
    first = layers - upper_layers
    entering = output.hidden_states[first] if upper_layers else last
    kept: list[Any] = cache.layers[first:]
    features = None
    if feature_layers:
        features = torch.cat([output.hidden_states[layer] for layer in feature_layers], -1)
    return Trunk(
        token_ids=token_ids,
        entering=entering,
        last=last,
        logits=logits,
        keys=[each.keys for each in kept],
        values=[each.values for each in kept],
        features=features,
    )
