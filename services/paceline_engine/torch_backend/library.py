"""Models computed by the transformers library: rows of many sequences, or one at a time.

Most models attend through the library's attention interface. There our function keeps each
sequence's keys and values, and attends sequence by sequence, so one forward has rows of many.
Models that do not use this interface, or give other logits with it, are computed one sequence at a
time, with the library's own cache.

Some layers keep less state than keys and values, and make keys and values from it in each forward
(multi-head latent attention, DeepSeek-AI 2024, arXiv 2405.04434). To these layers our state looks
like the library's cache, which they update before they attend. The keys and values of all sequences
of a forward are in memory at once, for one layer at a time.
"""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache
from transformers.masking_utils import AttentionMaskInterface

from paceline_engine.terms.model_cache import ModelCache
from paceline_engine.torch_backend.attention_kernels import Attention
from paceline_engine.torch_backend.packed_linear import PackedModules
from paceline_engine.torch_backend.shared_rows import SharedRows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from paceline_engine.torch_backend.feature_rows import FeatureRows
    from paceline_engine.torch_backend.shared_rows import ForwardRows

_NAME = "paceline"
_NAME_FOR_MADE = "paceline-made"

_rows: ContextVar[SharedRows] = ContextVar("rows")
"""The rows of the running forward: the library cannot pass them down to its layers."""


def current_rows() -> SharedRows:
    """Return the rows of the running forward."""
    return _rows.get()


def rows_of_forward() -> SharedRows | None:
    """Return the rows of the running forward; None: it is the library's own forward."""
    return _rows.get(None)


class LibraryDecoder:
    """A model whose layers attend through the library's interface.

    Attributes:
        layers: The decoder layers, as modules; none if they cannot be told.
    """

    def __init__(
        self, model: Any, *, makes_keys: bool = False, packs: bool = True, attends: bool = True
    ) -> None:
        """Let a loaded model attend with our function from now on.

        Args:
            makes_keys: Its layers make keys and values of what they keep.
            packs: Whether to pack weights, where they can be.
            attends: Whether any of its layers attends.

        Raises:
            ValueError: it does not go through the interface.
        """
        self.layers = decoder_layers(model)
        self._model = model
        self._makes_keys, self._attends = makes_keys, attends
        self._scores_some_rows = _scores_some_rows(type(model).forward)
        name = _NAME_FOR_MADE if makes_keys else _NAME
        if attends:
            model.set_attn_implementation(name)
        if attends and model.config._attn_implementation != name:  # noqa: SLF001 - there is no public word
            raise ValueError("it does not attend through the library's interface")
        self._packed = PackedModules(model) if packs else None

    def __call__(self, rows: ForwardRows) -> Tensor:
        """Do a forward, and return the logits of the scored rows: (rows, V)."""
        assert isinstance(rows, SharedRows)
        scored = rows.scored
        if isinstance(scored, slice):
            scored = torch.arange(scored.start, scored.stop, device=rows.token_ids.device)
        options: dict[str, Any] = {"logits_to_keep": scored} if self._scores_some_rows else {}
        kept = _KeptRows(rows) if self._makes_keys else None
        if self._attends:  # without attention a model knows neither positions nor keys
            options |= {"position_ids": rows.positions[None], "past_key_values": kept}
        token = _rows.set(rows)
        try:
            with self._reading(rows):
                output = self._model(
                    rows.token_ids[None],
                    attention_mask=torch.ones_like(rows.token_ids)[None],
                    use_cache=kept is not None,
                    **options,
                )
        finally:
            _rows.reset(token)
        logits: Tensor = output.logits[0]
        return logits if self._scores_some_rows else logits[rows.scored]

    def give_back(self) -> None:
        """Let the model compute as before, apart from its attention."""
        if self._packed is not None:
            self._packed.undo()

    @contextmanager
    def _reading(self, rows: SharedRows) -> Iterator[None]:
        """Keep the adapter's input of a forward's rows."""
        if rows.features is not None:
            with self._taking(rows.features):
                yield
            return
        if rows.read_at is None:
            yield
            return
        is_last = rows.read_at == len(self.layers)
        module = self._model.lm_head if is_last else self.layers[rows.read_at]
        # If the model takes an argument for it, its head computes the scored rows alone.
        has_all = not (is_last and self._scores_some_rows)

        def read(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            rows.read = inputs[0][0][rows.scored] if has_all else inputs[0][0]

        handle = module.register_forward_pre_hook(read)
        try:
            yield
        finally:
            handle.remove()

    @contextmanager
    def _taking(self, features: FeatureRows) -> Iterator[None]:
        """Tell an adapter what enters each layer of a forward."""

        def reading(index: int) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
            return lambda _module, inputs: features.take(index, inputs[0][0])

        handles = [
            layer.register_forward_pre_hook(reading(index))
            for index, layer in enumerate(self.layers)
        ]
        count = len(self.layers)
        if features.wants(count):
            # Not what enters the head, which may get the scored rows alone.
            handles.append(
                self._model.get_decoder().register_forward_hook(
                    lambda _module, _inputs, output: features.take(count, output[0][0])
                )
            )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class _KeptRows(DynamicCache):
    """Our keys and values, as the cache of a library's forward."""

    def __init__(self, rows: SharedRows) -> None:
        super().__init__()
        self._rows = rows

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep a layer's new rows, (1, G, T, D) each, and return all sequences' side by side."""
        keys, values = self._rows.keep(layer_idx, key_states[0], value_states[0])
        return keys[None], values[None]


class LibraryText(ModelCache):
    """A session's sequence in a model that the library computes with a cache of its own."""

    def __init__(self) -> None:
        super().__init__()
        # Without the configuration: so every token is kept, and any suffix can be forgotten.
        self.state = DynamicCache()

    def _crop(self, length: int) -> None:
        if not length:
            # A failed forward may have left anything, and cropped layers keep their memory.
            self.state = DynamicCache()
        layers: list[Any] = self.state.layers
        for layer in layers:
            # An interrupted forward leaves its first layers longer than the others.
            if (surplus := layer.get_seq_length() - length) > 0:
                layer.crop(-surplus)


def score_alone(model: Any, text: LibraryText, token_ids: Tensor, *, rows: int) -> Tensor:
    """Append tokens, (T,), to a sequence, and return the logits of the last rows: (rows, V)."""
    # The library cannot score no row: 0 means all rows.
    options = {"logits_to_keep": max(1, rows)} if _scores_some_rows(type(model).forward) else {}
    output = model(token_ids[None], past_key_values=text.state, use_cache=True, **options)
    logits: Tensor = output.logits[0, len(output.logits[0]) - rows :]
    return logits


def decoder_layers(model: Any) -> Sequence[nn.Module]:
    """Find the decoder layers."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    return ()


@cache
def _scores_some_rows(forward: Callable[..., Any]) -> bool:
    """Whether a class's forward takes an argument for the rows to score."""
    return "logits_to_keep" in inspect.signature(forward).parameters


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend for a layer, (1, heads, T, D) each, in the shape that the library wants."""
    how = _how(query, scaling, options)
    seen = _rows.get().attend(module.layer_idx, query[0], keys=key[0], values=value[0], how=how)
    return seen.transpose(0, 1)[None].contiguous(), None


def _attend_to_made(
    _module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend to keys and values of all sequences, (1, heads, sum of L, D) each."""
    seen = _rows.get().attend_to_made(
        query[0], keys=key[0], values=value[0], how=_how(query, scaling, options)
    )
    return seen.transpose(0, 1)[None].contiguous(), None


def _how(query: Tensor, scaling: float | None, options: dict[str, Any]) -> Attention:
    return Attention(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=options.get("sliding_window"),
        soft_cap=options.get("softcap"),
        sinks=options.get("s_aux"),
    )


for _name, _function in ((_NAME, _attend), (_NAME_FOR_MADE, _attend_to_made)):
    AttentionInterface.register(_name, _function)
    # `SharedRows` makes the masks, so the library need not.
    AttentionMaskInterface.register(_name, lambda *_, **__: None)
