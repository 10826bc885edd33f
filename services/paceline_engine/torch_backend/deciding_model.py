"""Any decoder-only Hugging Face model: rows and decisions for the items of many sequences.

The worker calls `run(items)`; `ModelBackend.run` does the same for every model and calls back here:

    run(items)
      _feed(item)       which rows a text needs: the prefix's missing tokens, and the proposal
      _make_room(feed)  buffers for these rows; OverloadedError harms no other sequence
      _forward(feeds)   one forward for all rows of all feeds --> logits of the scored rows
      _decide           tokens, verdicts or drafts from these logits (deciding/decisions.py)

`computed_model.py` makes room and computes. Here are the rows of an item, and its decisions.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline_contract.proposal import NOTHING, Proposal
from paceline_engine.deciding.decisions import choose_next, draft_from, judge_by, rank_from
from paceline_engine.deciding.row_reading import RowsTask
from paceline_engine.terms.items import Draft, Judge, Judgement, Outcome
from paceline_engine.torch_backend.computed_model import ComputedModel
from paceline_engine.torch_backend.device import on_device
from paceline_engine.torch_backend.recurrent.stepped_text import SteppedText

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline_contract.sampling import Grammar
    from paceline_engine.model_backend import Feed
    from paceline_engine.terms.backend import Interrupt
    from paceline_engine.terms.draft_tree import Ranked
    from paceline_engine.terms.items import Item


class DecidingModel(ComputedModel):
    """A computed model whose logits decide: see `ComputedModel`."""

    def run(
        self, items: Sequence[Item], interrupt: Interrupt, *, row_limit: int | None = None
    ) -> list[Outcome | Exception]:
        """Do a step of each item: see `Backend.run`."""
        limit = row_limit if self.cuts_prompts else None
        # Sequences of ended sessions are kept, and nobody shapes them any more.
        self.shapers.forget_ended()
        cut = [self.shapers.within_grammar(item) for item in items]
        try:
            answers = super().run([item for item, _ in cut], interrupt, row_limit=limit)
            if self.own_guesses is not None:
                self.own_guesses.add_to(answers, [item for item, _ in cut])
            return [
                self.shapers.complete(answer, *of) for answer, of in zip(answers, cut, strict=True)
            ]
        finally:
            if self.own_guesses is not None:
                self.own_guesses.end_forward()

    @on_device()
    def _feed(self, item: Item, row_limit: int | None) -> Feed:
        # This moves a tree's accepted path to the sequence's end.
        feed = super()._feed(item, row_limit)
        feed.lora = item.spec.lora
        if self.own_guesses is None:
            feed.proposes = None  # what a grammar forces takes no rows
        else:
            self.own_guesses.mark_tree(feed, item)
        if isinstance(feed.cache, SteppedText):
            feed.cache.begins_item = not item.found_count
            task = item.task
            if isinstance(task, Judge) and not (task.score or isinstance(task, RowsTask)):
                feed.accepts = partial(self._accepts, item, task)
        return feed

    def _accepts(self, item: Item, task: Judge, scores: Sequence[Tensor]) -> bool:
        """Whether a proposal's next token is accepted, by the scores of the rows so far."""
        count = len(scores)
        # The row after it does not matter yet.
        rows = self._of_known_tokens(torch.stack([*scores, scores[-1]]))
        asked = replace(task.only(range(count)), logprobs=False, top_logprobs=0)
        return len(self._judge(rows, asked, item=item).accepted_path) == count

    @property
    def _token_ids(self) -> Tensor | None:
        """What the logits' columns stand for, if the head scores some tokens only."""
        return None if self.draft_head is None else self.draft_head.token_ids

    @on_device()
    def _choose_together(self, asked: Sequence[tuple[Item, Feed, Any]]) -> Mapping[Item, int]:
        rows = [
            (item, scores)
            for item, feed, scores in asked
            if item.chooses_next and feed.scored_count and isinstance(scores, Tensor)
        ]
        return choose_next(rows, token_ids=self._token_ids) if len(rows) > 1 else {}

    @on_device()
    def _judge(self, scores: Tensor, task: Judge, *, item: Item) -> Judgement:
        scores = self._of_all_tokens(scores)
        spec, position = item.spec, len(item.prefix)
        shaper = None if task.score else self.shapers.of(item)
        if shaper is None:
            return judge_by(scores, task, spec=spec, position=position)
        shaped = shaper.shape(scores, item.prefix, task.proposal)
        judgement = judge_by(shaped, task, spec=spec, position=position, told=scores)
        shaper.check([0, *(index + 1 for index in judgement.accepted_path)])
        return judgement

    @on_device()
    def _draft(self, scores: Tensor, item: Item) -> Proposal:
        spec, position = item.spec, len(item.prefix)
        shaper = self.shapers.of(item)
        if shaper is None:
            return draft_from(scores, spec=spec, position=position, token_ids=self._token_ids)
        shaped = shaper.shape(self._of_all_tokens(scores), item.prefix, NOTHING)
        return draft_from(shaped, spec=spec, position=position)

    @on_device()
    def _rank(self, scores: Tensor, item: Item) -> list[Ranked]:
        assert isinstance(item.task, Draft)
        spec, positions, count = item.spec, item.scored_positions, item.task.width
        shaper = self.shapers.of(item)
        if shaper is None:
            own = self._token_ids
            return rank_from(scores, spec=spec, positions=positions, count=count, token_ids=own)
        found, due = item.draft_tree.found, item.draft_tree.due if item.block else ()
        shaped = shaper.shape_ends(self._of_all_tokens(scores), item.prefix, found, due)
        return rank_from(shaped, spec=spec, positions=positions, count=count)

    def _of_all_tokens(self, scores: Tensor) -> Tensor:
        """Return logits of the whole vocabulary, from those of the tokens that are scored."""
        return scores if self.draft_head is None else self.draft_head.widen(scores)

    def forced(self, item: Item, beyond: Sequence[int] = (), *, most: int) -> Proposal:
        """Return the tokens that a grammar forces: see `Backend.forced`."""
        return self.shapers.forced(item, beyond, most=most)

    def knows_grammar(self, grammar: Grammar) -> bool:
        """Whether a grammar is compiled already."""
        return self.shapers.grammars is not None and self.shapers.grammars.knows(grammar)

    def compile_grammar(self, grammar: Grammar) -> None:
        """Compile a grammar: see `Backend.compile_grammar`."""
        if self.shapers.grammars is None:
            super().compile_grammar(grammar)
        else:
            self.shapers.grammars.compile(grammar)
