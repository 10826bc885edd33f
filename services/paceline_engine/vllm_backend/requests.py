"""Items as requests of vLLM: which are sent, and what their outputs say.

An item is computed by one of three kinds of *work*:

- `Stream`: Decode and Draft are one request each. vLLM computes a token of it in each step.
- `RowByRow`: a proposal of k tokens is judged by k + 1 requests of one token: the prefix, the
  prefix with the first proposed token, and so on. They share the blocks of the prefix.
- `GivenTokens`: one request whose prompt is the prefix and the proposal, with the log probabilities
  of its last tokens. This costs a third to a half of `RowByRow`, and cannot add noise. So it judges
  chains at temperature 0, and scores given tokens.

What `GivenTokens` answers needs a certificate, or the rows are asked one by one:

- vLLM leaves the rows of cached tokens *uninitialised*. They count only if the cached part ends
  before the first row that is read (`num_cached_tokens`).
- Log probabilities are rounded, and two logits can become one. A row is decided only if its first
  two tokens are apart by more than the rounding.

It is not for many rows, either: vLLM scores each row of a prompt that it computes, by the whole
vocabulary, in memory that it has not set aside (`MOST_TOLD_ROWS`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.errors import InternalError
from paceline_contract.calls import VerificationRule
from paceline_contract.proposal import Proposal, SparseDistribution
from paceline_engine.terms.items import Decode, Draft, Item, Judge, Judgement

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline_contract.calls import LikeliestTokens

MOST_TOLD_ROWS = 512
"""Rows that a proposal may need for GivenTokens: 0.8 GB of a GPU with a vocabulary of 150,000."""
_LEAST_APART = 1e-4
"""Log probabilities below 100 are rounded by less than 1e-5; softmax keeps differences."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request to send.

    Attributes:
        token_ids: Its prompt.
        settings: What its SamplingParams say, besides the row task.
    """

    token_ids: list[int]
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DecidedRow:
    """The token of a row, and log probabilities by token: its own and the likeliest."""

    token: int
    logprobs: Mapping[int, float]

    def check(self) -> None:
        """Check that it was decided by numbers.

        Raises:
            InternalError: the model computed NaN or infinity.
        """
        if not math.isfinite(self.logprobs[self.token]):
            raise InternalError("the model's scores are not finite")

    def likeliest(self, count: int) -> LikeliestTokens:
        """Return the likeliest tokens, ties by smaller id."""
        return _likeliest(self.logprobs, count)


class Work(ABC):
    """An item's requests, from the first step to the answer.

    Attributes:
        item: The item.
        left_rows: The item's rows that no answer has counted yet.
        cached_tokens: The least tokens that one of its requests found in vLLM's cache.
        has_answered: Whether it has answered before.
        idle_steps: How many steps vLLM has done since it was asked for last.
        most_idle_steps: After how many its requests are aborted.
        open_count: How many of its requests vLLM has not ended.
    """

    most_idle_steps = 2

    def __init__(self, item: Item) -> None:
        self.item = item
        self.left_rows = item.row_count()
        self.cached_tokens: int | None = None
        self.has_answered = False
        self.open_count = 0
        self.idle_steps = 0

    @abstractmethod
    def requests(self) -> Sequence[Request]:
        """Return the requests to send."""

    def take(self, place: int, output: Any) -> None:
        """Take in an output of the request at a place."""
        cached = output.num_cached_tokens or 0
        self.open_count -= output.finished
        known = self.cached_tokens
        self.cached_tokens = cached if known is None else min(known, cached)
        self._take(place, output)

    @abstractmethod
    def _take(self, place: int, output: Any) -> None: ...

    @property
    @abstractmethod
    def is_ready(self) -> bool:
        """Whether it has an answer for the item's next step."""

    @property
    def is_over(self) -> bool:
        """Whether it has no further answer, after all that it has now."""
        return True

    @abstractmethod
    def answer(self) -> Judgement | Proposal | None:
        """Return the answer, and remove it; None: these requests cannot tell.

        Raises:
            InternalError: the model computed NaN or infinity.
        """

    def serves(self, item: Item) -> bool:
        """Whether its answer is that of an item, too."""
        return item is self.item or item.asks_the_same(self.item)


class Stream(Work):
    """Decode or Draft: one request, a token in each step.

    Tokens that it decides while others are asked for are answered later, without a step. So it may
    run further ahead: of many streams each run asks for some.
    """

    most_idle_steps = 8

    def __init__(self, item: Item) -> None:
        super().__init__(item)
        self._found: deque[DecidedRow] = deque()
        self._has_ended = False

    def requests(self) -> Sequence[Request]:
        """Return the one request; it ends itself where the item ends."""
        task = self.item.task
        assert isinstance(task, (Decode, Draft))
        told: dict[str, Any] = {"max_tokens": task.max_tokens - self.item.found_count}
        if isinstance(task, Decode):
            told["logprobs"] = task.top_logprobs
            told["stop_token_ids"] = sorted(task.end_token_ids)
        return [Request(self.item.prefix.tolist(), told)]

    def _take(self, place: int, output: Any) -> None:
        del place
        self._found.extend(_decided(output))
        self._has_ended = output.finished

    @property
    def is_ready(self) -> bool:
        """Whether a token is here."""
        return bool(self._found)

    @property
    def is_over(self) -> bool:
        """Whether no further token comes."""
        return self._has_ended and not self._found

    def answer(self) -> Judgement | Proposal:
        """Return the next token."""
        row, item = self._found.popleft(), self.item
        row.check()
        if isinstance(item.task, Draft):
            # At temperature 0 REJECTION is EXACT, and its tokens still have distributions.
            is_exact = item.spec.rule is VerificationRule.EXACT
            certain = () if is_exact else (SparseDistribution.certain(row.token),)
            return Proposal((row.token,), distributions=certain)
        assert isinstance(item.task, Decode)
        return _judged((), [row], logprobs=item.task.logprobs, top_logprobs=item.task.top_logprobs)


class RowByRow(Work):
    """A chain, judged by one request for each row."""

    def __init__(self, item: Item) -> None:
        super().__init__(item)
        assert isinstance(item.task, Judge)
        self._task = item.task
        self._rows: dict[int, DecidedRow] = {}

    def requests(self) -> Sequence[Request]:
        """Return a request for the prefix, and one for the prefix with each part of the chain."""
        prefix, block = self.item.prefix.tolist(), self.item.block
        told = {"max_tokens": 1, "logprobs": self._task.top_logprobs}
        return [Request([*prefix, *block[:count]], told) for count in range(len(block) + 1)]

    def _take(self, place: int, output: Any) -> None:
        for row in _decided(output):
            self._rows[place] = row

    @property
    def is_ready(self) -> bool:
        """Whether all rows are decided."""
        return len(self._rows) == len(self.item.block) + 1

    def answer(self) -> Judgement:
        """Return the verdict."""
        return _verdict([self._rows[place] for place in range(len(self._rows))], self._task)


class GivenTokens(Work):
    """A chain, by the log probabilities of a prompt: judged at temperature 0, or scored."""

    def __init__(self, item: Item, *, vocabulary_size: int, reads_cache: bool = True) -> None:
        super().__init__(item)
        assert isinstance(item.task, Judge)
        self._task = item.task
        self._vocabulary_size = vocabulary_size
        self._reads_cache = reads_cache
        self._prompt_rows: Sequence[Any] = ()
        self._last: DecidedRow | None = None

    @property
    def scores(self) -> bool:
        """Whether it scores its tokens, and judges none."""
        return self._task.score

    def requests(self) -> Sequence[Request]:
        """Return the one request."""
        top = self._task.top_logprobs
        told = {
            "max_tokens": 1,
            "logprobs": top,
            "prompt_logprobs": top if self.scores else max(2, top),
            "flat_logprobs": True,  # of every prompt row, also of cached ones
            "skip_reading_prefix_cache": not self._reads_cache,
        }
        return [Request([*self.item.prefix, *self.item.block], told)]

    def _take(self, place: int, output: Any) -> None:
        del place
        if output.prompt_logprobs is not None:
            self._prompt_rows = output.prompt_logprobs
        for row in _decided(output):
            self._last = row

    @property
    def is_ready(self) -> bool:
        """Whether the prompt is computed."""
        return self._last is not None

    def answer(self) -> Judgement | None:
        """Return the verdict or the scores; None without a certificate."""
        length, block = len(self.item.prefix), self.item.block
        assert self.cached_tokens is not None
        assert self._last is not None
        if self.cached_tokens > length - 1 or len(self._prompt_rows) != length + len(block):
            return None
        told = [_numbers(row) for row in self._prompt_rows[length:]]
        if any(token not in row for row, token in zip(told, block, strict=True)):
            return None  # uninitialised, after all
        if any(not math.isfinite(row[token]) for row, token in zip(told, block, strict=True)):
            raise InternalError("the model's scores are not finite")
        if self.scores:
            return _scored(told, self._task)
        rows = []
        for row in told:
            if (token := self._sure(row)) is None:
                return None
            rows.append(DecidedRow(token, row))
        return _verdict([*rows, self._last], self._task)

    def _sure(self, row: Mapping[int, float]) -> int | None:
        """Return a row's likeliest token; None: it is not sure which one that is."""
        known = {token: each for token, each in row.items() if token < self._vocabulary_size}
        best = _likeliest(known, 2)
        if len(best) < 2 or best[0][1] - best[1][1] <= _LEAST_APART:
            return None
        return best[0][0]


def _decided(output: Any) -> list[DecidedRow]:
    """Return the rows that a request has decided since its last output."""
    (completion,) = output.outputs
    logprobs = completion.logprobs or ()
    return [
        DecidedRow(token, _numbers(row))
        for token, row in zip(completion.token_ids, logprobs, strict=True)
    ]


def _numbers(row: Mapping[int, Any]) -> dict[int, float]:
    return {token: float(each.logprob) for token, each in row.items()}


def _likeliest(logprobs: Mapping[int, float], count: int) -> LikeliestTokens:
    possible = [(token, each) for token, each in logprobs.items() if each > -math.inf]
    return tuple(sorted(possible, key=lambda pair: (-pair[1], pair[0]))[:count])


def _verdict(rows: Sequence[DecidedRow], task: Judge) -> Judgement:
    """Judge a chain by the token of each row."""

    def chosen(row: int, _: int) -> int:
        rows[row].check()
        return rows[row].token

    path, _ = task.proposal.follow(chosen)
    read = [rows[0], *(rows[index + 1] for index in path)]
    return _judged(path, read, logprobs=task.logprobs, top_logprobs=task.top_logprobs)


def _judged(
    path: tuple[int, ...], rows: Sequence[DecidedRow], *, logprobs: bool, top_logprobs: int
) -> Judgement:
    """Return a judgement by the rows along a path, with what was asked of them."""
    return Judgement(
        path,
        rows[-1].token,
        tuple(row.logprobs[row.token] for row in rows) if logprobs else (),
        top_logprobs=tuple(row.likeliest(top_logprobs) for row in rows) if top_logprobs else (),
    )


def _scored(rows: Sequence[Mapping[int, float]], task: Judge) -> Judgement:
    token_ids, top = task.proposal.token_ids, task.top_logprobs
    return Judgement(
        tuple(range(len(token_ids))),
        0,
        tuple(row[token] for row, token in zip(rows, token_ids, strict=True))
        if task.logprobs
        else (),
        top_logprobs=tuple(_likeliest(row, top) for row in rows) if top else (),
    )
