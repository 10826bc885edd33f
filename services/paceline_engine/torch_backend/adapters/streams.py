"""Speculative Streaming (Bhendawade et al. 2024, arXiv 2402.11131): streams beside the main one.

In the upper layers each main row has further rows beside it. Stream j (from 1) of the row of token
t guesses token t + 1 + j; the main row itself decides t + 1. The main rows go through the model's
own weights: the output is the model's, to the bit. In the lossless variant low-rank weights (LoRA)
are added for stream rows alone. In the paper's the model was fine-tuned together with its streams
(`paceline_training`); these share its weights, and their rank is 0.

Letters: B sequences, R main rows that have streams, J streams (the reach, gamma), L tokens that
main rows may see, H heads, G key and value heads, D their width, E the model's width.

    main row of token t      sees main rows 0 .. t            (as ever)
    stream j beside it       sees main rows 0 .. t, and its own row's streams 1 .. j
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from paceline_engine.torch_backend.adapters.low_rank import LOW_RANK_PARTS, LowRank

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline_engine.torch_backend.adapters.trunk import Trunk

_EMBEDDING_STD = 0.02


@dataclass(frozen=True, slots=True)
class SeenTokens:
    """What a main row sees, itself included.

    Attributes:
        keys, values: The main stream's of each upper layer: (1, G, L, D).
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]


class _Attend(Protocol):
    """Attends with stream rows, each to what its main row sees and the streams before it."""

    def __call__(
        self, queries: Tensor, own_keys: Tensor, own_values: Tensor, *, scale: float
    ) -> Tensor:
        """Attend with (B, R, J, H, D) to the rows' own (B, R, J, G, D); return the first shape."""


class StreamLayer(nn.Module):
    """The low-rank weights of one upper layer, and how stream rows go through it."""

    def __init__(self, shapes: Sequence[tuple[int, int]], *, rank: int) -> None:
        """Build weights that add nothing.

        Args:
            shapes: Inputs and outputs of each of `LOW_RANK_PARTS`.
            rank: The weights' rank.
        """
        super().__init__()
        self.parts = nn.ModuleList(LowRank(*shape, rank=rank) for shape in shapes)

    def forward(
        self,
        hidden: Tensor,
        layer: Any,
        *,
        attend: _Attend,
        rotation: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Compute (B, R, J, E) from (B, R, J, E).

        Args:
            hidden: Stream rows.
            layer: The model's own layer.
            attend: To the main stream in this layer, too.
            rotation: Cosines and sines for stream rows: (R, J, D) each.
        """
        attention = layer.self_attn
        inner = layer.input_layernorm(hidden)
        queries, own_keys, own_values = (
            torch.unflatten(self._product(place, layer, inner), -1, (-1, attention.head_dim))
            for place in range(3)
        )
        seen = attend(
            _rotate(queries, rotation),
            _rotate(own_keys, rotation),
            own_values,
            scale=attention.scaling,
        )
        hidden = hidden + self._product(3, layer, seen.flatten(-2))
        inner = layer.post_attention_layernorm(hidden)
        gate = layer.mlp.act_fn(self._product(4, layer, inner))
        return hidden + self._product(6, layer, gate * self._product(5, layer, inner))

    def _product(self, place: int, layer: Any, x: Tensor) -> Tensor:
        own: Tensor = layer.get_submodule(LOW_RANK_PARTS[place])(x)
        added: Tensor = self.parts[place](x)
        return own + added


class Streams(nn.Module):
    """Stream embeddings, low-rank weights of the upper layers, and the early exit.

    The early exit guesses from what enters the upper layers what the main stream will choose, so
    that a tree can be pruned before they are computed: a low-rank residual before the model's own
    norm and head. Difference: the paper's is no residual, which would leave logits of its rank.
    """

    feature_layers: tuple[int, ...] = ()

    def __init__(
        self,
        *,
        reach: int,
        width: int,
        layer_shapes: Sequence[Sequence[tuple[int, int]]],
        rank: int,
        exit_rank: int,
    ) -> None:
        """Build streams that all guess alike.

        Args:
            reach: How many tokens to guess after the main stream's own (gamma).
            width: E.
            layer_shapes: For each upper layer the shapes that `StreamLayer` takes.
            rank: The low-rank weights' rank; 0: there are none.
            exit_rank: The early exit's rank.
        """
        super().__init__()
        self.reach = reach
        self.embeddings = nn.Parameter(torch.zeros(reach, width))
        self.layers = nn.ModuleList(StreamLayer(shapes, rank=rank) for shapes in layer_shapes)
        self.early_exit = LowRank(width, width, rank=exit_rank)

    @property
    def upper_layers(self) -> int:
        """How many of the model's last layers have stream rows."""
        return len(self.layers)

    @torch.no_grad()
    def start_from(self, model: Any, *, generator: torch.Generator) -> None:
        """Draw what is random before training."""
        del model
        drawn = torch.empty_like(self.embeddings, device="cpu")
        self.embeddings.copy_(drawn.normal_(std=_EMBEDDING_STD, generator=generator))
        for module in self.modules():
            if isinstance(module, LowRank):
                module.start(generator)

    def draft_logits(self, model: Any, trunk: Trunk) -> Iterator[Tensor]:
        """Yield each stream's logits with streams beside every row: (B, T, V)."""
        length = trunk.entering.shape[1]
        positions = torch.arange(length, device=trunk.entering.device)
        hidden = self.stream_rows(
            model,
            trunk.entering,
            positions=positions,
            keys=trunk.keys,
            values=trunk.values,
            sees=positions[:, None] >= positions,
        )
        for stream in hidden.unbind(2):
            yield model.lm_head(model.model.norm(stream))

    def stream_rows(
        self,
        model: Any,
        entering: Tensor,
        *,
        positions: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        sees: Tensor,
    ) -> Tensor:
        """Compute the streams beside some main rows: (B, R, J, E), after the last layer.

        Args:
            model: The one that they are for.
            entering: (B, R, E) what enters the upper layers in the main rows.
            positions: (R,) of the main rows in their sequences.
            keys, values: The main stream's of each upper layer: (B, G, L, D).
            sees: (R, L) bool: which of these a row and its streams see, itself included.

        Invariants:
            The same for a row alone, among others, and in a tree (tests/unit/engine/
            test_streams.py).
        """
        mask = entering.new_zeros(sees.shape).masked_fill_(~sees, -math.inf)
        attends = [
            partial(_attend, keys=own_keys, values=own_values, mask=mask)
            for own_keys, own_values in zip(keys, values, strict=True)
        ]
        return self._through(model, entering, positions=positions, attends=attends)

    def begin(self, entering: Tensor) -> Tensor:
        """Return the streams beside rows before the upper layers: (..., J, E) from (..., E)."""
        return entering[..., None, :] + self.embeddings.to(entering.dtype)

    def guess(
        self, model: Any, entering: Tensor, *, positions: Tensor, seen: Sequence[SeenTokens]
    ) -> Iterator[Tensor]:
        """Yield each stream's logits beside single rows of any sequences: (R, V).

        Args:
            model: The one that they are for.
            entering: (R, E) what enters the upper layers in the main rows.
            positions: (R,) of the main rows in their sequences.
            seen: What each of them sees.
        """
        attends = [
            partial(
                _attend_apart,
                keys=[each.keys[layer] for each in seen],
                values=[each.values[layer] for each in seen],
            )
            for layer in range(len(self.layers))
        ]
        hidden = self._through(model, entering[None], positions=positions, attends=attends)
        for stream in hidden[0].unbind(1):
            yield model.lm_head(model.model.norm(stream))

    def _through(
        self, model: Any, entering: Tensor, *, positions: Tensor, attends: Sequence[_Attend]
    ) -> Tensor:
        """Compute the streams beside (B, R, E) through all upper layers: (B, R, J, E)."""
        hidden = self.begin(entering)
        offsets = torch.arange(1, self.reach + 1, device=positions.device)
        rotation = model.model.rotary_emb(hidden, (positions[:, None] + offsets).reshape(1, -1))
        cosines, sines = (each.view(len(positions), self.reach, -1) for each in rotation)
        own_layers = model.model.layers[-len(self.layers) :]
        for layer, own, attend in zip(self.layers, own_layers, attends, strict=True):
            hidden = layer(hidden, own, attend=attend, rotation=(cosines, sines))
        return hidden

    def early_logits(self, model: Any, trunk: Trunk) -> Tensor:
        """Return what the main stream will say, guessed before the upper layers: (B, T, V).

        What it guesses from does not learn of it.
        """
        return self.exit_early(model, trunk.entering.detach())

    def exit_early(self, model: Any, entering: Tensor) -> Tensor:
        """Guess from what enters the upper layers, (..., E), what the main stream will say."""
        hidden = entering + self.early_exit(entering)
        logits: Tensor = model.lm_head(model.model.norm(hidden))
        return logits


def _attend(
    queries: Tensor,
    own_keys: Tensor,
    own_values: Tensor,
    *,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scale: float,
) -> Tensor:
    """Attend to the main stream and the row's own streams at once: (B, R, J, H, D).

    Args:
        queries: (B, R, J, H, D).
        own_keys, own_values: (B, R, J, G, D).
        keys, values, mask: See `StreamLayer`.
        scale: The factor of the products.
    """
    _, rows, streams, heads, _ = queries.shape
    group = heads // keys.shape[1]
    # (B, G, H / G, R, J, D) from here on: so the main stream's keys need not be copied.
    asked = torch.unflatten(queries, 3, (-1, group)).permute(0, 3, 4, 1, 2, 5) * scale
    own_keys, own_values = (
        each.permute(0, 3, 1, 2, 4)[:, :, None] for each in (own_keys, own_values)
    )
    shape = (group, rows, streams)
    to_main = torch.unflatten(asked.flatten(2, 4) @ keys.transpose(-1, -2), 2, shape)
    later = torch.ones(streams, streams, dtype=torch.bool, device=queries.device).triu(1)
    to_own = (asked @ own_keys.transpose(-1, -2)).masked_fill(later, -math.inf)
    products = torch.cat((to_main + mask[:, None], to_own), -1)
    summed_in = torch.promote_types(products.dtype, torch.float32)
    weights = products.softmax(-1, dtype=summed_in).to(queries.dtype)
    from_main, from_own = torch.split(weights, [keys.shape[2], streams], -1)
    seen = torch.unflatten(from_main.flatten(2, 4) @ values, 2, shape) + from_own @ own_values
    return seen.permute(0, 3, 4, 1, 2, 5).flatten(3, 4)


def _attend_apart(
    queries: Tensor,
    own_keys: Tensor,
    own_values: Tensor,
    *,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    scale: float,
) -> Tensor:
    """Attend with each of R rows, (1, R, J, H, D), to its own sequence: R times (1, G, L, D)."""
    rows = [
        _attend(
            *(each[:, row : row + 1] for each in (queries, own_keys, own_values)),
            keys=keys[row],
            values=values[row],
            mask=queries.new_zeros(1, keys[row].shape[2]),
            scale=scale,
        )
        for row in range(queries.shape[1])
    ]
    return torch.cat(rows, 1)


def _rotate(states: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate (B, R, J, heads, D) by position."""
    cosines, sines = (each[..., None, :] for each in rotation)
    half = states.shape[-1] // 2
    swapped = torch.cat((-states[..., half:], states[..., :half]), dim=-1)
    return states * cosines + swapped * sines
