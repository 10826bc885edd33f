"""The open tile: a layer's recurrent state, and the rows since then as a block of attention.

Theory of operation
-------------------

A linear recurrence adds an outer product for each row, and decays:

    S_i = e^(g_i) S_(i-1) + k_i u_i^T,    o_i = S_i^T q_i

with u_i = v_i (Mamba 2: k is B, q is C, v is dt x), or under the gated delta rule (Yang et al.
2024, arXiv 2412.06464) u_i = b_i (v_i - e^(g_i) S_(i-1)^T k_i). A row cannot be taken out of S
again. So here S stands for the first `base` tokens only, a multiple of TILE, and the rows after it
are kept as they were made: k, u and G, the sum of g along the row's path since `base`. With "before
i" the open rows that row i follows:

    u_i = b_i (v_i - e^(G_i) S^T k_i - sum over j before i of e^(G_i - G_j) (k_i k_j) u_j)
    o_i = e^(G_i) S^T q_i + sum over j before i, and i itself, of e^(G_i - G_j) (q_i k_j) u_j

    rows       | in S      | open: n rows             | new: m rows |
    tokens     0          base                      length          length + m

Going back is forgetting rows, and a tree is a mask, as with keys and values. New u depend on each
other in a triangle, which is solved. When `base` is far enough behind, the first TILE open rows are
*closed*: added to S. That does not change u, and takes G of the last closed row off the others.

Letters: H heads, G key heads (H / G heads share one), K and V the widths of keys and values.

What must hold: G_i - G_j is at most 0 for rows before i; for others it may be anything, so that
they are hidden before the exponential. All is computed in float32 or more. Tiles never change: a
forward makes new ones, and if it fails or a row is rejected, the old ones are still there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

TILE = 64
"""How many rows are closed at once: as many as the library's kernels take for a chunk."""


@dataclass(frozen=True, slots=True)
class RecurrentInput:
    """What a layer makes of m new rows.

    Attributes:
        queries, keys: (G, m, K).
        values: (H, m, V).
        log_decays: (H, m); at most 0.
        strengths: (H, m) b of the delta rule; None: the values are added as they are.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    log_decays: Tensor
    strengths: Tensor | None = None

    def part(self, start: int, end: int) -> RecurrentInput:
        """Return some of the rows."""
        return RecurrentInput(
            self.queries[:, start:end],
            self.keys[:, start:end],
            self.values[:, start:end],
            self.log_decays[:, start:end],
            None if self.strengths is None else self.strengths[:, start:end],
        )


class Path:
    """Which rows m new rows follow, among n open ones and themselves.

    Attributes:
        sees: (m, n + m) bool; a row sees itself.
    """

    def __init__(self, sees: Tensor, *, open_count: int) -> None:
        count = len(sees)
        self.sees = sees
        self._new = sees[:, open_count:].float()
        places = torch.arange(1, open_count + 1, device=sees.device)
        # The open row that comes before the new ones on each path: its place, plus 1; 0: none.
        before = (sees[:, :open_count] * places).amax(1) if open_count else places.new_zeros(count)
        self._before = before

    def decays(self, open_decays: Tensor, log_decays: Tensor) -> Tensor:
        """Sum up log decays along each new row's path: (H, m) from (H, n) and (H, m)."""
        started = torch.nn.functional.pad(open_decays, (1, 0)).index_select(1, self._before)
        return started + log_decays @ self._new.to(log_decays).T


class OpenTile:
    """A layer's part of a sequence.

    Attributes:
        state: (H, K, V) after `base` tokens; None: zeros.
        keys: (G, n, K) of the open rows.
        updates: (H, n, V), u of them.
        decays: (H, n), G of them.
    """

    most_states = 1

    def __init__(
        self, state: Tensor | None, *, keys: Tensor, updates: Tensor, decays: Tensor
    ) -> None:
        self.state, self.keys, self.updates, self.decays = state, keys, updates, decays

    @classmethod
    def empty(cls, like: RecurrentInput) -> OpenTile:
        """Return the tile of no rows, for rows such as these."""
        return cls(
            None, keys=like.keys[:, :0], updates=like.values[:, :0], decays=like.log_decays[:, :0]
        )

    @property
    def open_count(self) -> int:
        """How many rows are open: n."""
        return self.keys.shape[1]

    @property
    def group(self) -> int:
        """How many heads share a key head."""
        return self.updates.shape[0] // self.keys.shape[0]

    def after(self, new: RecurrentInput, path: Path) -> tuple[Tensor, OpenTile]:
        """Return the outputs of new rows, (H, m, V), and the tile with them."""
        count = self.open_count
        decays = path.decays(self.decays, new.log_decays)
        all_decays = torch.cat((self.decays, decays), 1)
        keys = torch.cat((self.keys, new.keys), 1)
        faded = decays[:, :, None] - all_decays[:, None]
        faded = faded.masked_fill(~path.sees, -torch.inf).exp()
        updates = new.values
        if new.strengths is not None:
            likeness = self._spread(new.keys @ keys.transpose(1, 2)) * faded
            likeness *= new.strengths[:, :, None]
            known = self._of_state(new.keys, decays)
            missing = new.values if known is None else new.values - known
            missing = missing * new.strengths[..., None] - likeness[:, :, :count] @ self.updates
            updates = missing
            if missing.shape[1] > 1:
                updates = torch.linalg.solve_triangular(
                    likeness[:, :, count:], missing, upper=False, unitriangular=True
                )
        all_updates = torch.cat((self.updates, updates), 1)
        weights = self._spread(new.queries @ keys.transpose(1, 2)) * faded
        seen = weights @ all_updates
        known = self._of_state(new.queries, decays)
        outputs = seen if known is None else seen + known
        return outputs, OpenTile(self.state, keys=keys, updates=all_updates, decays=all_decays)

    def closed(self, count: int) -> OpenTile:
        """Return the tile with its first rows, one or more, added to its state."""
        last = self.decays[:, count - 1 : count]
        keys, updates = self._spread(self.keys[:, :count]), self.updates[:, :count]
        added = (keys * (last - self.decays[:, :count]).exp()[..., None]).transpose(1, 2) @ updates
        state = added if self.state is None else self.state * last.exp()[..., None] + added
        return OpenTile(
            state,
            keys=self.keys[:, count:].clone(),
            updates=self.updates[:, count:].clone(),
            decays=self.decays[:, count:] - last,
        )

    def only(self, rows: Sequence[int] | slice) -> OpenTile:
        """Return the tile with some of its open rows."""
        index = rows if isinstance(rows, slice) else [*rows]
        return OpenTile(
            self.state,
            keys=self.keys[:, index],
            updates=self.updates[:, index],
            decays=self.decays[:, index],
        )

    def _spread(self, each: Tensor) -> Tensor:
        """Give each head its key head's numbers: (H, ...) from (G, ...)."""
        return each if self.group == 1 else each.repeat_interleave(self.group, 0)

    def _of_state(self, queries: Tensor, decays: Tensor) -> Tensor | None:
        """Return what the state says to queries, (G, m, K), faded: (H, m, V); None: nothing."""
        if self.state is None:
            return None
        return (self._spread(queries) @ self.state) * decays.exp()[..., None]
