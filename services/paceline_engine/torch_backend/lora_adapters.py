"""The LoRA adapters of a loaded model: their factors, as its decoder's products need them."""

from __future__ import annotations

from array import array
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline_engine.terms.backend import ModelLoadError, few_names, first_line
from paceline_engine.torch_backend.adapters.low_rank import LOW_RANK_PARTS
from paceline_engine.torch_backend.key_values import KeyValues
from paceline_engine.torch_backend.kv_arena import Slabs
from paceline_engine.torch_backend.library import rows_of_forward
from paceline_engine.torch_backend.llama import FusedLlama
from paceline_engine.torch_backend.lora_rows import Factors, LoraRows, side_by_side
from paceline_engine.torch_backend.recurrent.recurrent_rows import RecurrentRows
from paceline_engine.torch_backend.recurrent.recurrent_text import RecurrentText
from paceline_engine.torch_backend.shared_rows import SharedRows
from paceline_engine.torch_backend.stream_rows import FUSED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from paceline_engine.torch_backend.decoders import Decoder
    from paceline_engine.torch_backend.kv_arena import KeyValueShape
    from paceline_engine.torch_backend.lora_files import LoraAdapter
    from paceline_engine.torch_backend.lora_rows import LoraWeights, ProductKey

# In two forwards.
_PROBED_ROWS = (5, 2)


class LoraAdapters:
    """The adapters that a model's rows can have, by their names."""

    def __init__(
        self,
        model: Any,
        decoder: Decoder,
        *,
        shape: KeyValueShape,
        attention_places: Mapping[int, int] | None = None,
    ) -> None:
        """Begin with none.

        Args:
            model: The library's, which the decoder computes.
            shape: The shape of its keys and values.
            attention_places: Of a model with recurrent layers: see `RecurrentRows`.
        """
        self._model, self._decoder, self._shape = model, decoder, shape
        self._places = attention_places
        self._weights: dict[str, LoraWeights] = {}
        self._hooked = set[str]()

    def add(self, adapter: LoraAdapter) -> None:
        """Let the decoder's products add what an adapter adds.

        Raises:
            ModelLoadError: The decoder computes a module that the adapter changes not once for
                each row of a forward; or its scores are no numbers.
        """
        modules: list[str] = []
        if isinstance(self._decoder, FusedLlama):
            weights = _fused(adapter, self._model)
        else:
            modules = [*adapter.factors]
            weights = _by_module(adapter)
            for name in adapter.factors.keys() - self._hooked:
                self._model.get_submodule(name).register_forward_hook(_adding(name))
            self._hooked.update(modules)
        with _counting(self._model, modules) as calls:
            told = f"LoRA adapter {adapter.name!r}"
            self._probe(told, weights, calls=calls)
        self._weights[adapter.name] = weights

    @property
    def one_of_each_shape(self) -> list[str]:
        """The names of adapters: one for each set of shapes that factors have."""
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
        return LoraRows(known, device=self._shape.device)

    @torch.inference_mode()
    def _probe(self, told: str, weights: LoraWeights, *, calls: Counter[str]) -> None:
        """Refuse an adapter of modules that a forward computes not once, or for other rows.

        Two texts grow in two forwards: some layers compute modules for all tokens so far.

        Args:
            calls: How often modules were called; this must count them.
        """
        slabs, kind = Slabs(self._shape), KeyValues if self._places is None else RecurrentText
        texts = [kind(slabs, reserve_length=sum(_PROBED_ROWS)) for _ in range(2)]
        for done, count in enumerate(_PROBED_ROWS, start=1):
            part = array("I", range(1, count + 1))  # 0 may be padding, without an embedding
            for text in texts:
                text.make_room(count)
            rows = self._probed_rows(texts, part)
            rows.lora = LoraRows([(weights, 2 * count)], device=self._shape.device)
            try:
                scores = self._decoder(rows)
            except Exception as error:
                raise ModelLoadError(f"{told}: {first_line(error)}") from error
            if odd := [name for name, called in calls.items() if called != done]:
                raise ModelLoadError(
                    f"{told}: this model does not compute each row of {few_names(odd)} once, as an"
                    " expert's: that is not supported"
                )
            if not bool(torch.isfinite(scores).all()):
                raise ModelLoadError(f"{told}: with it the model's scores are no numbers")
            for text in texts:
                text.extend(part)

    def _probed_rows(self, texts: Sequence[KeyValues], part: array[int]) -> SharedRows:
        if self._places is None:
            return SharedRows(texts, [part, part], [1, 1])
        return RecurrentRows(texts, [part, part], [1, 1], attention_places=self._places)


def _fused(adapter: LoraAdapter, model: Any) -> LoraWeights:
    """Put factors of projections that `FusedLlama` has side by side together as it does."""
    left = dict(adapter.factors)
    weights: dict[ProductKey, Factors] = {}
    for index, layer in enumerate(model.model.layers):
        for which, places in enumerate(FUSED):
            parts = [
                (
                    left.pop(f"model.layers.{index}.{name}", None),
                    layer.get_submodule(name).out_features,
                )
                for name in LOW_RANK_PARTS[places]
            ]
            if any(factors is not None for factors, _ in parts):
                weights[index, which] = side_by_side(parts)
    if left:
        raise ModelLoadError(f"LoRA adapter {adapter.name!r}: no layer has {few_names(left)}")
    return weights


def _by_module(adapter: LoraAdapter) -> LoraWeights:
    return {
        name: Factors(down, up.t().contiguous()) for name, (down, up) in adapter.factors.items()
    }


def _adding(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
    """Return a hook that adds to a linear module's output what the rows' adapters add."""

    def add(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        rows = rows_of_forward()
        if rows is None or rows.lora is None:
            return
        given = inputs[0].reshape(-1, inputs[0].shape[-1])
        if len(given) != len(rows.token_ids):
            raise ValueError(f"{name} computes other rows than the forward's")
        rows.lora.add(name, inputs=given, product=output.view(-1, output.shape[-1]))

    return add


@contextmanager
def _counting(model: nn.Module, names: Iterable[str]) -> Iterator[Counter[str]]:
    """Count how often modules are called."""
    calls = Counter(dict.fromkeys(names, 0))
    hooks = [
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: calls.update([name]))
        for name in calls
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()
