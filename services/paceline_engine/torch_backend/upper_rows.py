"""The rows of a forward in its upper layers: fewer guesses, and streams beside the rows.

Speculative Streaming, parallel tree pruning and multi-stream attention. Lower layers compute all
tokens of a tree. From their output the adapter's early exit computes the probability of each guess;
the upper layers and the head compute only the likely guesses. Afterwards the sequence is as if only
these had been proposed.

Each row that may decide has its streams beside it, as a chain behind its node in the tree. So the
tokens that streams see, and their positions, follow from a tree, as for guesses. Their keys and
values lie behind the tree's rows, and do not count after the forward.

    rows               | seq  |            tree             |
    lower layers       | seq  | 0 | 1 | 2 | 3 | 4 | 5 |
    pruned to 0, 1, 4  | seq  | 0 | 1 | 4 |                  (their keys and values are moved up)
    upper layers       | seq  | 0 | 1 | 4 | the last row's streams | 0's | 1's | 4's |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from paceline_engine.torch_backend.self_drafting import FedTree
from paceline_engine.torch_backend.shared_rows import OtherRows, SharedRows
from paceline_engine.torch_backend.stream_rows import StreamRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_engine.model_backend import Feed
    from paceline_engine.torch_backend.key_values import KeyValues
    from paceline_engine.torch_backend.self_drafting import SelfDrafter


class UpperRows:
    """Chooses the rows of a forward before its upper layers (`ForwardRows.change`).

    Cost: if it prunes, the head over the rows that have guesses after them; on CUDA the host then
    waits for the lower layers.
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
            drafter: Prunes, and has streams.
            feeds: The forward's feeds. Trees that the model proposed itself are pruned.
            rows: The rows of these feeds.
            vocabulary_size: How many tokens can be chosen; the head may have more rows.
            together: See `SharedRows`.
        """
        self._drafter = drafter
        self._feeds = feeds
        self._rows = rows
        self._vocabulary_size = vocabulary_size
        self._together = together
        self._stream_counts = [0] * len(feeds)

    def __call__(self, hidden: Tensor) -> OtherRows | None:
        """Return the rows to go on with, given the input of the upper layers: (T, E)."""
        kept = self._prune(hidden) if self._drafter.prunes else None
        self._stream_counts = self._count_streams()
        if kept is None and not any(self._stream_counts):
            return None
        self._rows = self._build_rows()
        hidden = hidden if kept is None else hidden[kept]
        return OtherRows(self._rows, self._with_streams(hidden))

    def read(self) -> Sequence[Tensor]:
        """Return for each feed the adapter's inputs of its S scored rows. After the forward.

        These are (S, E), or with streams beside them the streams' outputs, (S, J, E).
        """
        if self._rows.streams is None:
            counts = [feed.scored_count for feed in self._feeds]
            assert self._rows.read is not None, "a decoder keeps the input of `read_at`"
            return torch.split(self._rows.read[: sum(counts)], counts)
        read = self._rows.streams.read
        beside = read.view(-1, self._drafter.depth, read.shape[-1])
        counts = [count // self._drafter.depth for count in self._stream_counts]
        return torch.split(beside, counts)

    # --- fewer guesses ------------------------------------------------------------------------

    def _prune(self, hidden: Tensor) -> Tensor | None:
        """Drop unlikely guesses, and return the rows that are left; None: all rows."""
        kept = self._kept(hidden[self._rows.scored])
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
            text = _text_of(feed)
            text.close_up(
                kept[place],
                start=text.length + feed.text_count,
                layers=self._drafter.read_at,
            )
            feed.prune(kept[place])
        return torch.tensor(places).to(hidden.device)

    def _kept(self, entering: Tensor) -> dict[int, tuple[int, ...]]:
        """Return the tree's tokens to keep, by the feed's index, given the scored rows."""
        own = torch.split(entering, [feed.scored_count for feed in self._feeds])
        trees = {
            place: FedTree(
                tree=feed.tree,
                position=feed.cache.length + feed.text_count,
                entering=own[place],
                spec=feed.proposes,
            )
            for place, feed in enumerate(self._feeds)
            if feed.proposes is not None and feed.is_own and feed.parents
        }
        kept = self._drafter.prune([*trees.values()], vocabulary_size=self._vocabulary_size)
        return dict(zip(trees, kept, strict=True))

    # --- streams ------------------------------------------------------------------------------

    def _count_streams(self) -> list[int]:
        """Return how many streams each feed has beside its rows: all that it asks for, or none.

        Streams wait for the verdict (`SelfDrafter.propose`) if there are too many guesses, or if a
        sequence has no room for them.
        """
        none = [0] * len(self._feeds)
        if self._drafter.stream_weights is None:
            return none
        counts = [
            self._drafter.depth * feed.scored_count if feed.proposes is not None else 0
            for feed in self._feeds
        ]
        fits = all(
            _text_of(feed).room >= len(feed.token_ids) + count
            for feed, count in zip(self._feeds, counts, strict=True)
        )
        asked = [feed for feed in self._feeds if feed.proposes is not None]
        guess_count = sum(feed.scored_count - 1 for feed in asked)
        return counts if fits and guess_count <= self._drafter.most_beside else none

    def _with_streams(self, hidden: Tensor) -> Tensor:
        """Put each sequence's streams behind its rows: (T, E) from fewer rows."""
        if not any(self._stream_counts):
            return hidden
        parts: list[Tensor] = []
        own_rows = torch.split(hidden, [len(feed.token_ids) for feed in self._feeds])
        for feed, own, count in zip(self._feeds, own_rows, self._stream_counts, strict=True):
            parts.append(own)
            if count:
                parts.append(self._drafter.begin_streams(own[-feed.scored_count :]))
        return torch.cat(parts)

    # --- both ---------------------------------------------------------------------------------

    def _build_rows(self) -> SharedRows:
        counts = self._stream_counts
        rows = SharedRows(
            [_text_of(feed) for feed in self._feeds],
            [
                [*feed.token_ids, *[0] * count]  # streams are no tokens
                for feed, count in zip(self._feeds, counts, strict=True)
            ],
            [feed.scored_count for feed in self._feeds],
            parents=[
                _with_chains(feed, self._drafter.depth) if count else feed.parents
                for feed, count in zip(self._feeds, counts, strict=True)
            ],
            stream_counts=counts,
            together=self._together,
        )
        rows.read_at = self._drafter.read_at
        if any(counts):
            assert self._drafter.stream_weights is not None
            rows.streams = StreamRows(self._drafter.stream_weights, rows.stream_places)
        return rows


def _with_chains(feed: Feed, length: int) -> list[int]:
    """Return the parents of a feed's tree, and of a chain of streams after each scored row."""
    parents = [*(feed.parents or range(feed.scored_count - 1))]
    for row in range(feed.scored_count):  # 0: the sequence's last one, i + 1: the i-th token's
        parents.append(row)
        parents.extend(range(len(parents), len(parents) + length - 1))
    return parents


def _text_of(feed: Feed) -> KeyValues:
    return cast("KeyValues", feed.cache)
