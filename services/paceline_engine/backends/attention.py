"""The rows of several texts in one forward: where they go, and what each of them sees.

Letters: T rows in all, H heads, G key and value heads, D their width. All texts' rows lie side by
side; of a text with t of them and L tokens, these included:

    tokens   | before the forward: L - t | its rows: t |
    row r sees the first L - t + r + 1 of them, under a sliding window only the last of these

A text can end in a tree. Its rows see of it their ancestors and themselves, and are, for windows
and rotations, where they would be if their path were the text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from paceline_engine.proposal import Proposal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline_engine.backends.key_values import KeyValues
    from paceline_engine.backends.stream_rows import StreamRows

__all__ = ["Attention", "ForwardRows", "OtherRows", "SharedRows", "attend_slowly"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """How a layer attends.

    Attributes:
        scale: Of the products of queries and keys.
        window: How many tokens a row sees, itself included; None: all before it.
        soft_cap: What the scaled products are squeezed to by a tanh; None: they are not.
        sinks: (H,) a further product for each head, that takes part of the attention; or None.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the kernels know it."""
        return self.soft_cap is None and self.sinks is None


class ForwardRows(Protocol):
    """What a decoder computes in one forward.

    Attributes:
        token_ids, positions: (T,) int64.
        longest: More than the largest position.
        scored: Which rows to score.
        read_at: Which layer's input to keep of them, for an adapter; the number of layers: what the
            head gets; None: nothing.
        read: That: (scored, E).
        change: Told what enters that layer, (T, E), it says with which rows to go on; None: with
            the same. The rest of the forward, what is read included, is then theirs.
        streams: Which rows are streams beside others, and what is added to their products; or None.
    """

    token_ids: Tensor
    positions: Tensor
    longest: int
    scored: Tensor | slice
    read_at: int | None
    read: Tensor | None
    change: Callable[[Tensor], OtherRows | None] | None
    streams: StreamRows | None

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, how: Attention
    ) -> Tensor:
        """Keep a layer's new keys and values, (G, T, D), and attend: (H, T, D) to the same."""


@dataclass(frozen=True, slots=True)
class OtherRows:
    """What a forward goes on with.

    Attributes:
        rows: As if there had never been others.
        hidden: What enters the next layer in these: (T, E).
    """

    rows: ForwardRows
    hidden: Tensor


class SharedRows:
    """Rows of several texts, (T,) in all, that see nothing of each other's.

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
        """Build it.

        Args:
            texts: With room for their rows.
            token_ids: Of each text's rows, one or more.
            scored_counts: How many of each text's last rows to score, before those of streams.
            parents: Of each text's last rows, if they are a tree: see `ModelCache.extend`.
            stream_counts: How many of each text's last rows are streams; none of them is scored.
            together: Attend to all texts in one kernel for each layer, over padded copies, rather
                than text by text. Pays where launching kernels is what takes the time.
        """
        device = texts[0].keys.device
        self._counts = [len(each) for each in token_ids]
        self._texts = [
            _TextRows(text, count, _tree_rows(text, count, own) if own else None)
            for text, count, own in zip(
                texts, self._counts, parents or [()] * len(texts), strict=True
            )
        ]
        self._together = together and len(texts) > 1
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
        self.read_at: int | None = None
        self.read: Tensor | None = None
        self.change: Callable[[Tensor], OtherRows | None] | None = None
        self.streams: StreamRows | None = None

    def _last(self, counts: Sequence[int], ends: Sequence[int]) -> Tensor | slice:
        """Return so many rows before each of these ends."""
        spans = [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
        if len(spans) == 1:
            return slice(spans[0].start, spans[0].stop)
        rows = [*chain.from_iterable(spans)]
        if len(rows) == len(self.token_ids):
            return slice(0, len(rows))
        return torch.tensor(rows, dtype=torch.int64).to(self.token_ids.device, non_blocking=True)

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, how: Attention
    ) -> Tensor:
        """Keep a layer's new keys and values, (G, T, D), and attend: (H, T, D) to the same."""
        self._keep(layer, keys, values)
        if self._together and how.is_plain:
            return self._padded.attend(layer, queries, how)
        states = [(text.keys[layer], text.values[layer]) for text in self._texts]
        return self._attend_to(states, queries, how)

    def keep(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keep a layer's new keys and values; return all texts' side by side, (G, sum of L, D)."""
        self._keep(layer, keys, values)
        return (
            torch.cat([text.keys[layer][0] for text in self._texts], 1),
            torch.cat([text.values[layer][0] for text in self._texts], 1),
        )

    def attend_to_made(
        self, queries: Tensor, keys: Tensor, values: Tensor, how: Attention
    ) -> Tensor:
        """Attend to what a layer made of what `keep` returned, (H, sum of L, D): (H, T, D)."""
        lengths = [text.start + text.count for text in self._texts]
        parts = (torch.split(each[None], lengths, 2) for each in (keys, values))
        return self._attend_to(list(zip(*parts, strict=True)), queries, how)

    def _keep(self, layer: int, keys: Tensor, values: Tensor) -> None:
        for text, *parts in zip(
            self._texts, *(torch.split(new, self._counts, 1) for new in (keys, values)), strict=True
        ):
            text.keep(layer, *parts)

    def _attend_to(
        self, states: Sequence[tuple[Tensor, Tensor]], queries: Tensor, how: Attention
    ) -> Tensor:
        """Attend text by text, to the keys and values of each: (1, G, L, D)."""
        if len(self._texts) == 1:
            return self._texts[0].attend(queries, *states[0], how)
        seen = [
            text.attend(part, *own, how)
            for text, part, own in zip(
                self._texts, torch.split(queries, self._counts, 1), states, strict=True
            )
        ]
        return torch.cat(seen, 1)

    @cached_property
    def _padded(self) -> _Padded:
        return _Padded(self._texts)


@dataclass(frozen=True, slots=True)
class _TreeRows:
    """What rows that end in a tree see, where it is not what is before them.

    Attributes:
        positions: Of the t rows.
        first: The column in which the tree begins; all before it is seen as ever.
        ages: Of the last rows, which are the tree's: how far before each is which of the columns
            from the first on; below 0 where it is no ancestor. On the CPU.
    """

    positions: Sequence[int]
    first: int
    ages: Tensor


def _tree_rows(text: KeyValues, count: int, parents: Sequence[int]) -> _TreeRows:
    """Say what rows see of which the last ones have parents in a tree."""
    first, held = text.length + count - len(parents), len(text.tree)
    tree = Proposal((0,) * (held + len(parents)), (*text.tree.parents, *parents))
    positions = list(range(text.length, first))
    seen: list[tuple[int, int, int]] = []
    for row in range(len(parents)):
        path = list(tree.ancestors(held + row))
        positions.append(first + len(path) - 1)
        seen.extend((row, ancestor, age) for age, ancestor in enumerate(path))
    rows, columns, own = torch.tensor(seen).unbind(1)
    ages = torch.full((len(parents), len(tree)), -1)
    ages[rows, columns] = own
    return _TreeRows(positions, first, ages)


class _TextRows:
    """One text's part."""

    def __init__(self, text: KeyValues, count: int, tree: _TreeRows | None) -> None:
        start = text.row_count
        self.start, self.count, self.tree = start, count, tree
        self.positions = range(start, start + count) if tree is None else tree.positions
        self._new_keys, self._new_values = text.between(start, count)
        self.keys, self.values = text.until(start + count)
        self._masks: dict[tuple[int | None, int], Tensor] = {}

    def keep(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self._new_keys[layer].copy_(keys)
        self._new_values[layer].copy_(values)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, how: Attention) -> Tensor:
        heads, count, _ = queries.shape
        kv_heads = keys.shape[1]
        if not how.is_plain:
            return attend_slowly(queries, keys[0], values[0], self.mask(how.window, queries), how)
        window_is_over = how.window is not None and self.start + count > how.window
        sees_all_before = self.tree is None and not window_is_over
        if self.start == 0 and count > 1 and sees_all_before:
            return functional.scaled_dot_product_attention(
                queries[None],
                keys,
                values,
                is_causal=True,
                scale=how.scale,
                enable_gqa=heads != kv_heads,
            )[0]
        mask = None
        if count > 1 or not sees_all_before:
            mask = self.mask(how.window, queries, heads // kv_heads)
        # The heads of a group lie one below the other, as rows: (1, G, H / G * t, D).
        grouped = queries.reshape(1, kv_heads, -1, queries.shape[-1])
        seen = functional.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=mask, scale=how.scale
        )
        return seen.reshape(heads, count, -1)

    def mask(self, window: int | None, like: Tensor, group: int = 1) -> Tensor:
        """Return what is added to the products: (group * t, L)."""
        if (window, group) not in self._masks:
            if self.tree is None:
                unseen = like.new_ones(self.count, self.start + self.count, dtype=torch.bool)
                hidden = unseen.triu(self.start + 1)
                if window is not None:
                    hidden |= unseen.tril(self.start - window)
            else:
                hidden = _hidden(self.ages(like.device), window)
            mask = like.new_zeros(hidden.shape).masked_fill_(hidden, -math.inf)
            self._masks[window, group] = mask.repeat(group, 1)
        return self._masks[window, group]

    def ages(self, device: torch.device) -> Tensor:
        """Return how far before each row each token is, below 0 if it is not seen: (t, L)."""
        rows = torch.tensor(self.positions, device=device)
        ages = rows[:, None] - torch.arange(self.start + self.count, device=device)
        if self.tree is not None:
            last = ages[len(rows) - len(self.tree.ages) :, self.tree.first :]
            last.copy_(self.tree.ages)
        return ages


class _Padded:
    """All texts' rows and tokens, padded to the most that one of them has."""

    def __init__(self, texts: Sequence[_TextRows]) -> None:
        self._texts = texts
        device = texts[0].keys[0].device
        counts = torch.tensor([text.count for text in texts])
        lengths = torch.tensor([text.start + text.count for text in texts])
        row, column = torch.arange(int(counts.max())), torch.arange(int(lengths.max()))
        # Where padding is, any place serves; these are there.
        rows = (counts.cumsum(0) - counts)[:, None] + row.clamp(max=counts[:, None] - 1)
        columns = (lengths.cumsum(0) - lengths)[:, None] + column.clamp(max=lengths[:, None] - 1)
        self._shape = rows.shape
        self._rows, self._columns = rows.flatten().to(device), columns.flatten().to(device)
        # (B, t, L) distances from the token to the row; below 0 are tokens after it.
        self._ages = ((lengths - counts)[:, None, None] + row[:, None] - column).to(device)
        for ages, text in zip(self._ages, texts, strict=True):
            if text.tree is not None:
                ages[: text.count, : text.start + text.count] = text.ages(device)
        self._real = (row < counts[:, None]).flatten().nonzero()[:, 0].to(device)
        self._masks: dict[tuple[int | None, int], Tensor] = {}

    def attend(self, layer: int, queries: Tensor, how: Attention) -> Tensor:
        """Attend to all texts in one kernel."""
        heads, width = queries.shape[0], queries.shape[-1]
        keys, values = (
            torch.cat([each[layer][0] for each in states], 1)
            .index_select(1, self._columns)
            .reshape(states[0][layer].shape[1], self._shape[0], -1, states[0][layer].shape[-1])
            .transpose(0, 1)
            for states in ([t.keys for t in self._texts], [t.values for t in self._texts])
        )
        kv_heads, (batch, count) = keys.shape[1], self._shape
        padded = (
            queries.index_select(1, self._rows).reshape(heads, batch, count, width).transpose(0, 1)
        )
        seen = functional.scaled_dot_product_attention(
            padded.reshape(batch, kv_heads, -1, width),
            keys,
            values,
            attn_mask=self._mask(how.window, queries, heads // kv_heads),
            scale=how.scale,
        )
        rows = seen.reshape(batch, heads, count, -1).transpose(0, 1).flatten(1, 2)
        return rows.index_select(1, self._real)

    def _mask(self, window: int | None, like: Tensor, group: int) -> Tensor:
        """Return what is added to the products: (B, 1, group * t, L)."""
        if (window, group) not in self._masks:
            hidden = _hidden(self._ages, window)
            mask = like.new_zeros(hidden.shape).masked_fill_(hidden, -math.inf)
            self._masks[window, group] = mask.repeat(1, group, 1)[:, None]
        return self._masks[window, group]


def _hidden(ages: Tensor, window: int | None) -> Tensor:
    """Whether a token of an age is hidden from its row."""
    hidden = ages < 0
    return hidden if window is None else hidden | (ages >= window)


def attend_slowly(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, how: Attention
) -> Tensor:
    """Attend step by step: what no kernel knows. (H, t, D) from the same, and (G, L, D) twice."""
    group = queries.shape[0] // keys.shape[0]
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    products = queries @ keys.transpose(-1, -2) * how.scale
    if how.soft_cap is not None:
        products = (products / how.soft_cap).tanh() * how.soft_cap
    products = products + mask
    if how.sinks is not None:
        sinks = how.sinks.to(products).view(-1, 1, 1).expand(-1, products.shape[1], 1)
        products = torch.cat((products, sinks), -1)
    attention = products.softmax(-1, dtype=torch.float32).to(values.dtype)
    return attention[..., : values.shape[-2]] @ values
