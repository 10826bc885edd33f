"""Attention to several sequences on an accelerator, in few kernels.

Launching a kernel takes longer than a short sequence's attention. So one kernel computes several
sequences, over copies that are padded to the longest of them. The cost of padding is bounded:

- a sequence with many rows keeps a kernel busy by itself, and is read where it lies;
- so is a long sequence, whose copy takes longer than a launch;
- other sequences go together if their lengths are between the same two powers of two.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from paceline_engine.torch_backend.attention import FEW_ROWS
from paceline_engine.torch_backend.attention_kernels import mask_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_engine.torch_backend.attention import TextRows
    from paceline_engine.torch_backend.attention_kernels import Attention

# Sequences up to this length go together: copying so few tokens takes about as long as a launch.
_SHORT_LENGTH = 256
# Up to this size a sequence's keys and values of a layer are copied. A copy reads and writes them
# twice, 40 us at 3 TB/s, and a sequence of its own takes the host 30 to 100 us (bench/LOG.md).
_MOST_COPIED_BYTES = 32 << 20


class TextsTogether:
    """The rows of a forward's sequences, (T,) in all, in as few kernels as pays.

    Cost: the padded copies have at most twice the tokens of their sequences, short ones excepted;
    at most FEW_ROWS rows for each sequence; and at most 64 MiB for it.
    """

    def __init__(self, texts: Sequence[TextRows]) -> None:
        """Build it of sequences in the order of their rows."""
        groups: defaultdict[int, list[tuple[TextRows, int]]] = defaultdict(list)
        self._alone: list[tuple[TextRows, int]] = []
        end = 0
        for text in texts:
            start, end = end, end + text.count
            if text.count > FEW_ROWS or _is_long(text):
                self._alone.append((text, start))
            else:
                length = max(text.length, _SHORT_LENGTH)
                groups[(length - 1).bit_length()].append((text, start))
        self._alone += [group[0] for group in groups.values() if len(group) == 1]
        padded = [group for group in groups.values() if len(group) > 1]
        self._padded = [PaddedTexts(group) for group in padded]
        in_order = [*chain.from_iterable(padded), *self._alone]
        rows = [row for text, start in in_order for row in range(start, start + text.count)]
        # Where each row is among the kernels' rows, which follow one another.
        self._order = (
            torch.tensor(rows).argsort().to(texts[0].states[0][0].device, non_blocking=True)
        )

    def attend(self, layer: int, queries: Tensor, *, how: Attention) -> Tensor:
        """Attend to what is kept of a layer: (H, T, D) from the same."""
        seen = [padded.attend(layer, queries, how=how) for padded in self._padded]
        for text, start in self._alone:
            own = queries.narrow(1, start, text.count)
            seen.append(text.attend(layer, own, how=how))
        if len(seen) == 1:
            return seen[0]
        return torch.cat(seen, 1).index_select(1, self._order)


def _is_long(text: TextRows) -> bool:
    return sum(states[0].nbytes for states in text.states) > _MOST_COPIED_BYTES


class PaddedTexts:
    """Copies of the rows and tokens of B sequences, padded to the most that one of them has."""

    def __init__(self, texts: Sequence[tuple[TextRows, int]]) -> None:
        """Build it of sequences, each with the index of its first row among all rows."""
        self._texts = [text for text, _ in texts]
        counts = [text.count for text in self._texts]
        lengths = [text.length for text in self._texts]
        self._shape = (len(texts), max(counts))
        self._device = self._texts[0].states[0][0].device
        starts = [start for _, start in texts]
        # Large tensors are made on the device, so that the host need not send them.
        told = torch.tensor([starts, counts, lengths]).to(self._device, non_blocking=True)
        self._place(*told[..., None], most_tokens=max(lengths))
        real = [self._shape[1] * n + row for n, count in enumerate(counts) for row in range(count)]
        self._real = torch.tensor(real).to(self._device, non_blocking=True)
        self._masks: dict[tuple[int | None, int], Tensor] = {}

    def _place(self, starts: Tensor, counts: Tensor, lengths: Tensor, *, most_tokens: int) -> None:
        """Compute the indices of rows and tokens, and their distances. The tensors are (B, 1)."""
        row = torch.arange(self._shape[1], device=self._device)
        column = torch.arange(most_tokens, device=self._device)
        # Padding may read any row; these rows exist.
        self._rows = (starts + torch.minimum(row, counts - 1)).flatten()
        ends = lengths.cumsum(0)
        self._columns = (ends - lengths + torch.minimum(column, lengths - 1)).flatten()
        # (B, t, L) distances from the token to the row; below 0 are tokens after it.
        self._ages = (lengths - counts)[..., None] + row[:, None] - column
        for ages, text in zip(self._ages, self._texts, strict=True):
            if text.tree is not None:
                ages[: text.count, : text.length] = text.ages(self._device)

    def attend(self, layer: int, queries: Tensor, *, how: Attention) -> Tensor:
        """Attend to all these sequences in one kernel: (H, their rows, D) from (H, T, D)."""
        heads, width = queries.shape[0], queries.shape[-1]
        keys, values = (
            torch.cat([each[layer][0] for each in states], 1)
            .index_select(1, self._columns)
            .reshape(states[0][layer].shape[1], self._shape[0], -1, states[0][layer].shape[-1])
            .transpose(0, 1)
            for states in zip(*(text.states for text in self._texts), strict=True)
        )
        kv_heads, (batch, count) = keys.shape[1], self._shape
        padded = (
            queries.index_select(1, self._rows).reshape(heads, batch, count, width).transpose(0, 1)
        )
        seen = functional.scaled_dot_product_attention(
            padded.reshape(batch, kv_heads, -1, width),
            keys,
            values,
            attn_mask=self._mask(how.window, like=queries, group=heads // kv_heads),
            scale=how.scale,
        )
        rows = seen.reshape(batch, heads, count, -1).transpose(0, 1).flatten(1, 2)
        return rows.index_select(1, self._real)

    def _mask(self, window: int | None, *, like: Tensor, group: int) -> Tensor:
        """Return what is added to the products: (B, 1, group * t, L)."""
        if (window, group) not in self._masks:
            self._masks[window, group] = mask_of(self._ages, window, like=like, group=group)
        return self._masks[window, group]
