"""The layers of `FusedLlama` in compiled steps: see `compiled_steps.py`.

Letters: T rows, H heads, G key and value heads, D their width, E the model's width.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from paceline_engine.torch_backend.attention_tables import AttentionLayer
from paceline_engine.torch_backend.compiled_attention import agreeing_counts, can_attend
from paceline_engine.torch_backend.compiled_products import FewLayer, FewLayers, FewProduct
from paceline_engine.torch_backend.compiled_steps import TOGETHER, one_thread
from paceline_engine.torch_backend.grouped_linear import GroupProduct
from paceline_engine.torch_backend.int8_linear import (
    FEW_ROWS,
    Int8Product,
    round_rows,
)
from paceline_engine.torch_backend.packed_linear import in_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from paceline_engine.torch_backend.attention_kernels import Attention
    from paceline_engine.torch_backend.attention_tables import Spans
    from paceline_engine.torch_backend.compiled_steps import Steps
    from paceline_engine.torch_backend.packed_linear import Product
    from paceline_engine.torch_backend.shared_rows import ForwardRows

# What is read from memory in about a millisecond, and the products of a head's width that attention
# adds in a few milliseconds.
_RUN_BYTES, _RUN_ATTENDED = 1 << 24, 1 << 23
_CHECKED_ROWS = (1, 2, 3, 5, 8, 16, FEW_ROWS, 65)
_CHECKED_SIZES = (1e-3, 1.0, 50.0)


class Norm(Protocol):
    """A norm of rows in float32: x / sqrt(|x|^2 + least^2) * weight.

    Attributes:
        weight: (E,).
        least: What every row's length has at least: (1, 1).
    """

    weight: Tensor
    least: Tensor

    def __call__(self, hidden: Tensor) -> Tensor:
        """Compute it with torch's operators: (T, E) from the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """What a layer is made of, and how torch's operators compute it.

    Attributes:
        index: The layer's number.
        norms: Before attention, and before the MLP.
        products: Into the heads and out of them, gate and up side by side, and down.
        activation: Of the gate.
        rotate: From (heads, T, D), cosines and sines to the rotated heads.
        heads, kv_heads, width: H, G and D.
        attention: How it attends.
    """

    index: int
    norms: tuple[Norm, Norm]
    products: Sequence[Product]
    activation: Callable[[Tensor], Tensor]
    rotate: Callable[[Tensor, tuple[Tensor, Tensor]], Tensor]
    heads: int
    kv_heads: int
    width: int
    attention: Attention

    @property
    def sizes(self) -> object:
        """What the proof of the steps depends on, apart from weights."""
        products = tuple((each.shape, type(each), each.bias is None) for each in self.products)
        heads = (self.heads, self.kv_heads, self.width, self.attention.scale)
        return (products, heads, few_layer(self) is not None)

    def agreeing_counts(self, steps: Steps) -> frozenset[int]:
        """Return the numbers of rows with which compiled code attends as torch's kernel does."""
        group = self.heads // self.kv_heads
        return agreeing_counts(steps, self.attention, group=group, width=self.width)


class CompiledLayer:
    """One layer, for up to `MOST_ROWS` rows without low-rank weights.

    Attributes:
        few: Computes few rows of it in eight bits or four; None: nothing does.
        attention: How it attends.
        can_attend: Whether compiled code computes such attention.
        agreeing_counts: See `LayerParts.agreeing_counts`.
    """

    def __init__(self, parts: LayerParts, steps: Steps, *, agreeing_counts: frozenset[int]) -> None:
        """Build it of parts whose steps `agree`.

        Args:
            agreeing_counts: See `LayerParts.agreeing_counts`.
        """
        self._parts, self._steps, self.agreeing_counts = parts, steps, agreeing_counts
        self.can_attend = can_attend(parts.attention, width=parts.width)
        self._norms = [(norm.weight, float(norm.least)) for norm in parts.norms]
        self._rounds = [isinstance(each, Int8Product) for each in parts.products]
        # A bias is added after the scaling, and then the steps do not scale.
        self._is_scaled = [
            rounds and each.bias is None
            for each, rounds in zip(parts.products, self._rounds, strict=True)
        ]
        self.few = few_layer(parts)
        self.attention = AttentionLayer(
            parts.index,
            heads=parts.heads,
            kv_heads=parts.kv_heads,
            width=parts.width,
            scale=parts.attention.scale,
        )

    def __call__(
        self, hidden: Tensor, rotation: tuple[Tensor, Tensor], rows: ForwardRows
    ) -> Tensor:
        """Compute (T, E) from (T, E)."""
        if self.few is not None and len(hidden) <= FEW_ROWS:
            return self.few.after(self._attend(self.few.before(hidden, rotation), rows), hidden)
        parts, steps, rounds, is_scaled = self._parts, self._steps, self._rounds, self._is_scaled
        inputs = steps.norm(hidden, self._norms[0], rounds=rounds[0])
        turned = parts.heads + parts.kv_heads
        states = steps.turn(
            self._product(0, inputs), turned=turned, rotation=rotation, is_scaled=is_scaled[0]
        )
        seen = self._attend(states, rows)
        if rounds[1]:
            inputs = steps.round_heads(seen)
        else:
            inputs = seen.transpose(0, 1).reshape(len(hidden), -1)
        added = self._product(1, inputs)
        inputs = steps.norm(
            hidden, self._norms[1], rounds=rounds[2], added=added, is_scaled=is_scaled[1]
        )
        inputs = steps.gate(self._product(2, inputs), is_scaled=is_scaled[2], rounds=rounds[3])
        return steps.add(self._product(3, inputs), added, is_scaled=is_scaled[3])

    def _spans(self, rows: ForwardRows) -> Spans | None:
        """Return the table with which compiled code attends; None: torch does."""
        spans = rows.spans if self.can_attend else None
        if spans is None or not spans.kernel_counts <= self.agreeing_counts:
            return None
        return spans

    def _attend(self, states: Tensor, rows: ForwardRows) -> Tensor:
        """Return (H, T, D) from (H + 2 G, T, D)."""
        spans = self._spans(rows)
        if spans is not None:
            return self._steps.attend(states, spans, self.attention)
        parts = self._parts
        turned = parts.heads + parts.kv_heads
        return rows.attend(
            parts.index,
            states[: parts.heads],
            keys=states[parts.heads : turned],
            values=states[turned:],
            how=parts.attention,
        )

    def _product(self, which: int, inputs: Tensor) -> Tensor:
        product = self._parts.products[which]
        if not isinstance(product, Int8Product):
            return product(inputs)
        whole = in_blocks(product.of_whole_numbers, inputs, blocks=product.blocks)
        if product.bias is None:
            return whole
        return whole.mul_(self._steps.scales[: len(whole)]).add_(product.bias)


class LayerRun(nn.Module):
    """Some of a model's layers one after the other, for few rows in eight bits or four.

    A module, so that hooks can be put on it as on a layer.

    Attributes:
        depth: How many layers they are.
    """

    def __init__(self, layers: Sequence[CompiledLayer]) -> None:
        """Build it of at least one layer; each of them has `few`, and attends in compiled code."""
        super().__init__()
        self.depth = len(layers)
        few = [each.few for each in layers if each.few is not None]
        attentions = [each.attention for each in layers]
        self._layers = FewLayers(few, attentions)
        self._agreeing_counts = frozenset.intersection(*(it.agreeing_counts for it in layers))
        self._numbers_of_a_key = sum(each.heads * each.width for each in attentions)

    def attends_soon(self, spans: Spans) -> bool:
        """Whether compiled code attends with such rows, in a few milliseconds."""
        numbers = spans.key_count * self._numbers_of_a_key
        return numbers <= _RUN_ATTENDED and spans.kernel_counts <= self._agreeing_counts

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], rows: ForwardRows) -> Tensor:
        """Compute (T, E) from (T, E)."""
        assert rows.spans is not None, "it attends soon"
        assert hidden.is_contiguous()
        return self._layers(hidden, rotation, rows.spans)


def runs_of(layers: Sequence[CompiledLayer]) -> list[LayerRun]:
    """Divide a model's layers into runs of about a millisecond; none: a layer cannot be in one.

    A forward can be given up between runs.
    """
    found: list[list[CompiledLayer]] = []
    byte_count = _RUN_BYTES
    for layer in layers:
        if layer.few is None or not layer.can_attend:
            return []
        if byte_count + layer.few.byte_count > _RUN_BYTES:
            found.append([])
            byte_count = 0
        found[-1].append(layer)
        byte_count += layer.few.byte_count
    return [LayerRun(run) for run in found]


def runs_compute(runs: Sequence[LayerRun], rows: ForwardRows) -> bool:
    """Whether runs of a whole model compute such rows: few, which nothing reads in between.

    Rows of long sequences go layer by layer, so that a forward can be given up soon.
    """
    depth = sum(run.depth for run in runs)
    return (
        len(rows.token_ids) <= FEW_ROWS
        and rows.features is None
        and rows.streams is None
        and rows.lora is None
        and rows.read_at in {None, depth}
        and rows.spans is not None
        and all(run.attends_soon(rows.spans) for run in runs)
    )


def few_layer(parts: LayerParts) -> FewLayer | None:
    """Return what computes few rows of a layer; None: not all of its products can."""
    found = [each.few for each in parts.products if isinstance(each, Int8Product | GroupProduct)]
    few = [each for each in found if isinstance(each, FewProduct)]
    if len(few) < len(parts.products):
        return None
    return FewLayer(
        few,
        [(norm.weight, float(norm.least)) for norm in parts.norms],
        heads=parts.heads,
        kv_heads=parts.kv_heads,
        width=parts.width,
    )


def can_compile(parts: LayerParts) -> bool:
    """Whether the widths are those that steps compute."""
    outputs = [each.shape[0] for each in parts.products]
    inputs = [each.shape[1] for each in parts.products]
    in_heads = (parts.heads + 2 * parts.kv_heads) * parts.width
    return (
        not any(each % TOGETHER for each in inputs)
        and parts.width % (2 * TOGETHER) == 0
        and outputs == [in_heads, inputs[0], 2 * inputs[3], inputs[0]]
    )


@torch.inference_mode()
def agree(parts: LayerParts, steps: Steps) -> bool:
    """Tell whether each step gives the bits of torch's operators, for numbers of many sizes.

    With one thread: with several, an operator may divide many rows between threads in the middle of
    one, and computes the numbers beside the cut in another way (`invariance.py`).
    """
    with one_thread():
        return _agree(parts, steps)


def _agree(parts: LayerParts, steps: Steps) -> bool:
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return all(
        torch.equal(expected, actual)
        for rows in _CHECKED_ROWS
        for size in _CHECKED_SIZES
        # One after the other: the next step writes over what a step returned.
        for expected, actual in chain(
            _norms(parts, steps, size * numbers(rows, parts.products[0].shape[1]), numbers),
            _gates(parts, steps, size * numbers(rows, parts.products[2].shape[0]), numbers),
            _turns(parts, steps, size * numbers(rows, parts.products[0].shape[0]), numbers),
            _heads(steps, size * numbers(rows, parts.heads, parts.width)),
            _layers(parts, size * numbers(rows, parts.products[0].shape[1]), numbers),
        )
    )


def _norms(
    parts: LayerParts, steps: Steps, hidden: Tensor, numbers: Callable[..., Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what operators and steps make of the same rows."""
    norm = parts.norms[1]
    how = norm.weight, float(norm.least)
    yield norm(hidden), steps.norm(hidden, how, rounds=False)
    yield from _rounded(steps, norm(hidden), steps.norm(hidden, how, rounds=True))
    for is_scaled in (False, True):
        product = numbers(*hidden.shape)
        scales = numbers(len(hidden), 1).abs() if is_scaled else torch.ones(len(hidden), 1)
        summed = product.mul(scales).add_(hidden)
        steps.scales[: len(hidden)] = scales
        yield summed, steps.add(product.clone(), hidden, is_scaled=is_scaled)
        added = product.clone()
        inputs = steps.norm(hidden, how, rounds=True, added=added, is_scaled=is_scaled)
        yield summed, added
        yield from _rounded(steps, norm(summed), inputs)


def _gates(
    parts: LayerParts, steps: Steps, product: Tensor, numbers: Callable[..., Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    for is_scaled in (False, True):
        scales = numbers(len(product), 1).abs() if is_scaled else torch.ones(len(product), 1)
        gate, up = product.mul(scales).chunk(2, dim=-1)
        gated = parts.activation(gate) * up
        steps.scales[: len(product)] = scales
        yield gated, steps.gate(product, is_scaled=is_scaled, rounds=False)
        yield from _rounded(steps, gated, steps.gate(product, is_scaled=is_scaled, rounds=True))


def _turns(
    parts: LayerParts, steps: Steps, product: Tensor, numbers: Callable[..., Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    rows, turned = len(product), parts.heads + parts.kv_heads
    rotation = numbers(rows, parts.width), numbers(rows, parts.width)
    for is_scaled in (False, True):
        scales = numbers(rows, 1).abs() if is_scaled else torch.ones(rows, 1)
        states = product.mul(scales).view(rows, -1, parts.width).transpose(0, 1)
        steps.scales[:rows] = scales
        actual = steps.turn(product, turned=turned, rotation=rotation, is_scaled=is_scaled)
        yield parts.rotate(states[:turned], rotation), actual[:turned]
        yield states[turned:], actual[turned:]


def _heads(steps: Steps, together: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for seen in (together.transpose(0, 1), together.transpose(0, 1).contiguous()):
        yield from _rounded(steps, together.flatten(1), steps.round_heads(seen))


def _layers(
    parts: LayerParts, hidden: Tensor, numbers: Callable[..., Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what operators and the two calls make of a layer, if it has these and few rows."""
    few, rows, (norm, mlp_norm) = few_layer(parts), len(hidden), parts.norms
    if few is None or rows > FEW_ROWS:
        return
    into, out_of, gate_and_up, down = (
        each.by_onednn if isinstance(each, Int8Product) else each for each in parts.products
    )
    turned = parts.heads + parts.kv_heads
    rotation = numbers(rows, parts.width), numbers(rows, parts.width)
    states = into(norm(hidden)).view(rows, -1, parts.width).transpose(0, 1)
    actual = few.before(hidden, rotation)
    yield parts.rotate(states[:turned], rotation), actual[:turned]
    yield states[turned:], actual[turned:]
    seen = numbers(rows, parts.heads, parts.width)
    added = out_of(seen.flatten(1)).add_(hidden)
    gate, up = gate_and_up(mlp_norm(added)).chunk(2, dim=-1)
    expected = down(parts.activation(gate) * up).add_(added)
    for laid_out in (seen.transpose(0, 1), seen.transpose(0, 1).contiguous()):
        yield expected, few.after(laid_out, hidden)


def _rounded(steps: Steps, rows: Tensor, actual: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    whole, scales = round_rows(rows)
    yield whole, actual
    yield scales, steps.scales[: len(rows)]
