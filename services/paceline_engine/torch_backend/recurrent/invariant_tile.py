"""The open tile whose results for a row follow from the row's sequence alone, bit by bit.

`open_tile.py` has the formulas. There the order of additions depends on which rows come in one
forward: new rows are solved together, and the base moves as rows are closed. Here each row is
computed by itself, in products of one shape, whatever else is computed:

- a row sees the state at the last multiple of TILE up to its own position, and the rows of its tile
  before it, which lie in a block of TILE rows. The block's other rows are zeros;
- sums of decays begin at that multiple, and are added up row by row;
- a state is made of the state before it, and of all rows of the tile between them.

    positions   base             base + TILE        base + 2 TILE     end
    states      S                S'                 S''
    rows        | tile           | tile             | tile: 0 0 0 ... |
                                                    rows here see S'' and their tile

States after the base are kept, too, as long as all rows before them are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline_engine.torch_backend.recurrent.open_tile import TILE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_engine.torch_backend.recurrent.open_tile import RecurrentInput


class InvariantTile:
    """A layer's part of a sequence; letters as in `open_tile.py`.

    Attributes:
        states: (H, K, V) each, at the base and at the multiples of TILE after it; None: zeros.
        keys: (G, n, K) of the open rows.
        updates: (H, n, V), u of them.
        decays: (H, n), the sums of log decays since the beginning of each row's tile.
    """

    most_states = 4
    """How many states it has at most: the rows of three tiles can be open."""

    def __init__(
        self, states: Sequence[Tensor | None], *, keys: Tensor, updates: Tensor, decays: Tensor
    ) -> None:
        self.states, self.keys, self.updates, self.decays = states, keys, updates, decays

    @classmethod
    def empty(cls, like: RecurrentInput) -> InvariantTile:
        """Return the tile of no rows, for rows such as these."""
        return cls(
            [None], keys=like.keys[:, :0], updates=like.values[:, :0], decays=like.log_decays[:, :0]
        )

    def after(
        self, new: RecurrentInput, paths: Sequence[Sequence[int]], *, chain_count: int
    ) -> tuple[Tensor, InvariantTile]:
        """Return the outputs of new rows, (H, m, V), and the tile with them.

        Args:
            paths: For each new row the places, among the open and the new rows, of the rows that it
                follows, and its own.
            chain_count: How many of all rows are the sequence; a tree comes behind them.
        """
        rows = _Rows(self, new)
        outputs = [rows.compute(index, path) for index, path in enumerate(paths)]
        return torch.stack(outputs, 1), rows.tile(chain_count)

    def closed(self, count: int) -> InvariantTile:
        """Return the tile with its first rows, a multiple of TILE, in its first state only."""
        if not count:
            return self
        return InvariantTile(
            self.states[count // TILE :],
            keys=self.keys[:, count:].clone(),
            updates=self.updates[:, count:].clone(),
            decays=self.decays[:, count:].clone(),
        )

    def only(self, rows: Sequence[int]) -> InvariantTile:
        """Return the tile with some of its open rows."""
        index = [*rows]
        same = next((place for place, row in enumerate(index) if place != row), len(index))
        return InvariantTile(
            self.states[: same // TILE + 1],
            keys=self.keys[:, index],
            updates=self.updates[:, index],
            decays=self.decays[:, index],
        )


class _Rows:
    """A layer's rows in one forward: the open ones, and the new ones behind them."""

    def __init__(self, before: InvariantTile, new: RecurrentInput) -> None:
        self._new, self._open_count = new, before.keys.shape[1]
        self._keys = torch.cat((before.keys, new.keys), 1)
        self._updates = torch.cat((before.updates, torch.zeros_like(new.values)), 1)
        self._decays = torch.cat((before.decays, torch.zeros_like(new.log_decays)), 1)
        self._group = len(new.values) // len(new.keys)
        # By the last row before them; the first one comes before all rows.
        self._states = {edge * TILE - 1: state for edge, state in enumerate(before.states)}
        self._block: _Block | None = None

    def compute(self, index: int, path: Sequence[int]) -> Tensor:
        """Compute the new rows in their order: the output of each, (H, V)."""
        start = (len(path) - 1) // TILE * TILE
        block = self._block = self._block_for(path, start)
        own, place = self._new.part(index, index + 1), self._open_count + index
        found = block.compute(own, place)
        self._updates[:, place], self._decays[:, place] = block.last
        return found

    def tile(self, chain_count: int) -> InvariantTile:
        """Return all rows as a tile."""
        path = range(chain_count)
        edges = range(0, max(chain_count - 1, 0) // TILE * TILE + 1, TILE)
        return InvariantTile(
            [self._state_before(path, edge) for edge in edges],
            keys=self._keys,
            updates=self._updates,
            decays=self._decays,
        )

    def _state_before(self, path: Sequence[int], edge: int) -> Tensor | None:
        """Return the state after the first rows of a path: a multiple of TILE."""
        last = path[edge - 1] if edge else -1
        if last not in self._states:
            before = self._state_before(path, edge - TILE)
            tile = self._block_of(path[edge - TILE : edge], before)
            self._states[last] = tile.state_after()
        return self._states[last]

    def _block_for(self, path: Sequence[int], start: int) -> _Block:
        """Return the block of a path's last tile, without its last row.

        What the last path has in common with this one stays. A row has one path before it, so a
        block that begins with the same row has the same state.
        """
        block, places = self._block, path[start:-1]
        if block is None or not places or block.places[:1] != [places[0]]:
            return self._block_of(places, self._state_before(path, start))
        self._fill(block, places)
        return block

    def _block_of(self, places: Sequence[int], state: Tensor | None) -> _Block:
        block = _Block(self._new, state, group=self._group)
        self._fill(block, places)
        return block

    def _fill(self, block: _Block, places: Sequence[int]) -> None:
        """Have the rows in these places in a block, and zeros behind them."""
        pairs = enumerate(zip(block.places, places, strict=False))
        same = next(
            (at for at, (had, wanted) in pairs if had != wanted),
            min(len(block.places), len(places)),
        )
        more = [*places[same:]]
        for whole, part in (
            (block.keys, self._keys),
            (block.updates, self._updates),
            (block.decays, self._decays),
        ):
            whole[:, same : len(block.places)] = 0
            if more:
                whole[:, same : len(places)] = part[:, more]
        block.places = [*places]


class _Block:
    """The rows of one tile, in the order of a path, filled up with zeros.

    Attributes:
        keys, updates, decays: (G, TILE, K), (H, TILE, V), (H, TILE).
        state: Before them.
        places: Where they are among all rows.
    """

    def __init__(self, like: RecurrentInput, state: Tensor | None, *, group: int) -> None:
        key_heads, _, key_width = like.keys.shape
        heads, _, value_width = like.values.shape
        self.keys = like.keys.new_zeros(key_heads, TILE, key_width)
        self.updates = like.values.new_zeros(heads, TILE, value_width)
        self.decays = like.log_decays.new_zeros(heads, TILE)
        self.state, self._group = state, group
        self.places: list[int] = []

    @property
    def last(self) -> tuple[Tensor, Tensor]:
        """The update, (H, V), and the sum of decays, (H,), of its last row."""
        row = len(self.places) - 1
        return self.updates[:, row], self.decays[:, row]

    def compute(self, new: RecurrentInput, place: int) -> Tensor:
        """Append a row; return its output, (H, V)."""
        row = len(self.places)
        self.places.append(place)
        self.keys[:, row] = new.keys[:, 0]
        decay = new.log_decays[:, 0]
        self.decays[:, row] = decay if not row else self.decays[:, row - 1] + decay
        faded = self.decays[:, row : row + 1] - self.decays
        faded[:, row + 1 :] = -torch.inf
        faded = faded.exp()
        # Copies, which begin where the processor's vectors begin.
        asked = new.queries.clone() if new.strengths is None else self._asked(new)
        scores = self._spread(torch.bmm(asked, self.keys.transpose(1, 2))) * faded[:, None]
        known = None
        if self.state is not None:
            own = self.decays[:, row, None, None].exp()
            known = torch.bmm(self._spread(asked), self.state) * own
        update = new.values[:, 0]
        if new.strengths is not None:
            # The row's own update is still zero.
            update = update - torch.bmm(scores[:, 1:].clone(), self.updates)[:, 0]
            update = update if known is None else update - known[:, 1]
            update = update * new.strengths
        self.updates[:, row] = update
        seen = torch.bmm(scores[:, :1].clone(), self.updates)[:, 0]
        return seen if known is None else seen + known[:, 0]

    def state_after(self) -> Tensor:
        """Return the state after its rows, which are all there."""
        last = self.decays[:, -1:]
        keys = self._spread(self.keys) * (last - self.decays).exp()[..., None]
        added = torch.bmm(keys.transpose(1, 2), self.updates)
        return added if self.state is None else self.state * last.exp()[..., None] + added

    def _asked(self, new: RecurrentInput) -> Tensor:
        return torch.cat((new.queries, new.keys), 1)

    def _spread(self, each: Tensor) -> Tensor:
        """Give each head its key head's numbers: (H, ...) from (G, ...)."""
        return each if self._group == 1 else each.repeat_interleave(self._group, 0)
