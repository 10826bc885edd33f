"""A target's own guesses, made with an adapter beside the rows that decide.

The deciding row is known only with the verdict. So Medusa heads guess after the verdict, from that
row alone, for all sequences of a forward at once. Streams are computed in the forward, beside each
row that may decide (`upper_rows.py`). If there are too many such rows, or if the library computes
the layers, streams also wait for the verdict. They then go through the upper layers by themselves,
which reads these layers' weights a second time.

Letters: R sequences, J guesses of each (the reach, gamma), E the model's width, V the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline_engine.deciding.decisions import rank_from
from paceline_engine.deciding.sampling import noisy_scores
from paceline_engine.terms.backend import ModelLoadError
from paceline_engine.terms.rank_paths import (
    check_tree,
    likeliest_comb,
    likeliest_tree,
    propose,
    prune_by_threshold,
    rank_counts,
)
from paceline_engine.terms.validation import MOST_TREE_TOKENS
from paceline_engine.torch_backend.adapters.card import MOST_REACH, model_fingerprint
from paceline_engine.torch_backend.adapters.eagle import EagleHead
from paceline_engine.torch_backend.adapters.files import load_adapter
from paceline_engine.torch_backend.adapters.medusa import MedusaHeads
from paceline_engine.torch_backend.adapters.streams import SeenTokens, Streams
from paceline_engine.torch_backend.stream_rows import fuse_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from paceline_contract.proposal import Proposal
    from paceline_engine.model_files.files import ModelFiles
    from paceline_engine.terms.calls import SessionSpec
    from paceline_engine.torch_backend.adapters.files import LoadedAdapter
    from paceline_engine.torch_backend.key_values import KeyValues
    from paceline_engine.torch_backend.stream_rows import StreamWeights

MOST_BESIDE = 16
"""With more guesses in a forward, streams cost less after the verdict than beside all rows."""


def load_for(
    files: ModelFiles, model: Any, directory: Path, *, guesses: int | None = None
) -> LoadedAdapter:
    """Load an adapter for a model that was loaded from files.

    Cost: reads the model's weights, about a second per gigabyte; its fingerprint needs that, too.

    Args:
        guesses: How many to make after a verdict: the likeliest, by the hit rates on the card;
            None: the card's tree.

    Raises:
        ModelLoadError: it is damaged, for another model, or of another version; or its card lacks
            hit rates that are needed.
    """
    loaded = load_adapter(directory, model=model, fingerprint=model_fingerprint(files))
    if guesses is None:
        return loaded
    if isinstance(loaded.module, EagleHead) and "hit_rates" not in loaded.card.training:
        chain = tuple((0,) * depth for depth in range(1, min(guesses, MOST_REACH) + 1))
        return replace(loaded, card=replace(loaded.card, tree=chain))
    try:
        # What follows a runner-up is another token's of a head that reads its own guesses.
        likeliest = likeliest_comb if isinstance(loaded.module, EagleHead) else likeliest_tree
        tree = likeliest(loaded.card.training["hit_rates"], node_count=guesses)
        check_tree(tree, reach=loaded.card.reach, most_ranks=MOST_TREE_TOKENS)
    except (KeyError, TypeError, ValueError):
        tree = ()
    if not tree:
        raise ModelLoadError(
            f"adapter {str(directory)!r} cannot choose {guesses} guesses: its card has no hit rates"
            f" of {loaded.card.reach} places"
        )
    return replace(loaded, card=replace(loaded.card, tree=tree))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecidedRow:
    """The row that decided a sequence's next token.

    Attributes:
        text: The row sees the first tokens of this sequence.
        length: How many tokens it sees, itself included.
        next_token: The token that it decided.
        read: (E,) the adapter's input of the row; or (J, E) the last layer's output of its streams;
            None for a head that keeps features.
        spec: How the sequence's tokens are chosen.
    """

    text: KeyValues
    length: int
    next_token: int
    read: Tensor | None
    spec: SessionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class FedTree:
    """A tree in a forward whose upper layers are still to be computed.

    Attributes:
        tree: The tree's tokens.
        position: The position of the token after the sequence.
        entering: (T + 1, E) the upper layers' input in the sequence's last row and the tree's rows.
        spec: How the sequence's tokens are chosen.
    """

    tree: Proposal
    position: int
    entering: Tensor
    spec: SessionSpec


class SelfDrafter:
    """An adapter beside a loaded model.

    Args:
        model: The one that the adapter was loaded for.
        takes_trees: Whether the model judges trees. If not, only the best guesses are proposed.
        prune_below: A guess is dropped if its probability after its parent, by the early exit,
            is below this; 0: no guess is dropped.
        goes_along: Whether the model is computed by `FusedLlama`, in any shapes: then streams
            can be rows of its forwards.

    Raises:
        ModelLoadError: its tree has no guesses that can be judged, or too many.

    Attributes:
        depth: The most tokens of a path that it proposes.
        kind: The adapter's kind.
        read_at: The layer whose input it reads; the number of layers: the head's input.
        prunes: Whether it prunes trees.
        stream_weights: The weights of streams in the model's own forward; None: no streams there.
        most_beside: The most guesses of a forward that has streams.
    """

    def __init__(
        self,
        adapter: LoadedAdapter,
        model: Any,
        *,
        takes_trees: bool,
        prune_below: float,
        goes_along: bool,
    ) -> None:
        self.kind = adapter.card.kind
        assert not isinstance(adapter.module, EagleHead), "see ChainDrafter"
        self._adapter = adapter.module
        self._model = model
        tree = adapter.card.tree
        self._paths = tree if takes_trees else tuple(path for path in tree if not any(path))
        if not 0 < len(self._paths) <= MOST_TREE_TOKENS:
            raise ModelLoadError(
                f"the adapter's card has a tree of {len(self._paths)} guesses, which is not in"
                f" [1, {MOST_TREE_TOKENS}]"
            )
        self._widths = rank_counts(self._paths)
        self.depth = len(self._widths)
        self.read_at = model.config.num_hidden_layers - adapter.module.upper_layers
        self._prune_below = prune_below
        self.prunes = takes_trees and prune_below > 0 and adapter.card.exit_rank > 0
        self.most_beside = MOST_BESIDE
        self.stream_weights: StreamWeights | None = None
        if goes_along and isinstance(adapter.module, Streams):
            self.stream_weights = fuse_weights(adapter.module, first_layer=self.read_at)

    @property
    def changes_rows(self) -> bool:
        """Whether a forward has other rows in its upper layers."""
        return self.prunes or self.stream_weights is not None

    def most_streams(self, *, scored_count: int) -> int:
        """Return how many streams may be computed beside a sequence's scored rows."""
        if self.stream_weights is None:
            return 0
        return self.depth * min(scored_count, 1 + self.most_beside)

    def begin_streams(self, entering: Tensor) -> Tensor:
        """Return the streams beside some rows before the upper layers: (S * J, E) from (S, E)."""
        assert isinstance(self._adapter, Streams), "only streams adapters have streams"
        return self._adapter.begin(entering)[:, : self.depth].flatten(0, 1)

    def propose(self, rows: Sequence[DecidedRow], *, vocabulary_size: int) -> list[Proposal]:
        """Guess what follows each row's next token: the tree of guesses, filled with tokens.

        Guesses are ordered as a drafter's alternatives are: with the noise that the target has at
        their positions (`rank_from`).

        Args:
            vocabulary_size: The tokens that can be chosen: the head may have more rows.
        """
        logits = torch.stack([*self._guess(rows)], 1)[..., :vocabulary_size]
        return [
            self._into_tree(own, spec=row.spec, position=row.length)
            for row, own in zip(rows, logits, strict=True)
        ]

    def prune(self, trees: Sequence[FedTree], *, vocabulary_size: int) -> list[tuple[int, ...]]:
        """Return the tokens of each tree to go on with; only if it prunes.

        A token's probability is the early exit's, with the target's own noise at its position, as
        in the order of guesses.
        """
        if not trees:
            return []
        assert isinstance(self._adapter, Streams), "only streams adapters have an early exit"
        parents = [sorted({*each.tree.parents}) for each in trees]
        entering = torch.cat(
            [each.entering[rows] for each, rows in zip(trees, parents, strict=True)]
        )
        logits = self._adapter.exit_early(self._model, entering)[:, :vocabulary_size]
        own = torch.split(logits, [len(rows) for rows in parents])
        return [
            prune_by_threshold(
                each.tree.parents, _likelihoods(each, rows, said), threshold=self._prune_below
            )
            for each, rows, said in zip(trees, parents, own, strict=True)
        ]

    def _into_tree(self, logits: Tensor, *, spec: SessionSpec, position: int) -> Proposal:
        """Choose guesses by logits (J, V); `position` is that of the row's next token."""
        ranked = rank_from(
            logits[: self.depth],
            spec=spec,
            positions=range(position + 1, position + 1 + self.depth),
            count=max(self._widths),
        )
        return propose(self._paths, [[token for token, _ in own] for own in ranked])

    def _guess(self, rows: Sequence[DecidedRow]) -> Iterator[Tensor]:
        """Yield the logits of each guess: (R, V)."""
        read = torch.stack([row.read for row in rows if row.read is not None])
        if read.ndim == 3:  # streams that went along: (R, J, E)
            logits: Tensor = self._model.lm_head(self._model.model.norm(read))
            return iter(logits.unbind(1))
        if isinstance(self._adapter, MedusaHeads):
            return self._adapter.guess(read)
        positions = torch.tensor([row.length - 1 for row in rows]).to(read.device)
        seen = [self._seen(row) for row in rows]
        return self._adapter.guess(self._model, read, positions=positions, seen=seen)

    def _seen(self, row: DecidedRow) -> SeenTokens:
        keys, values = row.text.until(row.length)
        return SeenTokens(keys[self.read_at :], values[self.read_at :])


def _likelihoods(fed: FedTree, rows: Sequence[int], logits: Tensor) -> list[float]:
    """Return how likely each of a tree's tokens is after its parent.

    Args:
        rows: The rows that have tokens after them: 0 the sequence's last, i + 1 the i-th token's.
        logits: The logits of these rows.
    """
    depths = [-1, *fed.tree.depths()]
    scores = noisy_scores(
        logits,
        positions=[fed.position + depths[row] + 1 for row in rows],
        parameters=fed.spec.sampling,
        seed=fed.spec.seed,
    )
    places = torch.tensor([rows.index(parent) for parent in fed.tree.parents])
    token_ids = torch.tensor(fed.tree.token_ids)
    shares: list[float] = scores.softmax(-1)[places, token_ids].tolist()
    return shares
