"""The rows of several sequences in one forward: where they go.

Letters: T rows in all, H heads, G key and value heads, D their width. The rows of all sequences lie
side by side; `attention.py` defines which tokens each row sees.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

import torch
from torch import Tensor

from paceline_engine.torch_backend.attention import SideBySide, TextRows
from paceline_engine.torch_backend.attention_tables import MOST_ATTENDED, Span, Spans
from paceline_engine.torch_backend.feature_rows import cut_into_layers
from paceline_engine.torch_backend.in_place import TextsInPlace, in_place_kernels
from paceline_engine.torch_backend.padded_texts import TextsTogether

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline_engine.torch_backend.attention_kernels import Attention
    from paceline_engine.torch_backend.feature_rows import FeatureRows
    from paceline_engine.torch_backend.key_values import KeyValues
    from paceline_engine.torch_backend.lora_rows import LoraRows
    from paceline_engine.torch_backend.stream_rows import StreamRows

_Part = TypeVar("_Part", bound="_Neighbour")


class _Neighbour(Protocol):
    def goes_with(self, others: Self, /) -> bool:
        """Whether one kernel can compute it together with the part right before it."""


class ForwardRows(ABC):
    """The rows that a decoder computes in one forward.

    Attributes:
        token_ids, positions: (T,) int64.
        longest: More than the largest position.
        scored: The rows to score.
        read_at: The layer whose input is kept for an adapter, in the scored rows; the number of
            layers: the head's input; None: no input is kept.
        read: The input that was kept: (scored, E).
        change: Called with the input of layer `read_at`, (T, E); it returns other rows for the rest
            of the forward, or None. `read` is then about these other rows.
        streams: The rows that are streams beside others, with their low-rank weights; or None.
        lora: The rows that have LoRA adapters; or None.
        features: Told what enters each layer, (T, E), for an adapter that keeps some of it; or
            None.
    """

    token_ids: Tensor
    positions: Tensor
    longest: int
    scored: Tensor | slice
    read_at: int | None = None
    read: Tensor | None = None
    change: Callable[[Tensor], OtherRows | None] | None = None
    streams: StreamRows | None = None
    lora: LoraRows | None = None
    features: FeatureRows | None = None

    @property
    def spans(self) -> Spans | None:
        """Where sequences lie, for compiled code instead of `attend`; None: it cannot attend."""
        return None

    @abstractmethod
    def attend(
        self, layer: int, queries: Tensor, *, keys: Tensor, values: Tensor, how: Attention
    ) -> Tensor:
        """Keep a layer's new keys and values, (G, T, D), and attend: (H, T, D) to the same."""


@dataclass(frozen=True, slots=True)
class OtherRows:
    """The rows with which a forward goes on.

    Attributes:
        rows: Rows as if the forward had begun with them.
        hidden: The next layer's input in these rows: (T, E).
    """

    rows: ForwardRows
    hidden: Tensor


class SharedRows(ForwardRows):
    """Rows of several sequences, (T,) in all. No row sees another sequence's tokens.

    Args:
        texts: With room for their rows.
        token_ids: The tokens of each sequence's rows, one or more.
        scored_counts: How many of each sequence's last rows to score, not counting streams.
        parents: The parents of each sequence's last rows, if they are a tree: see
            `ModelCache.extend`.
        stream_counts: How many of each sequence's last rows are streams; none of them is
            scored.
        together: Attend to sequences of similar length in one kernel, over padded copies,
            instead of sequence by sequence. Pays where launching kernels takes most of the
            time.

    Attributes: see `ForwardRows`.
    """

    def __init__(
        self,
        texts: Sequence[KeyValues],
        token_ids: Sequence[Sequence[int]],
        scored_counts: Sequence[int],
        *,
        parents: Sequence[Sequence[int]] | None = None,
        stream_counts: Sequence[int] | None = None,
        together: bool = False,
    ) -> None:
        device = texts[0].keys.device
        self._counts = [len(each) for each in token_ids]
        self._texts = [
            TextRows(text, count, own)
            for text, count, own in zip(
                texts, self._counts, parents or [()] * len(texts), strict=True
            )
        ]
        self._together = together and len(texts) > 1
        self._in_place_by_group: dict[int, TextsInPlace | None] = {}
        self.token_ids = torch.tensor([id_ for each in token_ids for id_ in each]).to(
            device, non_blocking=True
        )
        positions = [position for text in self._texts for position in text.positions]
        self.positions = torch.tensor(positions).to(device, non_blocking=True)
        self.longest = max(positions) + 1
        ends = [*accumulate(self._counts)]
        self.stream_places: Tensor | slice = slice(0, 0)
        if stream_counts is not None:
            self.stream_places = self._last(stream_counts, ends)
            ends = [end - own for end, own in zip(ends, stream_counts, strict=True)]
        self.scored = self._last(scored_counts, ends)

    def _last(self, counts: Sequence[int], ends: Sequence[int]) -> Tensor | slice:
        """Return the last rows before each end, `counts` of them."""
        spans = [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
        if len(spans) == 1:
            return slice(spans[0].start, spans[0].stop)
        rows = [*chain.from_iterable(spans)]
        if len(rows) == len(self.token_ids):
            return slice(0, len(rows))
        return torch.tensor(rows, dtype=torch.int64).to(self.token_ids.device, non_blocking=True)

    @cached_property
    def spans(self) -> Spans | None:
        """See `ForwardRows`."""
        kept = self._texts[0].kept.keys
        if (
            kept.device.type != "cpu"
            or kept.dtype != torch.float32
            or len(self.token_ids) > MOST_ATTENDED
            or any(text.tree is not None for text in self._texts)
        ):
            return None
        return self._table()

    def _table(self) -> Spans:
        firsts = accumulate(self._counts, initial=0)
        return Spans(
            [
                Span(
                    text=text.kept,
                    first=first,
                    count=text.count,
                    start=text.start,
                    length=text.length,
                )
                for text, first in zip(self._texts, firsts, strict=False)
            ]
        )

    def attend(
        self, layer: int, queries: Tensor, *, keys: Tensor, values: Tensor, how: Attention
    ) -> Tensor:
        """Keep a layer's new keys and values, (G, T, D), and attend: (H, T, D) to the same."""
        if self._together and how.is_plain:
            in_place = self._in_place(len(queries) // len(keys))
            if in_place is not None:
                in_place.keep(layer, keys, values)
                return in_place.attend(layer, queries, how=how)
        self._keep(layer, keys, values)
        if self._together and how.is_plain:
            return self._all_together.attend(layer, queries, how=how)
        own_rows = self._own_rows(queries)
        return _joined(
            [
                part.attend(layer, own, how=how)
                for part, own in zip(self._parts, own_rows, strict=True)
            ]
        )

    def keep(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keep a layer's new keys and values; return those of all sequences, (G, sum of L, D)."""
        self._keep(layer, keys, values)
        return joined_states([text.states for text in self._texts], layer)

    def store_beside(self, states: Tensor, *, first_layer: int) -> None:
        """Keep further state of the rows, (T, any width), in layers beyond the model's.

        It is cut into pieces of the size of a layer's keys, and values, by turns.
        """
        keys, values = self._texts[0].states
        cut = cut_into_layers(
            states[: sum(self._counts)],
            layers=len(keys) - first_layer,
            heads=keys[0].shape[1],
            widths=(keys[0].shape[-1], values[0].shape[-1]),
        )
        for layer, kept in enumerate(cut, start=first_layer):
            self._keep(layer, *kept)

    def attend_to_made(
        self, queries: Tensor, *, keys: Tensor, values: Tensor, how: Attention
    ) -> Tensor:
        """Attend to keys and values made from `keep`'s result, (H, sum of L, D): (H, T, D)."""
        lengths = [text.length for text in self._texts]
        parts = (torch.split(each[None], lengths, 2) for each in (keys, values))
        own_rows = torch.split(queries, self._counts, 1)
        return _joined(
            [
                text.attend_to(own, keys=made_keys, values=made_values, how=how)
                for text, own, made_keys, made_values in zip(
                    self._texts, own_rows, *parts, strict=True
                )
            ]
        )

    def _keep(self, layer: int, keys: Tensor, values: Tensor) -> None:
        own_states = map(self._own_rows, (keys, values))
        for part, *own in zip(self._parts, *own_states, strict=True):
            part.keep(layer, *own)

    def _own_rows(self, states: Tensor) -> Sequence[Tensor]:
        """Take each part's rows out of all: (heads, T, D)."""
        if len(self._parts) == 1:
            return (states,)
        return torch.split(states, [part.count for part in self._parts], 1)

    @cached_property
    def _parts(self) -> Sequence[TextRows | SideBySide]:
        return [run[0] if len(run) == 1 else SideBySide(run) for run in runs(self._texts)]

    def _in_place(self, group: int) -> TextsInPlace | None:
        """Return what attends to all sequences where they lie; None: no kernels do that here.

        Args:
            group: How many query heads each key head has.
        """
        if group in self._in_place_by_group:
            return self._in_place_by_group[group]
        keys, values = self._texts[0].kept.keys, self._texts[0].kept.values
        kernels = in_place_kernels(
            keys.device,
            keys.dtype,
            kv_heads=keys.shape[2],
            group=group,
            key_width=keys.shape[-1],
            value_width=values.shape[-1],
        )
        in_place = None if kernels is None else TextsInPlace(self._texts, kernels)
        self._in_place_by_group[group] = in_place
        return in_place

    @cached_property
    def _all_together(self) -> TextsTogether:
        return TextsTogether(self._texts)


def runs(texts: Sequence[_Part]) -> list[list[_Part]]:
    """Divide sequences, in the order of their rows, into runs that one kernel can compute."""
    found: list[list[_Part]] = []
    for text in texts:
        if found and text.goes_with(found[-1][-1]):
            found[-1].append(text)
        else:
            found.append([text])
    return found


def joined_states(
    states: Sequence[tuple[Sequence[Tensor], Sequence[Tensor]]], layer: int
) -> tuple[Tensor, Tensor]:
    """Put a layer's keys, and values, of sequences that have (1, G, L, D) behind one another."""
    keys, values = (
        torch.cat([own[layer][0] for own in each], 1) for each in zip(*states, strict=True)
    )
    return keys, values


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
