"""A sequence's keys and values, and beside them its open tiles: see `open_tile.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from paceline_engine.torch_backend.key_values import KeyValues
from paceline_engine.torch_backend.recurrent.open_tile import TILE

if TYPE_CHECKING:
    from array import array
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from paceline_engine.terms.model_cache import ModelCache
    from paceline_engine.torch_backend.recurrent.invariant_tile import InvariantTile
    from paceline_engine.torch_backend.recurrent.open_tile import OpenTile

MARGIN = 64
"""How many tokens before a block stay open: prefixes hold tokens that a target may still reject."""

_MOST_OPEN = TILE + MARGIN + TILE


@dataclass(frozen=True, slots=True)
class LayerRows:
    """What a recurrent layer keeps of a sequence.

    Attributes:
        raw: (w - 1 + n, C) what entered the convolution of width w: of the last rows before the
            tile, and of the n open ones. In the model's dtype.
        tile: None: the layer is a convolution alone.
    """

    raw: Tensor
    tile: OpenTile | InvariantTile | None

    @property
    def most_bytes(self) -> int:
        """The memory of the layer with most rows open, and with a further state at the prompt."""
        row_bytes, state_bytes, state_count = self.raw[0].nbytes, 0, 0
        if self.tile is not None:
            keys, updates = self.tile.keys[:, 0], self.tile.updates[:, 0]
            row_bytes += keys.nbytes + updates.nbytes
            state_bytes = updates.nbytes * keys.shape[-1]
            state_count = self.tile.most_states + 1
        return state_count * state_bytes + _MOST_OPEN * row_bytes


@dataclass(frozen=True, slots=True)
class Layers:
    """A sequence's recurrent layers, by their number in the model.

    Attributes:
        base: The tokens in the state, which have no rows any more.
        end: The base and the open rows.
    """

    base: int
    end: int
    rows: Mapping[int, LayerRows]

    def cut(self, end: int) -> Layers:
        """Forget the rows from `end` on."""
        return self if end == self.end else self.only(range(self.base, end))

    def only(self, places: range | Sequence[int]) -> Layers:
        """Keep only the rows in these places of the sequence, in this order."""
        open_rows = [place - self.base for place in places]
        rows = {layer: self._only(own, open_rows) for layer, own in self.rows.items()}
        return Layers(self.base, self.base + len(open_rows), rows)

    def _only(self, own: LayerRows, open_rows: Sequence[int]) -> LayerRows:
        first = len(own.raw) - (self.end - self.base)
        raw = own.raw[[*range(first), *(first + row for row in open_rows)]]
        return LayerRows(raw, None if own.tile is None else own.tile.only(open_rows))


_NOTHING = Layers(0, 0, {})


class RecurrentText(KeyValues):
    """A session's sequence in a model with recurrent layers; see `KeyValues`.

    It can be cut to any length from the tiles' base on; to the base at the end of its prompt, from
    which another answer to the same prompt can begin; and to nothing.
    """

    _layers = _prompt = _NOTHING
    _made: Layers | None = None

    @property
    def layers(self) -> Layers:
        """What the forwards that count have kept."""
        return self._layers

    def reachable(self, length: int) -> int:
        """Return the most tokens, up to so many, to which the state can be cut."""
        if length >= self._layers.base:
            return length
        return self._prompt.base if length >= self._prompt.base else 0

    def take(self, made: Layers) -> None:
        """Learn what a forward makes; it counts once the forward's tokens are taken in."""
        self._made = made

    def extend(self, token_ids: array[int], parents: Sequence[int] = ()) -> None:
        """Take in tokens whose state a forward has appended."""
        assert self._made is not None, "a forward has made the layers"
        self._layers, self._made = self._made, None
        super().extend(token_ids, parents)
        if len(token_ids) - len(parents) > TILE:
            self._prompt = self._layers.cut(self._layers.base)

    @torch.inference_mode()
    def _crop(self, length: int) -> None:
        super()._crop(length)
        self._made = None
        if length < self._prompt.base:
            self._prompt = _NOTHING
        self._layers = self._cut(length)

    def _cut(self, length: int) -> Layers:
        if length >= self._layers.base:
            return self._layers.cut(length)
        assert length == self._prompt.base, "it is reachable"
        return self._prompt

    def _gather(self, path: Sequence[int]) -> None:
        super()._gather(path)
        # Only the tree's tokens are gone, and not yet its rows.
        text = range(self._layers.base, self.length)
        self._layers = self._layers.only([*text, *(self.length + index for index in path)])

    @torch.inference_mode()
    def _copy(self, source: ModelCache, length: int) -> None:
        super()._copy(source, length)
        assert isinstance(source, RecurrentText)
        self._prompt = source._prompt if source._prompt.base <= length else _NOTHING  # noqa: SLF001
        self._layers = source._cut(length)  # noqa: SLF001 - it is of this class
