"""Attention: the tokens that each row sees, for one sequence or several in one kernel.

Theory of operation
-------------------

Letters: H heads, G key and value heads, D their width; t rows of a sequence in a forward, L its
length with them.

Keys and values lie in the arena (`kv_arena.py`): each sequence has a *place* in a *slab*, and one
tensor holds its keys of all layers. A layer does two things with the t new rows: `keep` writes
their keys and values behind the sequence's, `attend` lets their queries attend to the tokens they
see.

    keys of a place   | k0 k1 ...      k(L-t-1) | k(L-t) ... k(L-1) | zeros or garbage |
                      |  before the forward     |  the new rows     |  beyond the end  |
    row r of t sees   |<------------------------------------>|         L - t + r + 1 keys

Under a sliding window of w a row sees the last w of these only.

A sequence can end in a tree. Then a row sees the sequence, its ancestors in the tree, and itself.
Its *position* (for rotations and windows) is its depth, not its place: two siblings lie one behind
the other, and both are at the position after their parent.

    tree      a is followed by b, or by c
    places     | seq  | a | b | c |
    positions  | seq  | L | L+1 | L+1 |
    c sees     | seq  | a |   | c |

Five ways to attend, from few sequences to many:

- `TextRows.attend`: one kernel for one sequence. The first part of a prompt is `is_causal`; one row
  needs no mask; rows after other rows take flash attention where an accelerator has it
  (`attend_at_end`); everything else gets a mask that is added to the products, (group * t, L). The
  heads of a group lie one below the other as rows, so that keys are read once for all of them.
- `SideBySide`: sequences whose places follow one another in a slab, with the same few rows: one
  kernel over a span of the slab, without a copy. It reads each place up to the longest sequence's
  length. Therefore unused slots of a place must be zeros: a hidden key has a weight of zero, and
  zero times NaN is NaN (`Place.blank`).
- `TextsInPlace` (`in_place.py`): on a GPU, where launching kernels takes the time, by kernels that
  are told where each sequence lies.
- `TextsTogether` (`padded_texts.py`): on an accelerator without these kernels, over copies that are
  padded to one length.
- `attend_slowly`: step by step, for attention that no kernel computes (soft caps, sinks).

`attention_kernels.py` has what the first two and the last call.

All of them give the same numbers apart from rounding; `invariant.py` gives the same bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from paceline_contract.proposal import Proposal
from paceline_engine.torch_backend.attention_kernels import (
    Attention,
    attend_apart,
    attend_at_end,
    attend_slowly,
    hidden_tokens,
    mask_of,
    takes_flash,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_engine.torch_backend.key_values import KeyValues
    from paceline_engine.torch_backend.kv_arena import Place


FEW_ROWS = 16
"""With more rows a sequence keeps a kernel busy, and a kernel of its own costs nothing."""


@dataclass(frozen=True, slots=True)
class TreeRows:
    """The tokens that the rows of a tree see.

    Attributes:
        positions: The positions of the t rows.
        first: The column in which the tree begins; each row sees all columns before it.
        ages: For each of the tree's rows and each column from the first on: how far the column's
            token is before the row; below 0 if it is no ancestor. On the CPU.
    """

    positions: Sequence[int]
    first: int
    ages: Tensor


def _tree_rows(text: KeyValues, count: int, parents: Sequence[int]) -> TreeRows:
    """Return what rows see if the last of them have parents in a tree."""
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
    return TreeRows(positions, first, ages)


class TextRows:
    """One sequence's rows.

    Args:
        text: With room for them.
        parents: The parents of the last rows, if they are a tree: see `ModelCache.extend`.

    Attributes:
        start: How many rows the sequence has before them.
        count: How many they are: t.
        tree: The tokens that they see if they end in a tree; else None.
        positions: Their positions in the sequence.
    """

    def __init__(self, text: KeyValues, count: int, parents: Sequence[int] = ()) -> None:
        start = text.row_count
        self._text, self.start, self.count = text, start, count
        self.tree = _tree_rows(text, count, parents) if parents else None
        self.positions = range(start, start + count) if self.tree is None else self.tree.positions
        self._masks: dict[tuple[int | None, int], Tensor] = {}
        self.place.will_hold(self.length)

    @property
    def length(self) -> int:
        """How many rows the sequence has with them: L."""
        return self.start + self.count

    @property
    def kept(self) -> KeyValues:
        """The sequence's keys and values."""
        return self._text

    @property
    def place(self) -> Place:
        """Where the sequence lies."""
        assert self._text.place is not None, "it has room"
        return self._text.place

    def goes_with(self, others: TextRows) -> bool:
        """Whether one kernel can compute them together with the rows right before them."""
        return others.place.is_before(self.place) and others.count == self.count <= FEW_ROWS

    @cached_property
    def _new(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        return self._text.between(self.start, self.count)

    @cached_property
    def states(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """All keys, and values, of each layer: (1, G, L, D)."""
        return self.until(self.length)

    def until(self, length: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return each layer's first keys, and values: (1, G, length, D)."""
        return self._text.until(length)

    def keep(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Keep a layer's new keys and values: (G, t, D)."""
        for new, states in zip(self._new, (keys, values), strict=True):
            new[layer].copy_(states)

    def attend(self, layer: int, queries: Tensor, *, how: Attention) -> Tensor:
        """Attend to what is kept of a layer: (H, t, D) from the same."""
        keys, values = self.states
        return self.attend_to(queries, keys=keys[layer], values=values[layer], how=how)

    def attend_to(self, queries: Tensor, *, keys: Tensor, values: Tensor, how: Attention) -> Tensor:
        """Attend to keys and values, (1, G, L, D): (H, t, D) from the same."""
        heads, count, _ = queries.shape
        kv_heads = keys.shape[1]
        if not how.is_plain:
            return attend_slowly(
                queries,
                keys=keys[0],
                values=values[0],
                mask=self.mask(how.window, like=queries),
                how=how,
            )
        window_is_over = how.window is not None and self.length > how.window
        sees_all_before = self.tree is None and not window_is_over
        if self.start == 0 and count > 1 and sees_all_before:
            is_flash = takes_flash(queries, values=values)
            if heads != kv_heads and queries.device.type != "cpu" and not is_flash:
                # Else torch takes a kernel with products of (H, t, t).
                keys, values = (
                    each.repeat_interleave(heads // kv_heads, 1) for each in (keys, values)
                )
            return functional.scaled_dot_product_attention(
                queries[None],
                keys,
                values,
                is_causal=True,
                scale=how.scale,
                enable_gqa=heads != keys.shape[1],
            )[0]
        if count > 1 and sees_all_before and takes_flash(queries, values=values):
            return attend_at_end(queries[None], keys=keys, values=values, how=how)[0]
        mask = None
        if count > 1 or not sees_all_before:
            mask = self.mask(how.window, like=queries, group=heads // kv_heads)
        return attend_apart(queries[None], keys=keys, values=values, mask=mask, how=how)[0]

    def mask(self, window: int | None, *, like: Tensor, group: int = 1) -> Tensor:
        """Return what is added to the products: (group * t, L)."""
        if (window, group) not in self._masks:
            if self.tree is None:
                unseen = like.new_ones(self.count, self.length, dtype=torch.bool)
                hidden = unseen.triu(self.start + 1)
                if window is not None:
                    hidden |= unseen.tril(self.start - window)
            else:
                hidden = hidden_tokens(self.ages(like.device), window)
            mask = like.new_zeros(hidden.shape).masked_fill_(hidden, -math.inf)
            self._masks[window, group] = mask.repeat(group, 1)
        return self._masks[window, group]

    def ages(self, device: torch.device) -> Tensor:
        """Return how far each token is before each row, below 0 if it is not seen: (t, L)."""
        rows = torch.tensor(self.positions).to(device, non_blocking=True)
        ages = rows[:, None] - torch.arange(self.length, device=device)
        if self.tree is not None:
            last = ages[len(rows) - len(self.tree.ages) :, self.tree.first :]
            last.copy_(self.tree.ages)
        return ages


class SideBySide:
    """The rows of n sequences that lie side by side, t of each: one kernel for all of them.

    Attributes:
        count: How many rows they are together.
    """

    def __init__(self, texts: Sequence[TextRows]) -> None:
        """Build it of sequences; each of them `goes_with` the sequence before."""
        first = texts[0]
        self.count = len(texts) * first.count
        self._texts, self._shape = texts, (len(texts), first.count)
        self._slab = first.place.slab
        self._length = max(text.length for text in texts)
        self._keys, self._values = self._slab.span(
            first.place.index, count=len(texts), length=self._length
        )
        self._rows = self._slab.rows(
            [text.place.index for text in texts for _ in range(text.count)],
            [text.start + n for text in texts for n in range(text.count)],
        )
        self._masks: dict[tuple[int | None, int], Tensor | None] = {}

    def keep(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Keep a layer's new keys and values: (G, n * t, D)."""
        self._slab.keep(self._rows[layer], keys, values)

    def attend(self, layer: int, queries: Tensor, *, how: Attention) -> Tensor:
        """Attend to what is kept of a layer: (H, n * t, D) from the same."""
        keys, values = self._keys[layer], self._values[layer]
        group = len(queries) // keys.shape[1] if how.is_plain else 1
        apart = queries.view(len(queries), *self._shape, -1).transpose(0, 1)
        seen = attend_apart(
            apart,
            keys=keys,
            values=values,
            mask=self._mask(how.window, like=queries, group=group),
            how=how,
        )
        return seen.transpose(0, 1).flatten(1, 2)

    def _mask(self, window: int | None, *, like: Tensor, group: int) -> Tensor | None:
        """Return what is added to the products, (n, 1, group * t, L); None: nothing is hidden."""
        if (window, group) not in self._masks:
            mask = mask_of(self._ages, window, like=like, group=group)
            self._masks[window, group] = mask if mask.any() else None
        return self._masks[window, group]

    @cached_property
    def _ages(self) -> Tensor:
        """How far each token is before each row; below 0 if the row does not see it: (n, t, L)."""
        device = self._rows.device
        told = torch.tensor([[*text.positions] for text in self._texts])
        positions = told.to(device, non_blocking=True)
        ages = positions[:, :, None] - torch.arange(self._length, device=device)
        for own, text in zip(ages, self._texts, strict=True):
            if text.tree is not None:
                own[:, : text.length] = text.ages(device)
        return ages
