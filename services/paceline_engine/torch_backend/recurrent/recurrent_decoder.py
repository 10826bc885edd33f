"""Chooses open tiles for a model with a recurrent state, if they give the library's own logits."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from paceline_engine.terms.backend import first_line
from paceline_engine.torch_backend.decoders import compute_in_pieces, quiet_library
from paceline_engine.torch_backend.kv_arena import KeyValueShape, Slabs
from paceline_engine.torch_backend.library import LibraryDecoder
from paceline_engine.torch_backend.recurrent.invariant_rows import InvariantRecurrentRows
from paceline_engine.torch_backend.recurrent.library_state import LibraryState
from paceline_engine.torch_backend.recurrent.mixers import Mixers
from paceline_engine.torch_backend.recurrent.open_tile import TILE
from paceline_engine.torch_backend.recurrent.probe import (
    MOST_TOKENS_PER_TEXT,
    rounding_limit,
    spread_off,
)
from paceline_engine.torch_backend.recurrent.recurrent_rows import RecurrentRows
from paceline_engine.torch_backend.recurrent.recurrent_text import RecurrentText

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paceline_engine.torch_backend.shared_rows import SharedRows

_log = logging.getLogger(__name__)

_LENGTH = 80
# The parts of two sequences: across the edge of a tile, and of a row alone.
_PIECES = ((70, 4, 1, 5), (9, 1, 66, 4))


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTiles:
    """How a model is computed with open tiles.

    Attributes:
        decoder: Computes rows of many sequences.
        shape: The shape of a token's keys and values.
        attention_places: See `RecurrentRows`.
        bytes_per_token, bytes_per_text: The memory of a token, and of a sequence in any case.
    """

    decoder: RecurrentDecoder
    shape: KeyValueShape
    attention_places: Mapping[int, int]
    bytes_per_token: int
    bytes_per_text: int


class RecurrentDecoder(LibraryDecoder):
    """A library model with recurrent layers, whose rows are kept in open tiles."""

    def __init__(self, model: Any, *, has_attention: bool, packs: bool) -> None:
        """Let a loaded model compute with our functions from now on."""
        super().__init__(model, packs=packs, attends=has_attention)
        self._mixers = Mixers(model)

    @property
    def recurrent_layers(self) -> set[int]:
        """The layers that compute with our rows."""
        return {*self._mixers.layers}

    def give_back(self) -> None:
        """Let the model compute as before, apart from its attention."""
        self._mixers.give_back()
        super().give_back()


@torch.inference_mode()
def choose_open_tiles(
    name: str, model: Any, *, together: bool, packs: bool, invariant: bool = False
) -> OpenTiles | None:
    """Compute a model's recurrent layers with open tiles; None if it has no such form.

    Args:
        name: The model's name, for the log.
        together: How its forwards attend; see `SharedRows`.
        packs: Whether to pack weights, where they can be.
        invariant: Compute each row by itself: see `invariant_tile.py`.
    """
    attention = model.config._attn_implementation  # noqa: SLF001 - there is no public word
    decoder = None
    try:
        count = 2 * _LENGTH
        token_ids = torch.arange(count, device=model.device) * 7919 % model.config.vocab_size
        states = [LibraryState(model), LibraryState(model)]
        parts = token_ids.view(2, -1)
        with quiet_library():  # it would advise to install what is not used
            expected = torch.cat(
                [state.append(ids) for state, ids in zip(states, parts, strict=True)]
            )
            shape, places, recurrent = _layers(states[0], model)
            decoder = RecurrentDecoder(model, has_attention=bool(places), packs=packs)
        if decoder.recurrent_layers != recurrent:
            raise ValueError("some of its recurrent layers have no form with open rows")
        slabs = Slabs(shape, tile=TILE if invariant else 1)
        texts = [RecurrentText(slabs, reserve_length=_LENGTH) for _ in range(2)]
        rows: Callable[..., SharedRows] = (
            partial(InvariantRecurrentRows, attention_places=places)
            if invariant
            else partial(RecurrentRows, attention_places=places, together=together)
        )
        found = compute_in_pieces(decoder, texts, parts, pieces=_PIECES, rows=rows)
        if not spread_off(found, expected) <= rounding_limit(model.dtype):
            raise ValueError("its logits with open rows are off")
    except Exception as error:  # noqa: BLE001 - models that are not made for it break anywhere
        if decoder is not None:
            decoder.give_back()
            with quiet_library():
                model.set_attn_implementation(attention)
        _log.info("model %s: no open tiles (%s)", name, first_line(error))
        return None
    fixed = sum(own.most_bytes for own in texts[0].layers.rows.values())
    return OpenTiles(
        decoder=decoder,
        shape=shape,
        attention_places=places,
        bytes_per_token=max(shape.bytes_per_token, -(-fixed // MOST_TOKENS_PER_TEXT)),
        bytes_per_text=fixed,
    )


def _layers(state: LibraryState, model: Any) -> tuple[KeyValueShape, Mapping[int, int], set[int]]:
    """Return the shape of keys and values, the layers that have them, and the recurrent layers.

    Raises:
        ValueError: the layers with keys and values are not alike.
    """
    layers = state.layers
    kept = {
        index: (layer.keys, layer.values)
        for index, layer in enumerate(layers)
        if getattr(layer, "keys", None) is not None
    }
    recurrent = {index for index, layer in enumerate(layers) if hasattr(layer, "conv_states")}
    shapes = {(keys.shape[1], keys.shape[3], values.shape[3]) for keys, values in kept.values()}
    if len(shapes) > 1:
        raise ValueError("its layers have different keys and values")
    heads, key_width, value_width = shapes.pop() if shapes else (1, 1, 1)
    # Logits can have another dtype.
    shape = KeyValueShape(len(kept), heads, key_width, value_width, model.dtype, model.device)
    return shape, {layer: place for place, layer in enumerate(kept)}, recurrent
