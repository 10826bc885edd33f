"""Forwards whose results for a row follow from its sequence alone, bit by bit.

A row of a matrix product is computed from that row alone. But the kernel, and so the order of
additions, depends on the product's shape. On a CPU, with one thread, the order is the same for all
shapes with a multiple of m rows, and with equally many keys to attend to (bench/LOG.md). On some
processors m is 4, on others 16 for some kernels; the proof at load finds it. So here

- a forward has a multiple of m rows, and a multiple of m rows are scored;
- keys come in tiles. A row reads the whole tile in which it is, with later keys masked. The number
  of keys then depends on the row's position only: neither on where its prefix was cut, nor on the
  rows after it;

    keys      | tile 0 | tile 1 | tile 2 |
    rows in tile 1 see |---------------->| of these, each up to itself

- the rows of one sequence in one tile are attended together, the last of them again until they are
  a multiple of m. The results of these fillings are thrown away;
- each path of a tree is attended to separately, in tiles as if it were the sequence.

All other operations of a forward compute each row by itself. A check at load refuses models for
which that is not so (`invariance.py`).
"""

from __future__ import annotations

import itertools
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from paceline_engine.torch_backend.attention_kernels import attend_apart, mask_of
from paceline_engine.torch_backend.attention_tables import Span, Spans
from paceline_engine.torch_backend.shared_rows import SharedRows, joined_states, runs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_engine.torch_backend.attention import TextRows, TreeRows
    from paceline_engine.torch_backend.attention_kernels import Attention
    from paceline_engine.torch_backend.key_values import KeyValues

TILE = 64
"""How many keys a tile has. Smaller tiles waste fewer masked keys, but cut prompts into more."""

LEAST_MULTIPLE = 4
"""The least that m can be: 1, 2 and 3 rows have kernels of their own on each processor."""


class InvariantRows(SharedRows):
    """Rows of several sequences, filled up to a multiple; see `SharedRows`.

    Args:
        texts: With buffers of whole tiles, and room for their rows.
        token_ids: The tokens of each sequence's rows, one or more.
        scored_counts: How many of each sequence's last rows to score. Logits of fillings come
            after theirs.
        parents: The parents of each sequence's last rows, if they are a tree: see
            `ModelCache.extend`.
        multiple: m.
    """

    def __init__(
        self,
        texts: Sequence[KeyValues],
        token_ids: Sequence[Sequence[int]],
        scored_counts: Sequence[int],
        *,
        parents: Sequence[Sequence[int]] | None = None,
        multiple: int = LEAST_MULTIPLE,
    ) -> None:
        super().__init__(texts, token_ids, scored_counts, parents=parents)
        self._count = len(self.token_ids)
        scored = torch.arange(self._count)[self.scored]
        self.scored = _filled(scored, multiple)
        self.token_ids = _filled(self.token_ids, multiple)
        self.positions = _filled(self.positions, multiple)
        ends = accumulate(self._counts)
        self._tiled = [
            _TiledText(text, range(end - text.count, end), multiple)
            for text, end in zip(self._texts, ends, strict=True)
        ]

    def attend(
        self, layer: int, queries: Tensor, *, keys: Tensor, values: Tensor, how: Attention
    ) -> Tensor:
        """Keep a layer's new keys and values, (G, T, D), and attend: (H, T, D) to the same."""
        self._keep(layer, keys[:, : self._count], values[:, : self._count])
        return self._whole([each.attend(layer, queries, how=how) for each in self._kernels])

    def keep(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keep a layer's new keys and values; return all sequences' tiles side by side."""
        self._keep(layer, keys[:, : self._count], values[:, : self._count])
        return joined_states([text.states for text in self._tiled], layer)

    def attend_to_made(
        self, queries: Tensor, *, keys: Tensor, values: Tensor, how: Attention
    ) -> Tensor:
        """Attend to what a layer made of what `keep` returned: (H, T, D)."""
        lengths = [text.length for text in self._tiled]
        parts = (torch.split(each[None], lengths, 2) for each in (keys, values))
        return self._whole(
            [
                text.attend_to(queries, keys=made_keys, values=made_values, how=how)
                for text, made_keys, made_values in zip(self._tiled, *parts, strict=True)
            ]
        )

    def _table(self) -> Spans:
        parts = [(tile, text) for text in self._tiled for tile in text.tiles()]
        return Spans(
            [tile.span(text.text.kept) for tile, text in parts],
            kernel_counts=(tile.kernel_count for tile, _ in parts),
        )

    @cached_property
    def _kernels(self) -> Sequence[_TiledText | _TilesSideBySide]:
        return [run[0] if len(run) == 1 else _TilesSideBySide(run) for run in runs(self._tiled)]

    def _whole(self, seen: list[Tensor]) -> Tensor:
        """Put parts together, and zeros where the forward was filled up."""
        if (unused := len(self.token_ids) - self._count) > 0:
            seen.append(seen[0].new_zeros(len(seen[0]), unused, seen[0].shape[-1]))
        return torch.cat(seen, 1)


class _TiledText:
    """One sequence's part: its rows in each tile of keys.

    Attributes:
        rows: Their indices among all rows.
        length: The end of the last tile.
        multiple: m.
    """

    def __init__(self, text: TextRows, rows: range, multiple: int) -> None:
        self.text, self.rows, self.multiple = text, rows, multiple
        self.length = _up_to(TILE, text.length)

    @cached_property
    def states(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Each layer's keys, and values: (1, G, length, D)."""
        return self.text.until(self.length)

    @cached_property
    def _parts(self) -> Sequence[Tile | _Path]:
        if self.text.tree is None:
            return _tiles(self.rows, start=self.text.start, multiple=self.multiple)
        chain = self.rows[: len(self.rows) - len(self.text.tree.ages)]
        paths = _paths(self.text.tree, self.rows[len(chain) :], multiple=self.multiple)
        return [*_tiles(chain, start=self.text.start, multiple=self.multiple), *paths]

    @cached_property
    def _order(self) -> Tensor | None:
        """The order of the sequence's rows among the parts' rows; None: the same order."""
        if self.text.tree is None:
            return None
        return torch.tensor([row for part in self._parts for row in part.rows]).argsort()

    def tiles(self) -> Sequence[Tile]:
        """Return its rows, which are no tree, by the tiles in which they are."""
        return _tiles(self.rows, start=self.text.start, multiple=self.multiple)

    def goes_with(self, others: _TiledText) -> bool:
        """Whether one kernel can compute it together with the sequence right before it."""
        return (
            self.length == others.length
            and self._has_one_tile
            and others._has_one_tile
            and self.text.goes_with(others.text)
        )

    @property
    def _has_one_tile(self) -> bool:
        return self.text.tree is None and self.length - self.text.start <= TILE

    def attend(self, layer: int, queries: Tensor, *, how: Attention) -> Tensor:
        """Attend with its rows of all, (H, T, D), to what is kept of a layer: (H, rows, D)."""
        keys, values = self.states
        return self.attend_to(queries, keys=keys[layer], values=values[layer], how=how)

    def attend_to(self, queries: Tensor, *, keys: Tensor, values: Tensor, how: Attention) -> Tensor:
        """Attend with its rows of all, (H, T, D), to keys and values: (H, rows, D)."""
        seen = torch.cat(
            [part.attend(queries, keys=keys, values=values, how=how) for part in self._parts], 1
        )
        return seen if self._order is None else seen.index_select(1, self._order)


class _TilesSideBySide:
    """The rows of sequences that lie side by side, all in the same tile: one kernel for all."""

    def __init__(self, texts: Sequence[_TiledText]) -> None:
        place, end = texts[0].text.place, texts[0].length
        self._keys, self._values = place.slab.span(place.index, count=len(texts), length=end)
        self._tile = Tile(
            [each.rows for each in texts],
            [each.text.start for each in texts],
            multiple=texts[0].multiple,
        )

    def attend(self, layer: int, queries: Tensor, *, how: Attention) -> Tensor:
        """Attend with their rows of all, (H, T, D), to what is kept of a layer: (H, rows, D)."""
        return self._tile.attend(
            queries, keys=self._keys[layer], values=self._values[layer], how=how
        )


class Tile:
    """The rows of a sequence, or of n alike sequences, in one tile of keys; and fillings.

    Args:
        rows: The indices of each sequence's rows among all rows, equally many of each.
        positions: The position of each sequence's first row; the others follow it.
        multiple: m.

    Attributes:
        rows: The indices of the first sequence's rows among all rows.
    """

    def __init__(
        self, rows: Sequence[Sequence[int]], positions: Sequence[int], *, multiple: int
    ) -> None:
        self.rows = rows[0]
        own_count = len(self.rows)
        self._end = _up_to(TILE, positions[0] + own_count)
        count = _up_to(multiple, own_count)
        # Fillings are copies of the last row: a row that sees no key would have no weights.
        places = torch.arange(count).clamp(max=own_count - 1)
        taken = torch.tensor([[*each] for each in rows])[:, places]
        self._taken, self._shape = taken.flatten(), taken.shape
        self._own = (torch.arange(len(rows))[:, None] * count + torch.arange(own_count)).flatten()
        self._positions = torch.tensor(positions)[:, None] + places
        self._masks: dict[tuple[int | None, int], Tensor] = {}

    @property
    def kernel_count(self) -> int:
        """How many rows of a sequence torch's kernel gets, fillings included."""
        return self._shape[1]

    def span(self, text: KeyValues) -> Span:
        """Return the rows of the only sequence as compiled code attends with them."""
        return Span(
            text=text,
            first=self.rows[0],
            count=len(self.rows),
            start=int(self._positions[0, 0]),
            length=self._end,
        )

    def attend(self, queries: Tensor, *, keys: Tensor, values: Tensor, how: Attention) -> Tensor:
        """Attend to the n sequences' keys and values, (n, G, L, D): (H, n * rows, D)."""
        keys, values = keys[:, :, : self._end], values[:, :, : self._end]
        heads, kv_heads = len(queries), keys.shape[1]
        taken = queries.index_select(1, self._taken).view(heads, *self._shape, -1).transpose(0, 1)
        group = heads // kv_heads if how.is_plain else 1
        seen = attend_apart(
            taken,
            keys=keys,
            values=values,
            mask=self._mask(how.window, like=taken, group=group),
            how=how,
        )
        return seen.transpose(0, 1).flatten(1, 2).index_select(1, self._own)

    def _mask(self, window: int | None, *, like: Tensor, group: int) -> Tensor:
        """Return what is added to the products: (n, 1, group * t, end)."""
        if (window, group) not in self._masks:
            ages = self._positions[:, :, None] - torch.arange(self._end)
            self._masks[window, group] = mask_of(ages, window, like=like, group=group)
        return self._masks[window, group]


class _Path:
    """Rows of a tree that follow one another, attended to as if their path were the sequence.

    Args:
        rows: The path's last rows; another path has the others.
        nodes: The path's tokens, among the tree's.
        multiple: m.

    Attributes:
        rows: Their indices among all rows.
    """

    def __init__(
        self, rows: Sequence[int], *, nodes: Tensor, tree: TreeRows, multiple: int
    ) -> None:
        self.rows = rows
        self._nodes = nodes
        self._first, self._node_count = tree.first, tree.ages.shape[1]
        start = tree.first + len(nodes) - len(rows)
        self._tiles = _tiles(rows, start=start, multiple=multiple)

    def attend(self, queries: Tensor, *, keys: Tensor, values: Tensor, how: Attention) -> Tensor:
        """Attend to the sequence's keys and values, (1, G, L, D): (H, rows, D).

        During the call the path's tokens lie in their places as if they were the sequence's.
        """
        all_nodes = [each.narrow(2, self._first, self._node_count) for each in (keys, values)]
        kept = [each.clone() for each in all_nodes]
        try:
            for each, own in zip(all_nodes, kept, strict=True):
                each[:, :, : len(self._nodes)] = own.index_select(2, self._nodes)
            seen = [tile.attend(queries, keys=keys, values=values, how=how) for tile in self._tiles]
        finally:
            # A draft's tree from earlier forwards stays valid, also if this forward fails.
            for each, own in zip(all_nodes, kept, strict=True):
                each.copy_(own)
        return torch.cat(seen, 1)


def _tiles(rows: Sequence[int], *, start: int, multiple: int) -> list[Tile]:
    """Divide rows, the first of them at position `start`, by the tiles in which they are."""
    end = start + len(rows)
    edges = [start, *range(_up_to(TILE, start + 1), end, TILE), end] if rows else []
    return [
        Tile([rows[first - start : last - start]], [first], multiple=multiple)
        for first, last in itertools.pairwise(edges)
    ]


def _paths(tree: TreeRows, rows: Sequence[int], *, multiple: int) -> list[_Path]:
    """Divide a tree's rows by the paths to its leaves: a row belongs to the first of its paths."""
    sees = tree.ages >= 0
    held_count = sees.shape[1] - len(rows)
    is_leaf = sees[:, held_count:].sum(0) == 1
    paths, left = [], set(range(len(rows)))
    for leaf in is_leaf.nonzero()[:, 0].tolist():
        nodes = sees[leaf].nonzero()[:, 0]  # a parent comes before what follows it
        own = [node - held_count for node in nodes.tolist() if node - held_count in left]
        left.difference_update(own)
        own_rows = [rows[index] for index in own]
        paths.append(_Path(own_rows, nodes=nodes, tree=tree, multiple=multiple))
    return paths


def _up_to(multiple: int, count: int) -> int:
    return -(-count // multiple) * multiple


def _filled(each: Tensor, multiple: int) -> Tensor:
    """Add zeros, up to a multiple."""
    return functional.pad(each, (0, _up_to(multiple, len(each)) - len(each)))
