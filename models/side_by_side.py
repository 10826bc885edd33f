"""A Llama that reads one token of each of many texts in a forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from paceline_engine.torch_backend.packed_linear import Product, product_of

if TYPE_CHECKING:
    from torch import Tensor


class SideBySide:
    """A Llama that reads one token of each of many texts in a forward.

    Its products compute in bfloat16, on a CPU with packed weights; everything else is in float32.
    On a GPU the head is in float32, too: there its product can be had in more digits for little.

    Letters: B texts, L positions, E width, G key and value heads, R query heads for each, D their
    width.
    """

    def __init__(self, model: Any, *, rows: int, length: int) -> None:
        config = model.config
        self._epsilon = config.rms_norm_eps
        self._groups = config.num_key_value_heads
        self._repeats = config.num_attention_heads // self._groups
        self._width = config.head_dim
        body = model.model
        self._embedding = body.embed_tokens.weight.detach()
        self.device = self._embedding.device
        self._head_dtype = torch.bfloat16 if self.device.type == "cpu" else torch.float32
        self._head = _packed(self._embedding, dtype=self._head_dtype)
        self._norm = body.norm.weight.detach()
        self._layers = [_Layer.of(layer) for layer in body.layers]
        positions = torch.arange(length, device=self.device)
        cosines, sines = body.rotary_emb(self._embedding, positions[None])
        self._positions = positions
        self._cosines: Tensor = cosines[0]
        self._sines: Tensor = sines[0]
        shape = (len(self._layers), rows * self._groups, length, self._width)
        self._keys = torch.zeros(shape, dtype=torch.bfloat16, device=self.device)
        self._values = torch.zeros_like(self._keys)

    def __call__(self, token_ids: Tensor, position: Tensor, *, seen: int) -> Tensor:
        """Read (B,) tokens at one position.

        Args:
            token_ids: (B,) int64.
            position: (1,) int64. A tensor, so that a CUDA graph can be replayed at each position.
            seen: How many positions are looked at: all up to this one, and perhaps some after it,
                which get no weight. So a graph serves several positions.

        Returns:
            Logits, (B, V) float32.
        """
        mask = torch.zeros(seen, device=self.device)
        mask.masked_fill_(self._positions[:seen] > position, -torch.inf)
        hidden = functional.embedding(token_ids, self._embedding)
        for index, layer in enumerate(self._layers):
            normed = self._normed(hidden, layer.norm)
            hidden = hidden + self._attend(index, layer, normed, position, mask)
            gate, up = layer.gate_and_up(self._normed(hidden, layer.mlp_norm)).chunk(2, dim=-1)
            hidden = hidden + layer.down(functional.silu(gate) * up)
        return self._head(self._normed(hidden, self._norm, dtype=self._head_dtype)).float()

    def _normed(
        self, hidden: Tensor, weight: Tensor, *, dtype: torch.dtype = torch.bfloat16
    ) -> Tensor:
        return functional.rms_norm(hidden, weight.shape, weight, self._epsilon).to(dtype)

    def _attend(
        self, index: int, layer: _Layer, normed: Tensor, position: Tensor, mask: Tensor
    ) -> Tensor:
        rows, groups, seen = len(normed), self._groups, len(mask)
        states = layer.into_heads(normed).view(rows, -1, self._width)
        queries = groups * self._repeats
        rotated = self._rotate(states[:, : queries + groups].float(), position).bfloat16()
        keys, values = self._keys[index], self._values[index]
        keys.index_copy_(1, position, rotated[:, queries:].reshape(-1, 1, self._width))
        values.index_copy_(1, position, states[:, queries + groups :].reshape(-1, 1, self._width))
        query = rotated[:, :queries].reshape(rows * groups, self._repeats, self._width)
        scores = (query @ keys[:, :seen].mT * self._width**-0.5).float() + mask
        attended = scores.softmax(-1).bfloat16() @ values[:, :seen]
        return layer.out_of_heads(attended.reshape(rows, -1))

    def _rotate(self, states: Tensor, position: Tensor) -> Tensor:
        half = self._width // 2
        swapped = torch.cat((-states[..., half:], states[..., :half]), dim=-1)
        cosines, sines = (each.index_select(0, position) for each in (self._cosines, self._sines))
        return states * cosines + swapped * sines


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    norm: Tensor
    mlp_norm: Tensor
    into_heads: Product
    out_of_heads: Product
    gate_and_up: Product
    down: Product

    @classmethod
    def of(cls, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        return cls(
            norm=layer.input_layernorm.weight.detach(),
            mlp_norm=layer.post_attention_layernorm.weight.detach(),
            into_heads=_packed(
                attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight
            ),
            out_of_heads=_packed(attention.o_proj.weight),
            gate_and_up=_packed(mlp.gate_proj.weight, mlp.up_proj.weight),
            down=_packed(mlp.down_proj.weight),
        )


def _packed(*weights: Tensor, dtype: torch.dtype = torch.bfloat16) -> Product:
    """Return the product with some weights, one after the other; packed on a CPU."""
    weight = torch.cat(weights).detach().to(dtype)
    return product_of(weight, None, packs=weight.device.type == "cpu")
