"""The LoRA adapters of a loaded model: their factors, as its decoder's products need them."""

from __future__ import annotations

from array import array
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline_engine.terms.backend import ModelLoadError, few_names, first_line
from paceline_engine.torch_backend.adapters.low_rank import LOW_RANK_PARTS
from paceline_engine.torch_backend.key_values import KeyValues
from paceline_engine.torch_backend.kv_arena import Slabs
from paceline_engine.torch_backend.library import rows_of_forward
from paceline_engine.torch_backend.llama import FusedLlama
from paceline_engine.torch_backend.lora_rows import Factors, LoraRows
from paceline_engine.torch_backend.shared_rows import SharedRows
from paceline_engine.torch_backend.stream_rows import FUSED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from paceline_engine.torch_backend.decoders import Decoder
    from paceline_engine.torch_backend.kv_arena import KeyValueShape
    from paceline_engine.torch_backend.lora_files import LoraAdapter
    from paceline_engine.torch_backend.lora_rows import LoraWeights, ProductKey

_PROBED_ROWS = 5


class LoraAdapters:
    """The adapters that a model's rows can have, by their names."""

    def __init__(
        self,
        adapters: Sequence[LoraAdapter],
        model: Any,
        decoder: Decoder,
        *,
        shape: KeyValueShape,
    ) -> None:
        """Let a decoder's products add what adapters add.

        Args:
            model: The library's, which the decoder computes.
            shape: The shape of its keys and values.

        Raises:
            ModelLoadError: The decoder computes a module that an adapter changes not once for each
                row of a forward.
        """
        self._device = model.device
        if isinstance(decoder, FusedLlama):
            self._weights = {each.name: _fused(each, model) for each in adapters}
            return
        self._weights = {each.name: _by_module(each) for each in adapters}
        calls = Counter[str]()
        for name in {name for each in adapters for name in each.factors}:
            module = model.get_submodule(name)
            module.register_forward_hook(_adding(name, calls))
        _probe(adapters, self._weights, decoder, calls=calls, shape=shape)

    @property
    def unlike(self) -> list[str]:
        """The names of adapters with factors of other shapes: one name for each set of shapes."""
        found = {
            tuple((key, each.down.shape) for key, each in weights.items()): name
            for name, weights in self._weights.items()
        }
        return list(found.values())

    def rows(self, sequences: Iterable[tuple[str, int]]) -> LoraRows | None:
        """Return which rows of a forward have which adapter; None: no row has one.

        Args:
            sequences: Of each sequence, in the order of its rows, the adapter's name, or "" for
                none, and the number of its rows.
        """
        known = [(self._weights[name] if name else None, count) for name, count in sequences]
        if all(weights is None for weights, _ in known):
            return None
        return LoraRows(known, device=self._device)


def _fused(adapter: LoraAdapter, model: Any) -> LoraWeights:
    """Put factors of projections that `FusedLlama` has side by side together as it does."""
    left = dict(adapter.factors)
    weights: dict[ProductKey, Factors] = {}
    for index, layer in enumerate(model.model.layers):
        for which, places in enumerate(FUSED):
            parts = [
                (left.pop(f"model.layers.{index}.{name}", None), layer.get_submodule(name))
                for name in LOW_RANK_PARTS[places]
            ]
            if any(factors is not None for factors, _ in parts):
                weights[index, which] = _side_by_side(parts)
    if left:
        raise ModelLoadError(f"LoRA adapter {adapter.name!r}: no layer has {few_names(left)}")
    return weights


def _side_by_side(parts: Sequence[tuple[tuple[Tensor, Tensor] | None, nn.Linear]]) -> Factors:
    """Return one pair of factors for projections side by side; some may have none of their own."""
    width = sum(linear.out_features for _, linear in parts)
    downs, ups, start = [], [], 0
    for factors, linear in parts:
        if factors is not None:
            down, up = factors
            placed = up.new_zeros(len(down), width)
            placed[:, start : start + linear.out_features] = up.t()
            downs.append(down)
            ups.append(placed)
        start += linear.out_features
    return Factors(torch.cat(downs), torch.cat(ups))


def _by_module(adapter: LoraAdapter) -> LoraWeights:
    return {
        name: Factors(down, up.t().contiguous()) for name, (down, up) in adapter.factors.items()
    }


def _adding(
    name: str, calls: Counter[str]
) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
    """Return a hook that adds to a linear module's output what the rows' adapters add."""

    def add(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        rows = rows_of_forward()
        if rows is None or rows.lora is None:
            return
        calls[name] += 1
        given = inputs[0].reshape(-1, inputs[0].shape[-1])
        if len(given) != len(rows.token_ids):
            raise ValueError(f"{name} computes other rows than the forward's")
        rows.lora.add(name, inputs=given, product=output.view(-1, output.shape[-1]))

    return add


@torch.inference_mode()
def _probe(
    adapters: Sequence[LoraAdapter],
    weights: Mapping[str, LoraWeights],
    decoder: Decoder,
    *,
    calls: Counter[str],
    shape: KeyValueShape,
) -> None:
    """Refuse adapters of modules that a forward computes not once, or for some rows only."""
    for adapter in adapters:
        calls.clear()
        text = KeyValues(Slabs(shape), reserve_length=_PROBED_ROWS)
        text.make_room(_PROBED_ROWS)
        rows = SharedRows([text], [array("I", [0] * _PROBED_ROWS)], [1])
        own = weights[adapter.name]
        rows.lora = LoraRows([(own, _PROBED_ROWS)], device=shape.device)
        try:
            decoder(rows)
        except Exception as error:
            raise ModelLoadError(f"LoRA adapter {adapter.name!r}: {first_line(error)}") from error
        if odd := [name for name in adapter.factors if calls[name] != 1]:
            raise ModelLoadError(
                f"LoRA adapter {adapter.name!r}: this model does not compute each row of"
                f" {few_names(odd)} once, as an expert's: that is not supported"
            )
    calls.clear()
