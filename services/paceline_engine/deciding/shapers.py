"""What shapes the logits of a model's sequences, and what their grammars say about proposals."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from paceline_contract.calls import VerificationRule
from paceline_contract.proposal import NOTHING, Proposal, SparseDistribution
from paceline_engine.deciding.cascade import ReviewTask
from paceline_engine.deciding.shaping import Shaper
from paceline_engine.terms.items import Judge

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline_engine.deciding.grammars import GrammarCompiler
    from paceline_engine.terms.items import Item, Judgement, Outcome
    from paceline_engine.terms.model_cache import ModelCache

_MOST_FORCED = 64  # tokens beside a verdict


class Shapers:
    """A `Shaper` for each sequence whose logits are shaped. Worker thread only.

    Args:
        vocabulary_size: Tells V, the tokens that can be chosen.

    Attributes:
        grammars: Compiles grammars; None: the model knows none.
    """

    def __init__(self, vocabulary_size: Callable[[], int]) -> None:
        self.grammars: GrammarCompiler | None = None
        self._vocabulary_size = vocabulary_size
        self._of_caches: WeakKeyDictionary[ModelCache, Shaper] = WeakKeyDictionary()

    def forget_ended(self) -> None:
        """Forget ended sessions: their sequences are kept, and nobody shapes them any more."""
        for cache in [it for it in self._of_caches if it.has_ended]:
            del self._of_caches[cache]

    def of(self, item: Item) -> Shaper | None:
        """Return what shapes the logits of an item's sequence; None: nothing does."""
        if not item.spec.sampling.shapes:
            return None
        shaper = self._of_caches.get(item.cache)
        if shaper is None:
            wanted = item.spec.sampling.grammar
            grammar = None
            if wanted is not None and self.grammars is not None:
                grammar = self.grammars.path(wanted)  # compiled when the session was opened
            size = self._vocabulary_size()
            shaper = Shaper(item.spec, vocabulary_size=size, grammar=grammar)
            self._of_caches[item.cache] = shaper
        return shaper

    def forced(self, item: Item, beyond: Sequence[int] = (), *, most: int) -> Proposal:
        """Return the tokens that a grammar forces: see `Backend.forced`."""
        shaper = self.of(item)
        token_ids = [] if shaper is None else shaper.forced(item.prefix, beyond, most=most)
        if not token_ids:
            return NOTHING
        is_exact = item.spec.rule is VerificationRule.EXACT
        certain = () if is_exact else tuple(map(SparseDistribution.certain, token_ids))
        return Proposal(tuple(token_ids), (), certain, forced=range(len(token_ids)))

    def within_grammar(self, item: Item) -> tuple[Item, Sequence[int] | None]:
        """Cut a proposal where the grammar refuses a token: its rows could decide nothing.

        Under REJECTION nothing is cut, because the distribution that a refused token was drawn from
        decides what comes instead. A stack's stages judge all tokens, with their own draws.

        Returns:
            The item to compute, and the indices of the proposal's tokens that are left; None: all.
        """
        task = item.task
        if not isinstance(task, Judge) or isinstance(task, ReviewTask) or not task.proposal:
            return item, None
        shaper = None if task.score else self.of(item)
        if shaper is None or item.spec.rule is not VerificationRule.EXACT:
            return item, None
        kept = shaper.followed(item.prefix, task.proposal)
        if len(kept) == len(task.proposal):
            return item, None
        # What is left of a tree can be a chain, and a chain has no parents.
        return replace(item, task=replace(task, proposal=task.proposal.only(kept).compact())), kept

    def complete(
        self, answer: Outcome | Exception, item: Item, kept: Sequence[int] | None
    ) -> Outcome | Exception:
        """Add to a verdict what a grammar forces after it, and lead its path through all tokens.

        Args:
            item: The item that was computed.
            kept: See `within_grammar`.
        """
        if isinstance(answer, Exception) or (judgement := answer.judgement) is None:
            return answer
        completed = judgement
        if item.proposes and item.spec.sampling.grammar is not None:
            completed = replace(completed, proposal=self._guesses(item, judgement))
        if kept is not None:
            path = tuple(kept[index] for index in judgement.accepted_path)
            completed = replace(completed, accepted_path=path)
        return answer if completed is judgement else replace(answer, judgement=completed)

    def _guesses(self, item: Item, judgement: Judgement) -> Proposal:
        """Return the forced tokens, and beside them the own guesses that follow the grammar."""
        assert isinstance(item.task, Judge)
        own, shaper = judgement.proposal, self.of(item)
        beyond = (*item.task.proposal.along(judgement.accepted_path), judgement.next_token)
        forced = self.forced(item, beyond, most=_MOST_FORCED)
        if not own or shaper is None:
            return forced
        prefix = item.prefix[:]
        prefix.extend(beyond)
        own = own.only(shaper.followed(prefix, own))
        return replace(forced.beside(own), forced=forced.forced)
