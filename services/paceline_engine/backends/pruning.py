"""Guesses that a forward drops before its upper layers: those that its early exit thinks unlikely.

Speculative Streaming, parallel tree pruning. Lower layers compute all of a tree. What they make of
a row says, by the adapter's early exit, how likely each guess after it is; upper layers and the
head compute the likely ones. Afterwards the text is as if only these had been proposed.

    rows               | text |            tree             |
    lower layers       | text | 0 | 1 | 2 | 3 | 4 | 5 |
    pruned to 0, 1, 4  | text | 0 | 1 | 4 |                  (their keys and values are moved up)
    upper layers       | text | 0 | 1 | 4 |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from paceline_engine.backends.attention import FewerRows, SharedRows
from paceline_engine.backends.self_drafting import FedTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_engine.backends.base import Feed
    from paceline_engine.backends.key_values import KeyValues
    from paceline_engine.backends.self_drafting import SelfDrafter

__all__ = ["Pruning"]


class Pruning:
    """What a forward asks before its upper layers: which rows to go on with.

    Attributes:
        rows: With what it went on in the end.

    Cost: the head over the rows that have guesses after them. On CUDA the host waits for the lower
    layers.
    """

    def __init__(
        self,
        drafter: SelfDrafter,
        feeds: Sequence[Feed],
        rows: SharedRows,
        *,
        vocabulary_size: int,
        together: bool,
    ) -> None:
        """Build it for one forward.

        Args:
            drafter: That prunes.
            feeds: Of the forward. Trees that the model proposed itself are pruned.
            rows: Theirs.
            vocabulary_size: The tokens that can be chosen: the head may have more rows.
            together: See `SharedRows`.
        """
        self.rows = rows
        self._drafter = drafter
        self._feeds = feeds
        self._vocabulary_size = vocabulary_size
        self._together = together

    def __call__(self, hidden: Tensor) -> FewerRows | None:
        """Prune the trees, given what enters the upper layers: (T, E)."""
        kept = self._kept(hidden[self.rows.scored])
        if all(len(own) == len(self._feeds[place].parents) for place, own in kept.items()):
            return None
        places: list[int] = []
        end = 0
        for place, feed in enumerate(self._feeds):
            start, end = end, end + len(feed.token_ids)
            if place not in kept:
                places.extend(range(start, end))
                continue
            tree_start = start + feed.text_count
            places.extend(range(start, tree_start))
            places.extend(tree_start + index for index in kept[place])
            self._prune(feed, kept[place])
        self.rows = self._rows_left()
        return FewerRows(self.rows, torch.tensor(places).to(hidden.device))

    def _kept(self, entering: Tensor) -> dict[int, tuple[int, ...]]:
        """Say by a feed's place which of its tree's tokens to keep, given the scored rows."""
        own = torch.split(entering, [feed.scored_count for feed in self._feeds])
        trees = {
            place: FedTree(
                feed.tree, feed.cache.length + feed.text_count, own[place], feed.proposes
            )
            for place, feed in enumerate(self._feeds)
            if feed.proposes is not None and feed.is_own and feed.parents
        }
        kept = self._drafter.prune([*trees.values()], vocabulary_size=self._vocabulary_size)
        return dict(zip(trees, kept, strict=True))

    def _prune(self, feed: Feed, kept: Sequence[int]) -> None:
        text = cast("KeyValues", feed.cache)
        text.close_up(kept, start=text.length + feed.text_count, layers=self._drafter.read_at)
        feed.prune(kept)

    def _rows_left(self) -> SharedRows:
        rows = SharedRows(
            [cast("KeyValues", feed.cache) for feed in self._feeds],
            [feed.token_ids for feed in self._feeds],
            [feed.scored_count for feed in self._feeds],
            parents=[feed.parents for feed in self._feeds],
            together=self._together,
        )
        rows.read_at = self._drafter.read_at
        return rows
