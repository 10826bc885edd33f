"""The guesses of a target with an adapter, and its state for them between forwards."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

from paceline.errors import PacelineError
from paceline_contract.proposal import NOTHING, Proposal
from paceline_engine.terms.items import Outcome
from paceline_engine.torch_backend.chain_drafting import ChainDrafter
from paceline_engine.torch_backend.device import on_device
from paceline_engine.torch_backend.self_drafting import DecidedRow
from paceline_engine.torch_backend.upper_rows import UpperRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline_engine.model_backend import Feed
    from paceline_engine.terms.items import Item, Judge, Judgement
    from paceline_engine.terms.model_cache import ModelCache
    from paceline_engine.torch_backend.decoders import Decoder
    from paceline_engine.torch_backend.key_values import KeyValues
    from paceline_engine.torch_backend.self_drafting import SelfDrafter
    from paceline_engine.torch_backend.shared_rows import SharedRows


class OwnGuesses:
    """A model's guesses beside the rows that decide. Worker thread only.

    A forward keeps the adapter's inputs of its scored rows (`compute`). After the decisions the
    guesses are added to the verdicts (`add_to`), and a sequence's next tree is compared with them
    (`mark_tree`).

    Args:
        vocabulary_size: How many tokens can be chosen; the head may have more rows.

    Attributes:
        drafter: Makes the guesses.
    """

    def __init__(self, drafter: SelfDrafter | ChainDrafter, *, vocabulary_size: int) -> None:
        self.drafter = drafter
        self._vocabulary_size = vocabulary_size
        self._read: dict[ModelCache, Tensor] = {}
        self._proposed: WeakKeyDictionary[ModelCache, Proposal] = WeakKeyDictionary()

    def mark_tree(self, feed: Feed, item: Item) -> None:
        """Mark a tree that the model itself proposed, or a part of such a tree, to be pruned."""
        if feed.proposes is None or not self.drafter.prunes or not item.block:
            return
        feed.is_own = _proposal_of(item).is_part_of(self._proposed.get(item.cache, NOTHING))
        if feed.is_own:
            feed.parents = feed.parents or range(len(item.block))  # a chain is also a tree

    def reads(self, feeds: Sequence[Feed]) -> bool:
        """Whether it has to be told of a forward: guesses are asked for, or features are kept."""
        return isinstance(self.drafter, ChainDrafter) or any(feed.proposes for feed in feeds)

    def replays(self, feeds: Sequence[Feed]) -> bool:
        """Whether a captured forward does all that it needs: one that keeps features does."""
        return isinstance(self.drafter, ChainDrafter) or not self.reads(feeds)

    def begin_replay(self, feeds: Sequence[Feed]) -> None:
        """Learn that a captured forward appends rows to sequences."""
        if isinstance(self.drafter, ChainDrafter):
            self.drafter.forget_behind([_text_of(feed) for feed in feeds])

    def most_streams(self, feed: Feed) -> int:
        """Return how many streams may be computed beside an item's rows."""
        if feed.proposes is None or isinstance(self.drafter, ChainDrafter):
            return 0
        return self.drafter.most_streams(scored_count=feed.scored_count)

    def compute(
        self, decoder: Decoder, feeds: Sequence[Feed], rows: SharedRows, *, together: bool
    ) -> Tensor:
        """Compute rows with the adapter's changes, and keep its inputs of the scored rows."""
        if isinstance(self.drafter, ChainDrafter):
            rows.features = self.drafter.begin([_text_of(feed) for feed in feeds], rows)
            try:
                return decoder(rows)
            finally:
                rows.features = None  # a cycle of references, as below
        size = self._vocabulary_size
        upper = UpperRows(self.drafter, feeds, rows, vocabulary_size=size, together=together)
        rows.read_at = self.drafter.read_at
        rows.change = upper if self.drafter.changes_rows else None
        try:
            logits = decoder(rows)
            self._read.update(zip([feed.cache for feed in feeds], upper.read(), strict=True))
            return logits
        finally:
            rows.change = None  # a cycle of references would keep all keys and values

    def add_to(self, answers: list[Outcome | Exception], items: Sequence[Item]) -> None:
        """Add guesses to the judgements of tasks that ask for them."""
        asked = {
            place: answer.judgement
            for place, (item, answer) in enumerate(zip(items, answers, strict=True))
            if item.proposes and isinstance(answer, Outcome) and answer.judgement is not None
        }
        if not asked:
            return
        try:
            proposals = self._propose([(items[place], each) for place, each in asked.items()])
        except PacelineError:
            # The verdicts are right without guesses, so the calls must not fail.
            return
        for (place, judgement), proposal in zip(asked.items(), proposals, strict=True):
            self._proposed[items[place].cache] = proposal
            with_proposal = replace(judgement, proposal=proposal)
            answers[place] = replace(cast("Outcome", answers[place]), judgement=with_proposal)

    def end_forward(self) -> None:
        """Forget the adapter's inputs of the last forward."""
        self._read.clear()

    @on_device()
    def _propose(self, decided: Sequence[tuple[Item, Judgement]]) -> list[Proposal]:
        rows = []
        for item, judgement in decided:
            path, text = judgement.accepted_path, cast("KeyValues", item.cache)
            read = None
            if text.tree:
                # The path's indices among the tokens that were not pruned.
                path = text.tree.path_of(_proposal_of(item).along(path))
                # Then the row's tokens lie in one piece; the next call would do this anyway.
                text.adopt(path)
            if not isinstance(self.drafter, ChainDrafter):
                read = self._read[text][path[-1] + 1 if path else 0]
            rows.append(
                DecidedRow(
                    text=text,
                    length=len(item.prefix) + len(path),
                    next_token=judgement.next_token,
                    read=read,
                    spec=item.spec,
                )
            )
        if isinstance(self.drafter, ChainDrafter):
            return self.drafter.propose(rows)
        return self.drafter.propose(rows, vocabulary_size=self._vocabulary_size)


def _text_of(feed: Feed) -> KeyValues:
    return cast("KeyValues", feed.cache)


def _proposal_of(item: Item) -> Proposal:
    return cast("Judge", item.task).proposal
