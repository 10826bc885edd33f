"""A sequence at a model without sessions, queue or thread: for measuring the model alone."""

from __future__ import annotations

import threading
from array import array
from typing import TYPE_CHECKING

from paceline_contract.proposal import NOTHING, Proposal, SparseDistribution
from paceline_engine.terms.items import Draft, Item, Judge, Judgement, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline_engine.terms.backend import Backend, Interrupt
    from paceline_engine.terms.calls import SessionSpec
    from paceline_engine.terms.draft_tree import Ranked


class ModelText:
    """Drafts and judges in the caller's thread, a forward for each call but `draft_chain`.

    Attributes:
        cache: The sequence's state in the model.
        row_count: Token positions that the last forward computed.
        dropped_count: How many of them it did not compute to the end.
        interrupt: Set it to interrupt a forward.
    """

    def __init__(
        self, backend: Backend, spec: SessionSpec, *, interrupt: Interrupt | None = None
    ) -> None:
        self.cache = backend.new_cache(spec)
        self.row_count = self.dropped_count = 0
        self._backend = backend
        self._spec = spec
        self.interrupt = interrupt or threading.Event()

    def draft(self, prefix: Sequence[int]) -> Proposal:
        """Draft the token after a prefix of one token or more."""
        return self._run(prefix, Draft()).drafted

    def draft_chain(self, prefix: Sequence[int], *, count: int) -> list[int]:
        """Draft so many tokens, in as many forwards as the model needs."""
        item = Item(self.cache, self._spec, prefix=array("I", prefix), task=Draft(count))
        found: list[int] = []
        while len(found) < count:
            outcome = self._step(item)
            item.take(outcome)
            found += outcome.chain
        return found

    def rank(self, prefix: Sequence[int], *, width: int) -> Ranked:
        """Return the likeliest tokens after a prefix, as a draft of this width finds them."""
        outcome = self._run(prefix, Draft(width=width))
        tree = outcome.draft_tree
        assert tree is not None, "a draft of width 2 or more is a tree"
        return list(zip(tree.found.token_ids, tree.path_probabilities, strict=True))

    def judge(
        self,
        prefix: Sequence[int],
        token_ids: Sequence[int] = (),
        *,
        parents: Sequence[int] = (),
        distributions: Sequence[SparseDistribution] = (),
        logprobs: bool = False,
        propose: bool = False,
        top_logprobs: int = 0,
    ) -> Judgement:
        """Judge a proposal after a prefix of one token or more; a chain has no parents."""
        proposal = Proposal(token_ids, parents, distributions)
        task = Judge(proposal, logprobs=logprobs, propose=propose, top_logprobs=top_logprobs)
        judgement = self._run(prefix, task).judgement
        assert judgement is not None, "a proposal is judged in one step"
        return judgement

    def decode(
        self, prompt: Sequence[int], *, guesses: bool
    ) -> Iterator[tuple[list[int], Judgement]]:
        """Decode without end; yield what each forward decided, and its judgement.

        Args:
            prompt: One token or more.
            guesses: Whether the model's own guesses are judged.
        """
        made: list[int] = []
        proposal = NOTHING
        while True:
            judged = self.judge(
                [*prompt, *made], proposal.token_ids, parents=proposal.parents, propose=guesses
            )
            decided = [*proposal.along(judged.accepted_path), judged.next_token]
            made += decided
            yield decided, judged
            proposal = judged.proposal

    def _run(self, prefix: Sequence[int], task: Draft | Judge) -> Outcome:
        return self._whole(Item(self.cache, self._spec, prefix=array("I", prefix), task=task))

    def _whole(self, item: Item) -> Outcome:
        """Run an item past its prefix: some backends cut a prefix by themselves."""
        row_count = 0
        while not (outcome := self._step(item)).is_whole:
            row_count += outcome.row_count
        self.row_count += row_count
        return outcome

    def _step(self, item: Item) -> Outcome:
        (outcome,) = self._backend.run([item], self.interrupt)
        if isinstance(outcome, Exception):
            raise outcome
        self.row_count, self.dropped_count = outcome.row_count, outcome.dropped_count
        return outcome
