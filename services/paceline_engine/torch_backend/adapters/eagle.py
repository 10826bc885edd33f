"""EAGLE-3's head (Li et al. 2025, arXiv 2503.01840): one decoder layer that drafts step by step.

Theory of operation
-------------------

The head reads the *features* of the target's rows: what enters three of its layers, a low one, one
in the middle and a high one. One product (`fc`) reduces the three to the model's width. A row of
the head stands for a pair: the features at position p, and the token at position p + 1, which is
known by then. It guesses the token at p + 2.

    target's row       p        reads the token x(p), has the features g(p), decides x(p + 1)
    head's row     0 at p       reads g(p) and x(p + 1), has the output h, guesses x(p + 2)
    head's row     1 at p + 1   reads h    and the guess,  has the output h', guesses x(p + 3)

So only the first guess is made from features; each further guess is made from the head's own output
before its norm, as the target has not computed these positions. A row sees the rows of features up
to position p, and the rows of this chain before it: never another chain's.

A row's key and value depend on the row's own input alone, because the head has one layer. So they
can be computed for any certain row at any time, and only rows that guess need the rest of the
layer.

In training all rows of a text begin a chain at once ("training-time test"): step s reads the output
of step s - 1 beside the text's own token, and attends to the first step's rows up to its own place
and to the later rows of its own chain.

Letters: B sequences, T rows, S steps (the reach, gamma), E the model's width, H heads, G key and
value heads, D their width, V the vocabulary, N the tokens of the draft vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline_engine.torch_backend.adapters.adapter import SeenRows
    from paceline_engine.torch_backend.adapters.eagle_shape import EagleShape
    from paceline_engine.torch_backend.adapters.trunk import Trunk

_STANDARD_DEVIATION = 0.02


class _Norm(nn.Module):
    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._epsilon = epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        weight = self.weight
        return functional.rms_norm(hidden.to(weight.dtype), weight.shape, weight, self._epsilon)


class _Attention(nn.Module):
    def __init__(self, shape: EagleShape, width: int) -> None:
        super().__init__()
        queries, keys = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
        self.q_proj = nn.Linear(2 * width, queries, bias=False)
        self.k_proj = nn.Linear(2 * width, keys, bias=False)
        self.v_proj = nn.Linear(2 * width, keys, bias=False)
        self.o_proj = nn.Linear(queries, width, bias=False)


class _Mlp(nn.Module):
    def __init__(self, shape: EagleShape, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, shape.inner_width, bias=False)
        self.up_proj = nn.Linear(width, shape.inner_width, bias=False)
        self.down_proj = nn.Linear(shape.inner_width, width, bias=False)
        self._activation = ACT2FN[shape.activation]

    def forward(self, hidden: Tensor) -> Tensor:
        inner: Tensor = self._activation(self.gate_proj(hidden)) * self.up_proj(hidden)
        down: Tensor = self.down_proj(inner)
        return down


class _Layer(nn.Module):
    def __init__(self, shape: EagleShape, width: int) -> None:
        super().__init__()
        self.self_attn = _Attention(shape, width)
        self.mlp = _Mlp(shape, width)
        self.input_layernorm = _Norm(width, shape.epsilon)
        self.hidden_norm = _Norm(width, shape.epsilon)
        self.post_attention_layernorm = _Norm(width, shape.epsilon)


@dataclass(frozen=True, slots=True)
class Chain:
    """Some rows of the head that are part of chains of guesses.

    Attributes:
        both: (..., 2 E) the layer's input: the embedding and the features, each after its norm.
        residual: (..., E) what the layer's output is added to.
    """

    both: Tensor
    residual: Tensor


class EagleHead(nn.Module):
    """The head of one target. The names of its weights are those of published heads.

    Attributes:
        reach: How many tokens it guesses after the model's own next one (gamma).
        shape: Its sizes.
    """

    upper_layers = 0

    def __init__(self, shape: EagleShape, *, reach: int, width: int, vocabulary_size: int) -> None:
        """Build a head that guesses nothing yet.

        Args:
            shape: Its sizes.
            reach: How many tokens to guess after the model's own.
            width: E.
            vocabulary_size: The rows of the target's head.
        """
        super().__init__()
        self.reach = reach
        self.shape = shape
        self.vocabulary_size = vocabulary_size
        self.fc = nn.Linear(len(shape.feature_layers) * width, width, bias=False)
        if shape.feature_norms == "together":
            self.input_norm = _Norm(self.fc.in_features, shape.epsilon)
        elif shape.feature_norms == "each":
            self.fc_norm = nn.ModuleList(_Norm(width, shape.epsilon) for _ in shape.feature_layers)
        self.midlayer = _Layer(shape, width)
        self.norm = _Norm(width, shape.epsilon)
        self.register_buffer("d2t", torch.zeros(shape.draft_vocabulary, dtype=torch.int64))
        self.lm_head: nn.Linear | None = None
        self.embed_tokens: nn.Embedding | None = None
        if shape.own_head:
            self.lm_head = nn.Linear(width, shape.draft_vocabulary, bias=False)
        if shape.own_embedding:
            self.embed_tokens = nn.Embedding(vocabulary_size, width)
        self._rotary: list[Any] = []  # no module: its frequencies stay in float32
        self._rows_of_head: list[nn.Linear] = []  # no module: they are the target's

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The layers of the target whose inputs it reads."""
        return self.shape.feature_layers

    @property
    def width(self) -> int:
        """The width of what is kept of a row's features: E."""
        return self.fc.out_features

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """What it keeps of a row: G, and the widths of its keys and values."""
        return self.shape.kv_heads, self.shape.head_width, self.shape.head_width

    @property
    def draft_token_ids(self) -> Tensor:
        """The tokens that it can guess, ascending: (N,) int64."""
        offsets: Tensor = self.get_buffer("d2t")
        return torch.arange(len(offsets), device=offsets.device) + offsets

    def choose_tokens(self, token_ids: Tensor) -> None:
        """Set the tokens that it can guess: (N,), ascending."""
        offsets = token_ids.cpu() - torch.arange(len(token_ids))
        self.get_buffer("d2t").copy_(offsets)
        self._rows_of_head.clear()

    @torch.no_grad()
    def start_from(self, model: Any, *, generator: torch.Generator) -> None:
        """Begin with the target's last layer, which reads its highest features.

        The embedding's half of the layer's input is random at first, and small.
        """
        width = self.fc.out_features
        drawn = torch.empty(self.fc.weight.shape).normal_(
            std=_STANDARD_DEVIATION / 4, generator=generator
        )
        drawn[:, -width:] += torch.eye(width)
        self.fc.weight.copy_(drawn)
        last = model.model.layers[-1]
        own, mlp = self.midlayer.self_attn, self.midlayer.mlp
        for mine, part in ((own.q_proj, "q_proj"), (own.k_proj, "k_proj"), (own.v_proj, "v_proj")):
            weight = mine.weight
            theirs = last.self_attn.get_submodule(part).weight
            drawn = torch.empty(weight.shape).normal_(std=_STANDARD_DEVIATION, generator=generator)
            weight.copy_(drawn)
            if theirs.shape[0] == weight.shape[0]:
                weight[:, width:].copy_(theirs)
        for mine, theirs in (
            (own.o_proj, last.self_attn.o_proj),
            (mlp.gate_proj, last.mlp.gate_proj),
            (mlp.up_proj, last.mlp.up_proj),
            (mlp.down_proj, last.mlp.down_proj),
        ):
            mine.weight.copy_(theirs.weight)
        self.midlayer.hidden_norm.weight.copy_(last.input_layernorm.weight)
        self.midlayer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
        self.norm.weight.copy_(model.model.norm.weight)
        if self.lm_head is not None:
            self.lm_head.weight.copy_(model.lm_head.weight[self.draft_token_ids.cpu()])
        if self.embed_tokens is not None:
            self.embed_tokens.weight.copy_(model.model.embed_tokens.weight)

    # --- all rows of texts, for training and measuring -------------------------------------------

    def draft_logits(self, model: Any, trunk: Trunk) -> Iterator[Tensor]:
        """Yield for each guess its logits beside every row: (B, T, V).

        The tokens between are the text's own. Tokens that it cannot guess have no chance.
        """
        token_ids = self.draft_token_ids
        for logits in self.step_logits(model, trunk):
            wide = logits.new_full((*logits.shape[:-1], self.vocabulary_size), -math.inf)
            yield wide.index_copy_(-1, token_ids, logits)

    def step_logits(self, model: Any, trunk: Trunk) -> Iterator[Tensor]:
        """Yield for each guess its logits of the draft vocabulary beside every row: (B, T, N).

        In the last rows, whose text ends too early, they mean nothing.
        """
        assert trunk.features is not None, "its layers' inputs were kept"
        count = trunk.token_ids.shape[1]
        positions = torch.arange(count, device=trunk.token_ids.device)
        later = positions[:, None] < positions
        feature = self.reduce(trunk.features)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for step in range(self.reach):
            following = functional.pad(trunk.token_ids[:, step + 1 :], (0, step + 1))
            rows = self.read(model, following, feature)
            queries, key, value = self.project(rows, positions=positions + step)
            keys.append(key)
            values.append(value)
            seen = _attend_to_first_and_own(queries, keys, values, later=later)
            output = self.finish(rows, seen)
            yield self.score(model, output)
            feature = self.carry(output)

    # --- the parts of a row ----------------------------------------------------------------------

    def reduce(self, features: Tensor) -> Tensor:
        """Reduce the features of the target's rows: (..., E) from (..., 3 E)."""
        features = features.to(self.fc.weight.dtype)
        if self.shape.feature_norms == "together":
            features = self.input_norm(features)
        elif self.shape.feature_norms == "each":
            parts = features.chunk(len(self.fc_norm), -1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            features = torch.cat(normed, -1)
        reduced: Tensor = self.fc(features)
        return reduced

    def read(self, model: Any, token_ids: Tensor, feature: Tensor) -> Chain:
        """Begin rows with the tokens after theirs, (...), and features or carried outputs."""
        table = model.model.embed_tokens if self.embed_tokens is None else self.embed_tokens
        embedded = functional.embedding(token_ids, table.weight).to(feature.dtype)
        normed = self.midlayer.hidden_norm(feature)
        both = torch.cat((self.midlayer.input_layernorm(embedded), normed), -1)
        return Chain(both, normed if self.shape.norm_before_residual else feature)

    def project(self, rows: Chain, *, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, rotated: (..., T, heads, D) from (..., T, 2 E)."""
        rotation = self._rotation(positions)
        queries = self._heads(self.midlayer.self_attn.q_proj(rows.both))
        return (_rotate(queries, rotation), *self.keys_and_values(rows, positions=positions))

    def keys_and_values(self, rows: Chain, *, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values alone."""
        keys = self._heads(self.midlayer.self_attn.k_proj(rows.both))
        values = self._heads(self.midlayer.self_attn.v_proj(rows.both))
        return _rotate(keys, self._rotation(positions)), values

    def output(self, rows: Chain, *, positions: Tensor, seen: SeenRows) -> Tensor:
        """Return the layer's output, (R, E), of rows that see what a step says."""
        queries, keys, values = self.project(rows, positions=positions)
        seen.take(keys, values)
        return self.finish(rows, seen.attend(queries))

    def finish(self, rows: Chain, seen: Tensor) -> Tensor:
        """Return the layer's output, (..., E), from what the heads have seen: (..., H, D)."""
        hidden = rows.residual + self.midlayer.self_attn.o_proj(seen.flatten(-2))
        inner = self.midlayer.mlp(self.midlayer.post_attention_layernorm(hidden))
        output: Tensor = hidden + inner
        return output

    def score(self, model: Any, output: Tensor) -> Tensor:
        """Return the logits of the draft vocabulary, (..., N), from the layer's output."""
        head = self._head_rows(model) if self.lm_head is None else self.lm_head
        logits: Tensor = head(self.norm(output))
        return logits

    def carry(self, output: Tensor) -> Tensor:
        """Return what the next step reads instead of features: (..., E)."""
        normed: Tensor = self.norm(output)
        return normed if self.shape.norm_output else output

    def early_logits(self, model: Any, trunk: Trunk) -> Tensor | None:
        """Return None: nothing is pruned before the last layer."""
        del model, trunk
        return None

    def _heads(self, states: Tensor) -> Tensor:
        return torch.unflatten(states, -1, (-1, self.shape.head_width))

    def take_head(self, model: Any) -> None:
        """Copy what it needs of the model's head."""
        if self.lm_head is None:
            self._head_rows(model)

    def parts(self) -> list[nn.Module]:
        """Return what it computes with: itself, and what it has copied of the model's head."""
        return [self, *self._rows_of_head]

    def _head_rows(self, model: Any) -> nn.Linear:
        """Return the rows of the target's head for the draft vocabulary: (N, E), copied once."""
        if not self._rows_of_head:
            weight = model.lm_head.weight.detach()
            rows = weight[self.draft_token_ids.to(weight.device)].to(self.fc.weight.dtype)
            count, width = rows.shape
            head = nn.Linear(width, count, bias=False, device="meta")
            head.weight = nn.Parameter(rows, requires_grad=False)
            self._rows_of_head.append(head)
        return self._rows_of_head[0]

    @torch.no_grad()
    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines: (T, 1, D) each."""
        if not self._rotary:
            shape = self.shape
            config = LlamaConfig(
                hidden_size=shape.heads * shape.head_width,
                num_attention_heads=shape.heads,
                num_key_value_heads=shape.kv_heads,
                head_dim=shape.head_width,
                rope_parameters=dict(shape.rope),
            )
            self._rotary.append(LlamaRotaryEmbedding(config).to(positions.device))
        like = self.fc.weight
        cosines, sines = self._rotary[0](like, positions.reshape(1, -1))
        wanted = (*positions.shape, 1, cosines.shape[-1])
        return cosines.view(wanted), sines.view(wanted)


def _rotate(states: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cosines, sines = rotation
    half = states.shape[-1] // 2
    swapped = torch.cat((-states[..., half:], states[..., :half]), dim=-1)
    return (states * cosines + swapped * sines).to(states.dtype)


def _attend_to_first_and_own(
    queries: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], *, later: Tensor
) -> Tensor:
    """Attend to the first step's rows and to the later rows of the own chain: (B, T, H, D).

    Args:
        queries: (B, T, H, D) of the last step.
        keys, values: Of each step so far: (B, T, G, D).
        later: (T, T) bool: which of the first step's rows a row must not see.
    """
    groups = keys[0].shape[2]
    # (B, G, H / G, T, D) from here on.
    asked = torch.unflatten(queries, 2, (groups, -1)).permute(0, 2, 3, 1, 4)
    asked = asked * queries.shape[-1] ** -0.5
    first_keys, first_values = (each[0].permute(0, 2, 1, 3)[:, :, None] for each in (keys, values))
    products = (asked @ first_keys.transpose(-1, -2)).masked_fill(later, -math.inf)
    own = [
        (asked * each.permute(0, 2, 1, 3)[:, :, None]).sum(-1, keepdim=True) for each in keys[1:]
    ]
    together = torch.cat((products, *(each.to(products.dtype) for each in own)), -1)
    summed_in = torch.promote_types(products.dtype, torch.float32)
    weights = together.softmax(-1, dtype=summed_in).to(first_values.dtype)
    count = products.shape[-1]
    seen = weights[..., :count] @ first_values
    for step, each in enumerate(values[1:]):
        share = weights[..., count + step : count + step + 1]
        seen = seen + share * each.permute(0, 2, 1, 3)[:, :, None]
    return seen.permute(0, 3, 1, 2, 4).flatten(2, 3)
