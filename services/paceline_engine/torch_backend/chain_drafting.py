"""A target's own guesses with an EAGLE head: features kept with a sequence, and steps of guesses.

Theory of operation
-------------------

The head needs the features of all tokens of a sequence, not only of the row that decides
(`adapters/eagle.py`). So every forward keeps the features of its rows, whether guesses are asked
for or not. They lie where the rows' keys and values lie, in further layers of the same buffers:

    layers of a sequence's buffers | 0 .. N - 1      | N                | N + 1 ..        |
                                   | the model's     | the head's own   | features, cut   |
                                   | keys and values | keys and values  | into pieces     |
    written                        | by forwards     | before guesses   | by forwards     |

Therefore they are copied, moved, cut and paid for as keys and values are, and a tree's accepted
path takes its features along.

The head's own keys and values are made late: row p reads the features of token p and the token
p + 1, which is certain only when the verdict is there. `_known` has the tokens for which they were
made. Before guesses, the rows from the first difference on are made again, from features:

    tokens        | t0 | t1 | t2 | t3 | next |
    known         | t0 | t1 | x               |     after t1 came x
    rows 0 ..     | ok | anew ...        |          row 1 has read x

What a forward writes over, and what a path's adoption moves, lies at or behind the sequence's end
before that forward. So each forward cuts `_known` there (`begin`).

A module inside the model's checkpoint (`adapters/mtp_head.py`) is such a head.

Rows of guesses are never kept: their keys and values live until the proposal is made
(`growing_guesses.py`).

Letters: R sequences, E the model's width, N the model's layers.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from paceline_engine.deciding.decisions import rank_from
from paceline_engine.terms.backend import ModelLoadError
from paceline_engine.terms.model_cache import common_length
from paceline_engine.terms.rank_paths import rank_counts
from paceline_engine.terms.validation import MOST_TREE_TOKENS
from paceline_engine.torch_backend.feature_rows import FeatureRows
from paceline_engine.torch_backend.growing_guesses import Chain, ConfidenceTree, GrowthStep

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline_contract.proposal import Proposal
    from paceline_engine.terms.model_cache import ModelCache
    from paceline_engine.torch_backend.adapters.eagle import EagleHead
    from paceline_engine.torch_backend.adapters.files import LoadedAdapter
    from paceline_engine.torch_backend.adapters.mtp_files import LoadedModule
    from paceline_engine.torch_backend.adapters.mtp_head import MtpHead
    from paceline_engine.torch_backend.growing_guesses import Growing
    from paceline_engine.torch_backend.key_values import KeyValues
    from paceline_engine.torch_backend.kv_arena import KeyValueShape
    from paceline_engine.torch_backend.self_drafting import DecidedRow
    from paceline_engine.torch_backend.shared_rows import SharedRows


# With fewer guesses a chain is better: SpecForge's measurements with 6 and 8 guesses.
_LEAST_TREE = 16
# Of a tree, if nothing says how far its head learnt to guess: published heads learn 3 to 7 steps.
_TREE_DEPTH = 7
# Rows of a long prompt are made in parts, as its forward was: each takes memory several times.
_ROWS_AT_ONCE = 1024


def layers_beside(head: EagleHead | MtpHead, shape: KeyValueShape) -> int:
    """Return how many layers of a sequence's buffers the head takes.

    Raises:
        ModelLoadError: its keys and values are of another shape than the model's.
    """
    heads, key_width, value_width = head.state_shape
    if head.state_shape != (shape.heads, shape.key_width, shape.value_width):
        raise ModelLoadError(
            f"the head has {heads} key and value heads of width {key_width} and {value_width}, and"
            f" the model has {shape.heads} of width {shape.key_width} and {shape.value_width}: they"
            " must be the same"
        )
    return 1 + -(-head.width // (shape.heads * (shape.key_width + shape.value_width)))


class ChainDrafter:
    """An EAGLE head, or a checkpoint's module, beside a loaded model. Worker thread only.

    A proposal is a chain, with runners-up at each depth: what follows a runner-up is not computed.
    Where many guesses are asked for, it is a tree of those that the head is surest of.

    Args:
        adapter: With its card.
        head: The adapter's module.
        model: The one that the adapter was loaded for.
        first_layer: The first layer of a sequence's buffers that is the head's.
        vocabulary_size: The tokens that can be chosen: the model's head may have more rows.
        takes_trees: Whether the model judges trees. If not, only the best guesses are proposed.
        prune_below: A chain ends where the probability of all its guesses together is below
            this, and so does a path of a tree; 0: it does not.
        guesses: How many were asked for; None: those on the card. From 16 on they are a tree.

    Raises:
        ModelLoadError: its tree has no guesses that it can make, or too many; or it can guess
            no token that can be chosen.

    Attributes:
        depth: The most tokens of a path that it proposes.
        kind: The adapter's kind.
    """

    prunes = False

    def __init__(
        self,
        adapter: LoadedAdapter | LoadedModule,
        head: EagleHead | MtpHead,
        model: Any,
        *,
        first_layer: int,
        vocabulary_size: int,
        takes_trees: bool,
        prune_below: float,
        guesses: int | None = None,
    ) -> None:
        self.kind = adapter.card.kind
        self._head: Any = head
        self._model = model
        self._paths = tuple(
            path for path in adapter.card.tree if not any(path if not takes_trees else path[:-1])
        )
        if not 0 < len(self._paths) <= MOST_TREE_TOKENS:
            raise ModelLoadError(
                f"the adapter's card has a tree of {len(self._paths)} guesses that follow the best"
                f" ones, which is not in [1, {MOST_TREE_TOKENS}]"
            )
        token_ids = head.draft_token_ids  # they ascend
        self._token_ids = token_ids[: int((token_ids < vocabulary_size).sum())]
        if not len(self._token_ids):
            raise ModelLoadError("the head can guess no token that the model can choose")
        self._prune_below = prune_below
        self._widths = rank_counts(self._paths)
        self.depth = len(self._widths)
        self._tree_size: int | None = None
        if takes_trees and guesses is not None and guesses >= _LEAST_TREE:
            self._tree_size = guesses
            self.depth = adapter.card.most_steps or _TREE_DEPTH
        self._own_layer = first_layer
        self._known: WeakKeyDictionary[ModelCache, array[int]] = WeakKeyDictionary()

    def begin(self, texts: Sequence[KeyValues], rows: SharedRows) -> FeatureRows:
        """Begin a forward that appends rows to sequences: their features are kept."""
        self.forget_behind(texts)
        store = partial(rows.store_beside, first_layer=self._own_layer + 1)
        return FeatureRows(self._head, store=store)

    def forget_behind(self, texts: Sequence[KeyValues]) -> None:
        """Forget the rows that were made at and behind the sequences' ends: others come there."""
        for text in texts:
            if (known := self._known.get(text)) is not None:
                del known[text.length + 1 :]

    def propose(self, rows: Sequence[DecidedRow]) -> list[Proposal]:
        """Guess what follows each row's next token, a depth at a time.

        Guesses are ordered as a drafter's alternatives are: with the noise that the target has at
        their positions (`rank_from`).
        """
        feature = self._catch_up(rows)
        every = going = [self._begin(row) for row in rows]
        for step in range(self.depth):
            due = [row for each in going for row in each.due]
            read = self._head.read(self._model, _on([row.token for row in due], feature), feature)
            positions = [each.row.length - 1 + step for each in going for _ in each.due]
            # The first row's keys and values are the sequence's.
            seen = GrowthStep(going, own_layer=self._own_layer, keeps=step > 0)
            output = self._head.output(read, positions=_on(positions, feature), seen=seen)
            logits = self._head.score(self._model, output)[:, : len(self._token_ids)]
            sources = self._grow(going, logits, step=step)
            going = [each for each in going if each.due]
            if not going:
                break
            feature = self._head.carry(output)
            if sources != [*range(len(due))]:
                feature = feature[sources]
        return [each.proposal() for each in every]

    def _begin(self, row: DecidedRow) -> Growing:
        least = self._prune_below
        if self._tree_size is None:
            return Chain(row, self._paths, self._widths, least)
        return ConfidenceTree(row, self._tree_size, self.depth, least)

    def _grow(self, going: Sequence[Growing], logits: Tensor, *, step: int) -> list[int]:
        """Give each sequence the tokens that its due rows found; return who found the next due."""
        sources: list[int] = []
        begin = 0
        for each in going:
            count = len(each.due)
            ranked = rank_from(
                logits[begin : begin + count],
                spec=each.row.spec,
                positions=[each.row.length + 1 + step] * count,
                count=each.width,
                token_ids=self._token_ids,
            )
            sources.extend(begin + place for place in each.grow(ranked))
            begin += count
        return sources

    def _catch_up(self, rows: Sequence[DecidedRow]) -> Tensor:
        """Make the keys and values of all certain rows; return the last rows' features: (R, E)."""
        missing: list[_Missing] = []
        for row in rows:
            tokens = row.text.token_ids[: row.length]
            tokens.append(row.next_token)
            known = self._known.get(row.text, array("I"))
            start = min(max(0, common_length(known, tokens) - 1), row.length - 1)
            # What is made below is known only when it is there.
            self._known[row.text] = known[: start + 1]
            for begin in range(start, row.length, _ROWS_AT_ONCE):
                end = min(begin + _ROWS_AT_ONCE, row.length)
                missing.append(_Missing(row.text, begin, end, tokens))
        for part in _in_parts(missing):
            self._make(part)
        return torch.cat([self._features(row.text, row.length - 1, 1) for row in rows])

    def _make(self, missing: Sequence[_Missing]) -> None:
        """Make the keys and values of some rows."""
        counts = [it.end - it.begin for it in missing]
        features = torch.cat(
            [
                self._features(it.text, it.begin, count)
                for it, count in zip(missing, counts, strict=True)
            ]
        )
        following = [id_ for it in missing for id_ in it.tokens[it.begin + 1 : it.end + 1]]
        positions = [position for it in missing for position in range(it.begin, it.end)]
        read = self._head.read(self._model, _on(following, features), features)
        keys, values = self._head.keys_and_values(read, positions=_on(positions, features))
        parts = (torch.split(each, counts) for each in (keys, values))
        for it, *own in zip(missing, *parts, strict=True):
            kept = it.text.between(it.begin, it.end - it.begin)
            for layers, states in zip(kept, own, strict=True):
                layers[self._own_layer].copy_(states.transpose(0, 1))
            self._known[it.text] = it.tokens[: it.end + 1]

    def _features(self, text: KeyValues, start: int, count: int) -> Tensor:
        """Return the features of some rows: (count, E)."""
        keys, values = text.between(start, count)
        first = self._own_layer + 1
        parts = [
            each.transpose(0, 1).flatten(1)
            for pair in zip(keys[first:], values[first:], strict=True)
            for each in pair
        ]
        return torch.cat(parts, -1)[:, : self._head.width]


@dataclass(frozen=True, slots=True)
class _Missing:
    """Certain rows of a sequence whose keys and values are to be made: `begin` to `end`.

    Attributes:
        text: The sequence.
        begin: The first row.
        end: The row after the last one.
        tokens: The sequence's, with the next one that is decided.
    """

    text: KeyValues
    begin: int
    end: int
    tokens: array[int]


def _in_parts(missing: Sequence[_Missing]) -> Iterator[list[_Missing]]:
    """Yield rows together, up to `_ROWS_AT_ONCE`."""
    part: list[_Missing] = []
    count = 0
    for each in missing:
        own = each.end - each.begin
        if part and count + own > _ROWS_AT_ONCE:
            yield part
            part, count = [], 0
        part.append(each)
        count += own
    yield part


def _on(numbers: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(numbers).to(like.device, non_blocking=True)
