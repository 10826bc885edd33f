"""A step of an item at a model that speaks another vocabulary: one forward of it, or none.

A step needs rows of the model. What is known it uses; what is missing it asks for (`wanted`), once.
With the rows it goes on as far as these lead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch

from paceline_contract.calls import VerificationRule
from paceline_contract.proposal import Proposal, SparseDistribution
from paceline_contract.sampling import SamplingParameters
from paceline_engine.deciding.cascade import Reviewed, ReviewTask
from paceline_engine.deciding.decisions import draft_from
from paceline_engine.deciding.reviews import review_by
from paceline_engine.deciding.row_reading import RowsRead, RowsTask
from paceline_engine.speaking.token_map import MOST_PARTS, NO_TOKEN
from paceline_engine.terms.backend import DeviceLostError
from paceline_engine.terms.items import Draft, Item, Judgement, Outcome
from paceline_engine.terms.model_cache import common_length

if TYPE_CHECKING:
    from array import array
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from paceline_engine.speaking.mapped_rows import RowMap
    from paceline_engine.speaking.speaking_text import SpeakingText


@dataclass(frozen=True, slots=True)
class Wanted:
    """Rows that the model has to compute.

    Attributes:
        ids: The model's sequence.
        first: How many of its tokens come before the first row.
        least: The fewest tokens of which a row is needed; of some it may be known.
    """

    ids: array[int]
    first: int
    least: int

    def item(self, item: Item, text: SpeakingText) -> Item:
        """Return the forward, as an item of the model."""
        text.grow(len(self.ids))
        task = RowsTask(Proposal(tuple(self.ids[self.first :])))
        # The model's own row is not filtered: filters act on the target's row, and so does noise.
        spec = replace(item.spec, sampling=SamplingParameters(), rule=VerificationRule.EXACT)
        return Item(text.inner, spec, prefix=self.ids[: self.first], task=task)


class Step(ABC):
    """A step.

    Attributes:
        item: Whose it is.
        text: Its sequence.
        wanted: What the model has to compute for it; None: nothing.
    """

    def __init__(self, item: Item, row_map: RowMap, *, longest: int) -> None:
        """Begin it.

        Args:
            longest: The model's own context.
        """
        self.item = item
        self.text = cast("SpeakingText", item.cache)
        self.wanted: Wanted | None = None
        self._map = row_map
        self._longest = longest
        self._error: Exception | None = None
        self._try()

    def end(self, answer: Outcome | Exception | None) -> Outcome | Exception:
        """Return the item's outcome.

        Args:
            answer: The model's to what was wanted; None: nothing was.
        """
        if isinstance(answer, Exception):
            return answer
        row_count = 0 if answer is None else answer.row_count
        if answer is not None and self.wanted is not None:
            wanted, read = self.wanted, answer.judgement
            if not isinstance(read, RowsRead):
                return Outcome(row_count)  # so far a part of a long prefix
            self.text.rows.take(wanted.ids, wanted.first, rows=read.rows, least=wanted.least)
            self._try()
        if self._error is not None:
            return self._error
        return self._outcome(row_count)

    def _try(self) -> None:
        """Go on, and keep the error of this item alone."""
        self.wanted = None
        try:
            self.wanted = self._go_on()
        except DeviceLostError:
            raise
        except Exception as error:  # noqa: BLE001 - the caller's, and raised there
            self.text.clear()
            self._error = error

    @abstractmethod
    def _go_on(self) -> Wanted | None:
        """Use the rows that are known; return what is missing for more."""

    @abstractmethod
    def _outcome(self, row_count: int) -> Outcome:
        """Return what was found."""

    def _has_place(self, ids: array[int]) -> bool:
        """Whether the model can compute what follows a sequence."""
        return 0 < len(ids) <= self._longest - MOST_PARTS


class Drafting(Step):
    """Finds the next tokens of a draft, each from the target's row after the ones before."""

    def __init__(self, item: Item, row_map: RowMap, *, longest: int) -> None:
        self._prefix = item.prefix[:]
        self._found: list[Proposal] = []
        super().__init__(item, row_map, longest=longest)

    def _go_on(self) -> Wanted | None:
        assert isinstance(self.item.task, Draft)
        room = self.item.task.max_tokens - self.item.found_count
        while len(self._found) < room:
            row = self._row()
            if isinstance(row, Wanted):
                return row
            spec, position = self.item.spec, len(self._prefix)
            if row is None:
                # A guess that costs nothing: whatever is drafted, the target's text is the same.
                token = self._prefix[-1]
                is_sampled = spec.rule is VerificationRule.REJECTION
                certain = (SparseDistribution.certain(token),) if is_sampled else ()
                drafted = Proposal((token,), distributions=certain)
            else:
                drafted = draft_from(row.log()[None], spec=spec, position=position)
            self._found.append(drafted)
            self._prefix.extend(drafted.token_ids)
        self.text.rows.forget()
        return None

    def _outcome(self, row_count: int) -> Outcome:
        tokens = tuple(token for each in self._found for token in each.token_ids)
        drawn = tuple(it for each in self._found for it in each.distributions)
        found = Proposal(tokens, distributions=drawn)
        return Outcome(row_count, drafted=found, is_inner=not tokens)

    def _row(self) -> Tensor | Wanted | None:
        """Return the target's row after the prefix; None: the model cannot say what follows."""
        text = self.text.text
        text.follow(self._prefix)
        ids = text.ids()
        if not self._has_place(ids):
            return None
        bounds = self._map.bounds(text, self._prefix, ids)
        lengths = _lengths(bounds)
        rows = self.text.rows.of(ids, lengths)
        if isinstance(rows, int):
            return Wanted(ids, rows, lengths.start)
        total, share = self._map.joined(rows, bounds, prefix=self._prefix, ids=ids)
        if not float(total.sum()):
            return None
        return self._composed(total, rows[len(ids)], ids, share=share, least=lengths.start)

    def _composed(
        self, total: Tensor, row: Tensor, ids: array[int], *, share: float, least: int
    ) -> Tensor | Wanted:
        """Draft on greedily, while tokens of the target can be reached by that alone."""
        path: tuple[int, ...] = ()
        token, share = self._map.composes(row, path, share)
        while token != NO_TOKEN:
            path = (*path, token)
            ids.append(token)
            known = self.text.rows.of(ids, range(len(ids), len(ids) + 1))
            if isinstance(known, int):
                return Wanted(ids, known, least)
            row = known[len(ids)]
            self._map.move(total, row, path, share)
            token, share = self._map.composes(row, path, share)
        return total


class Reviewing(Step):
    """Reviews a chain of the target's tokens, for a stack; or computes rows that are measured.

    A chain is reviewed as far as the model's tokens end where the chain's do, in any of its
    beginnings: after that the review stops. So each token is judged by the row after all that were
    accepted before it, and whether it is judged depends on these alone; what is reported as its
    distribution is what it was drawn from.
    """

    def __init__(self, item: Item, row_map: RowMap, *, longest: int) -> None:
        self._judgement: Judgement = Judgement((), 0)
        self._is_measured = False
        super().__init__(item, row_map, longest=longest)

    def _go_on(self) -> Wanted | None:
        task, prefix, text = self.item.task, self.item.prefix, self.text.text
        whole = prefix[:]
        whole.extend(self.item.block)
        text.follow(whole)
        if not isinstance(task, ReviewTask):
            return self._measured(text.ids(len(prefix)), text.ids())
        ids = [text.ids(len(prefix))]
        while len(ids) <= len(task.draws):
            longer = text.ids(len(prefix) + len(ids))
            if longer[: len(ids[-1])] != ids[-1] or not self._has_place(longer):
                break
            ids.append(longer)
        if not self._has_place(ids[0]):
            ids = []
        bounds = [
            self._map.bounds(text, whole[: len(prefix) + n], own) for n, own in enumerate(ids)
        ]
        rows: Mapping[int, Tensor] = {}
        if ids:
            first = min(_lengths(each).start for each in bounds)
            known = self.text.rows.of(ids[-1], range(first, len(ids[-1]) + 1))
            if isinstance(known, int):
                return Wanted(ids[-1], known, first)
            rows = known
        places = zip(ids, bounds, strict=True)
        found = [
            self._map.joined(rows, own, prefix=whole[: len(prefix) + n], ids=each)[0]
            for n, (each, own) in enumerate(places)
        ]
        self.text.rows.forget()
        self._judgement = self._reviewed(task, found)
        return None

    def _measured(self, before: array[int], ids: array[int]) -> Wanted | None:
        """Compute the rows of a block, whatever they are worth, and whichever are known."""
        if self._is_measured or not self._has_place(ids):
            self.text.rows.forget()
            return None
        self._is_measured = True
        first = max(1, min(common_length(before, ids), len(ids)))
        return Wanted(ids, first, first)

    def _reviewed(self, task: ReviewTask, rows: Sequence[Tensor]) -> Reviewed:
        count = min(len(rows), len(task.draws))
        if not rows:  # the model cannot say what follows: a guess
            rows = [torch.ones(self._map.size, dtype=torch.float64)]
        stacked = torch.stack([*rows]).log()
        cut = len(rows) == count
        if cut:  # the last token is judged, and no row says what follows it
            stacked = torch.cat((stacked, stacked[-1:]))
        proposal = Proposal(
            task.proposal.token_ids[:count], (), task.proposal.distributions[:count]
        )
        asked = replace(task, proposal=proposal, draws=task.draws[:count])
        item = self.item
        found = review_by(stacked, asked, spec=item.spec, position=len(item.prefix))
        if not cut or len(found.draws) <= count:
            return found
        draws = found.draws[:count]
        return Reviewed(tuple(range(count)), draws[-1].token_id, draws=draws)

    def _outcome(self, row_count: int) -> Outcome:
        if self.wanted is not None:
            return Outcome(row_count)
        return Outcome(row_count, judgement=self._judgement)


def _lengths(bounds: Sequence[tuple[int, int]]) -> range:
    """Return the lengths of the model's sequence that rows are needed of."""
    return range(min(length for _, length in bounds), bounds[0][1] + 1)
