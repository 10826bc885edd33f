"""Llama and models built like it, in fewer and larger steps than the library takes.

A forward over a few rows computes little, so what lies around the matrix products counts: the
library spends more than half of a small forward there (bench/LOG.md). Same weights, same
arithmetic: logits differ by rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline_engine.torch_backend.attention_kernels import Attention
from paceline_engine.torch_backend.compiled_layers import (
    CompiledLayer,
    LayerParts,
    LayerRun,
    agree,
    can_compile,
    runs_compute,
    runs_of,
)
from paceline_engine.torch_backend.compiled_steps import MOST_ROWS
from paceline_engine.torch_backend.packed_linear import (
    WideProduct,
    can_pack,
    give_weights_back,
    leave_files,
    product_of,
    take_weights,
    warm_up,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_engine.torch_backend.compiled_steps import Steps
    from paceline_engine.torch_backend.packed_linear import MakeProduct, Product
    from paceline_engine.torch_backend.shared_rows import ForwardRows

_FIRST_ROTATIONS = 1024
# A layer's products; `StreamWeights` uses the same numbers.
_INTO_HEADS, _OUT_OF_HEADS, _GATE_AND_UP, _DOWN = range(4)

Rotation: TypeAlias = tuple[Tensor, Tensor]
"""Cosines, and sines with the signs of the swapped halves: (T, D) each."""


class FusedLlama:
    """The decoder of a loaded model, with its weights.

    The model given loses the weights that are packed, so that they are in memory once
    (`give_back`). Its other weights become views of the fused ones. What is computed does not
    follow when they are changed.

    Letters: T rows, H heads, G key and value heads, D their width, E the model's width, V the rows
    of the head.

    Attributes:
        layers: The decoder layers, as modules, so that hooks can be put on them.
        runs: Modules that compute several layers each, of few rows, instead of these.
        agreeing_counts: The numbers of a sequence's rows with which compiled attention has the bits
            of torch's.
        group: H / G, how many query heads each key head has.
    """

    def __init__(self, model: Any, *, packs: bool = True) -> None:
        """Fuse the projections of a model that `can_fuse`.

        Cost: copies most weights once, one layer's at a time.

        Args:
            packs: Whether to pack weights, where they can be.
        """
        body = model.model
        packs = packs and can_pack(model.parameters())
        if packs:
            leave_files(model)
        layers = [
            _Layer(layer, index=index, packs=packs) for index, layer in enumerate(body.layers)
        ]
        self.layers: Sequence[nn.Module] = layers
        self._own_layers = layers
        self.runs: Sequence[LayerRun] = ()
        self.agreeing_counts: frozenset[int] = frozenset()
        self.group = layers[0].group
        self._embedding = body.embed_tokens
        is_tied = self._embedding.weight is model.lm_head.weight
        self._head = _head(model.lm_head, packs=packs)
        warm_up([self._head, *(each for layer in layers for each in layer.products)])
        if is_tied and self._head.loaded is not None:
            self._embedding.weight = model.lm_head.weight
        self._norm = _norm(body.norm)
        self._rotary = body.rotary_emb
        self._rotations: Rotation = (torch.empty(0), torch.empty(0))

    def __call__(self, rows: ForwardRows) -> Tensor:
        """Do a forward, and return the logits of the scored rows: (rows, V)."""
        hidden = functional.embedding(rows.token_ids, self._embedding.weight)
        if self.runs and runs_compute(self.runs, rows):
            rotation = self._rotation(rows)
            for run in self.runs:
                hidden = run(hidden, rotation, rows)
        else:
            rows, hidden = self._through_layers(hidden, rows)
        last = self._norm(hidden[rows.scored])
        if rows.read_at == len(self.layers):
            rows.read = last
        if rows.streams is not None:
            rows.streams.take(hidden)
        return self._head(last)

    def _through_layers(self, hidden: Tensor, rows: ForwardRows) -> tuple[ForwardRows, Tensor]:
        """Return the rows with which the forward ended, and what the last layer made of them."""
        rotation = self._rotation(rows)
        for index, layer in enumerate(self.layers):
            if index == rows.read_at:
                others = rows.change(hidden) if rows.change is not None else None
                if others is not None:
                    rows, hidden = others.rows, others.hidden
                    rotation = self._rotation(rows)
                rows.read = hidden[rows.scored]
            if rows.features is not None:
                rows.features.take(index, hidden)
            hidden = layer(hidden, rotation, rows)
        return rows, hidden

    def lend_head(self, model: Any) -> None:
        """Let the given model use this head, which may be packed, for the adapters."""
        model.lm_head.forward = self._head.of_any_rows

    def give_back(self, model: Any) -> None:
        """Give the given model back the weights that it lost."""
        for own, layer in zip(self._own_layers, model.model.layers, strict=True):
            for product, linears in zip(own.products, _projections(layer), strict=True):
                give_weights_back(product, linears)
        give_weights_back(self._head, [model.lm_head])

    def replace_products(self, model: Any, make: MakeProduct) -> list[Product]:
        """Compute with other products from now on; the given model loses their weights."""
        leave_files(model)
        for own, layer in zip(self._own_layers, model.model.layers, strict=True):
            for which, linears in enumerate(_projections(layer)):
                own.products[which] = make(own.products[which], linears)
                take_weights(own.products[which], linears)
        self._head = make(self._head, [model.lm_head])
        take_weights(self._head, [model.lm_head])
        self.lend_head(model)
        return [self._head, *(each for own in self._own_layers for each in own.products)]

    @property
    def can_use_steps(self) -> bool:
        """Whether compiled steps compute such layers."""
        return all(layer.parts() is not None for layer in self._own_layers)

    def use_steps(self, steps: Steps) -> bool:
        """Compute what is between products in compiled steps from now on, with other `runs`.

        Returns:
            False: they do not compute such layers, or do not give the bits of torch's operators
            here; they are not used.
        """
        parts = [own for layer in self._own_layers if (own := layer.parts()) is not None]
        sizes = {each.sizes: each for each in parts}
        if not self.can_use_steps or not all(agree(each, steps) for each in sizes.values()):
            return False
        counts = {each.sizes: each.agreeing_counts(steps) for each in sizes.values()}
        for layer, own in zip(self._own_layers, parts, strict=True):
            layer.compiled = CompiledLayer(own, steps, agreeing_counts=counts[own.sizes])
        self.runs = runs_of(
            [each.compiled for each in self._own_layers if each.compiled is not None]
        )
        self.agreeing_counts = frozenset.intersection(*counts.values())
        return True

    def _rotation(self, rows: ForwardRows) -> Rotation:
        cosines, sines = self.rotations(rows.longest)
        return cosines.index_select(0, rows.positions), sines.index_select(0, rows.positions)

    def rotations(self, length: int) -> Rotation:
        """Return the rotations of the first positions: (length, D) each.

        Cost: computed once for each position.
        """
        cosines, sines = self._rotations
        if length > len(cosines):
            # In whole tables, because the last few numbers of a kernel differ in the last bit.
            wanted = -(-2 * length // _FIRST_ROTATIONS) * _FIRST_ROTATIONS
            weight = self._embedding.weight
            positions = torch.arange(wanted, device=weight.device)[None]
            cosines, sines = (table[0] for table in self._rotary(weight, positions))
            # The first half of the rotated vector is minus the second half of the vector.
            sines[:, : sines.shape[-1] // 2].neg_()
            self._rotations = cosines, sines
        return cosines[:length], sines[:length]


class _Layer(nn.Module):
    """One decoder layer: attention and MLP, each with its norm before it.

    Its parts are no modules: calling one takes longer than some of the kernels.

    Attributes:
        products: Those with its weights, in the order of the names above.
        group: H / G.
        compiled: Computes it in compiled steps; None: torch's operators do.
    """

    def __init__(self, layer: Any, *, index: int, packs: bool) -> None:
        super().__init__()
        attention = layer.self_attn
        self._index = index
        self._attention_norm = _norm(layer.input_layernorm)
        self._mlp_norm = _norm(layer.post_attention_layernorm)
        self.products = [_fuse(*linears, packs=packs) for linears in _projections(layer)]
        self._activation = layer.mlp.act_fn.forward
        self._width = attention.head_dim
        self._heads = attention.q_proj.out_features // self._width
        self._kv_heads = attention.k_proj.out_features // self._width
        self.group = self._heads // self._kv_heads
        self._attention = Attention(scale=attention.scaling)
        self._head_norm = _head_norm(attention, heads=self._heads, kv_heads=self._kv_heads)
        self.compiled: CompiledLayer | None = None

    def parts(self) -> LayerParts | None:
        """Return what it is made of; None: compiled steps do not compute it."""
        attention, mlp = self._attention_norm, self._mlp_norm
        if not (isinstance(attention, _SmallNorm) and isinstance(mlp, _SmallNorm)):
            return None
        if self._head_norm is not None:
            return None
        parts = LayerParts(
            index=self._index,
            norms=(attention, mlp),
            products=self.products,
            activation=self._activation,
            rotate=_rotate,
            heads=self._heads,
            kv_heads=self._kv_heads,
            width=self._width,
            attention=self._attention,
        )
        return parts if can_compile(parts) else None

    def forward(self, hidden: Tensor, rotation: Rotation, rows: ForwardRows) -> Tensor:
        """Compute (T, E) from (T, E)."""
        if self._takes_steps(hidden, rows):
            assert self.compiled is not None
            return self.compiled(hidden, rotation, rows)
        # Each product is a tensor of its own, so that what comes next can be added in place.
        hidden = self._attend(self._attention_norm(hidden), rotation, rows).add_(hidden)
        gate, up = self._product(_GATE_AND_UP, self._mlp_norm(hidden), rows).chunk(2, dim=-1)
        return self._product(_DOWN, self._activation(gate) * up, rows).add_(hidden)

    def _takes_steps(self, hidden: Tensor, rows: ForwardRows) -> bool:
        """Whether steps compute it: low-rank weights need the inputs of products, not rounded."""
        return (
            self.compiled is not None
            and rows.streams is None
            and rows.lora is None
            and len(hidden) <= MOST_ROWS
            and hidden.is_contiguous()
        )

    def _product(self, which: int, hidden: Tensor, rows: ForwardRows) -> Tensor:
        product = self.products[which](hidden)
        if rows.streams is not None:
            rows.streams.add(self._index, which, inputs=hidden, product=product)
        if rows.lora is not None:
            rows.lora.add((self._index, which), inputs=hidden, product=product)
        return product

    def _attend(self, hidden: Tensor, rotation: Rotation, rows: ForwardRows) -> Tensor:
        count, heads, kv_heads = len(hidden), self._heads, self._kv_heads
        # (H + 2 G, T, D): query heads, key heads, value heads.
        states = self._product(_INTO_HEADS, hidden, rows)
        states = states.view(count, -1, self._width).transpose(0, 1)
        turned = states[: heads + kv_heads]
        if self._head_norm is not None:
            turned = self._head_norm(turned)
        rotated = _rotate(turned, rotation)
        seen = rows.attend(
            self._index,
            rotated[:heads],
            keys=rotated[heads:],
            values=states[heads + kv_heads :],
            how=self._attention,
        )
        return self._product(_OUT_OF_HEADS, seen.transpose(0, 1).reshape(count, -1), rows)


@dataclass(frozen=True, slots=True)
class _Norm:
    weight: Tensor
    epsilon: float

    def __call__(self, hidden: Tensor) -> Tensor:
        return functional.rms_norm(hidden, self.weight.shape, self.weight, self.epsilon)


@dataclass(frozen=True, slots=True)
class _HeadNorm:
    """Norms of the query and key heads, as Qwen 3 has them: (heads, T, D) from the same.

    Attributes:
        weight: (heads, 1, D): one row for the query heads, one for the key heads.
        epsilon: See `_Norm`.
    """

    weight: Tensor
    epsilon: float

    def __call__(self, states: Tensor) -> Tensor:
        normed = functional.rms_norm(states, states.shape[-1:], None, self.epsilon)
        return normed * self.weight


class _SmallNorm:
    """The same on a CPU in float32, where a small `rms_norm` is seven kernels instead of five.

    With E values x in a row, x / sqrt(mean(x^2) + epsilon) is sqrt(E) x / sqrt(|x|^2 + E epsilon).
    Each step computes a row by itself, so that it has the same bits in any forward. A kernel of
    `hypot` for few rows would differ from that for many, and `sqrt` is not rounded as IEEE 754
    says: the length of (|x|, sqrt(E epsilon)) is.

    Attributes: see `Norm`.
    """

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        width = len(weight)
        self.weight = weight * math.sqrt(width)
        self.least = torch.full((1, 1), math.sqrt(width * epsilon))

    def __call__(self, hidden: Tensor) -> Tensor:
        lengths: Tensor = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
        both = torch.cat((lengths, self.least.expand(len(lengths), 1)), 1)
        lengths = torch.linalg.vector_norm(both, dim=-1, keepdim=True)
        return (hidden / lengths).mul_(self.weight)


def _rotate(states: Tensor, rotation: Rotation) -> Tensor:
    """Return (heads, T, D), contiguous, from the same."""
    cosines, sines = rotation
    swapped = states.roll(states.shape[-1] // 2, -1)
    return swapped.mul_(sines).addcmul_(states, cosines)


def _norm(norm: Any) -> _Norm | _SmallNorm:
    weight = norm.weight.detach()
    is_small = weight.device.type == "cpu" and weight.dtype == torch.float32
    return (_SmallNorm if is_small else _Norm)(weight, norm.variance_epsilon)


def _head_norm(attention: Any, *, heads: int, kv_heads: int) -> _HeadNorm | None:
    """Return the norms between projections and rotations, if a layer has them."""
    if not hasattr(attention, "q_norm"):
        return None
    norms = [attention.q_norm] * heads + [attention.k_norm] * kv_heads
    weight = torch.stack([norm.weight.detach() for norm in norms])[:, None]
    return _HeadNorm(weight, attention.q_norm.variance_epsilon)


def _projections(layer: Any) -> tuple[tuple[nn.Linear, ...], ...]:
    """Return the linear modules of a layer's products, in the order of the names above."""
    attention, mlp = layer.self_attn, layer.mlp
    return (
        (attention.q_proj, attention.k_proj, attention.v_proj),
        (attention.o_proj,),
        (mlp.gate_proj, mlp.up_proj),
        (mlp.down_proj,),
    )


def _head(linear: nn.Linear, *, packs: bool) -> Product:
    """Return the head's product, in float32 where a GPU computes it so from half precision.

    Logits of 10 to 30 rounded to bfloat16 are 0.06 to 0.125 apart: then tokens tie that do not.
    """
    weight = linear.weight.detach()
    if weight.device.type == "cuda" and weight.dtype != torch.float32 and linear.bias is None:
        product = WideProduct(weight)
        take_weights(product, [linear])
        return product
    return _fuse(linear, packs=packs)


def _fuse(*projections: nn.Linear, packs: bool) -> Product:
    """Put projections of one input side by side: they become views of the fused one, or empty."""
    weights = [each.weight.detach() for each in projections]
    weight = torch.cat(weights) if len(weights) > 1 else weights[0]
    biases = [each.bias.detach() for each in projections if each.bias is not None]
    product = product_of(weight, torch.cat(biases) if biases else None, packs=packs)
    take_weights(product, projections)
    return product
