"""A model that vLLM computes, behind the engine's interface.

Theory of operation
-------------------

vLLM has a scheduler of its own, and batches requests anew in each step. So `run` sends what its
items need as requests (`requests.py`), lets vLLM do *one* step, and answers the items whose rows
that step decided; the worker asks again for the others. Requests of all items share the step.

    run([A: Decode, B: Judge k = 2])        vLLM's step
      A is running already                    A            1 row
      B: three requests, or one               B, B+b0, B+b0b1
      one step                              --> A's next token; B's verdict

What must hold, and is easy to break:

- Decisions are made in the logits processor (`row_decider.py`) alone, from the prompt and the
  output of a request. What is in vLLM's cache decides how long a step takes, and nothing more.
- A session's requests have its salt (`PrefixText.salt`), so no session finds another one's blocks.
- A request belongs to a sequence that may never be asked for again: its call was withdrawn, or its
  session ended. vLLM would compute it on beside others, so it is aborted after a few steps without
  being asked for. Tokens that it decided meanwhile are right, and are kept for the next run.
- A step runs to its end: nothing can give it up half way.
"""

from __future__ import annotations

import itertools
import secrets
from array import array
from typing import TYPE_CHECKING

from paceline.errors import InternalError, PacelineError
from paceline_contract.calls import VerificationRule
from paceline_engine.terms import validation
from paceline_engine.terms.backend import (
    Backend,
    DeviceLostError,
    ForwardInterrupted,
    TokenMemory,
    first_line,
)
from paceline_engine.terms.items import Item, Judge, Judgement, Outcome
from paceline_engine.terms.model_cache import ModelCache
from paceline_engine.vllm_backend.requests import (
    MOST_TOLD_ROWS,
    GivenTokens,
    RowByRow,
    Stream,
    Work,
)
from paceline_engine.vllm_backend.row_tasks import row_task

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_engine.terms.backend import ChatTemplate, Interrupt
    from paceline_engine.terms.calls import ModelDescription, SessionSpec
    from paceline_engine.vllm_backend.engine import Engine

_USABLE_SHARE = 0.8
"""The rest of vLLM's cache is for the blocks that the requests of a proposal do not share."""


class PrefixText(ModelCache):
    """The tokens of a sequence that vLLM has computed, of which it may still have the blocks.

    No decision depends on what is left in the cache: vLLM computes what it evicted again.

    Attributes:
        salt: Names the sequence in vLLM's cache, so that no other session finds its blocks: how
            fast an answer comes tells nothing about the texts of others.
    """

    def __init__(self, salt: str) -> None:
        super().__init__()
        self.salt = salt

    @property
    def can_be_copied(self) -> bool:
        """True: a sequence that begins with an ended one takes its salt, and finds its blocks."""
        return True

    def _copy(self, source: ModelCache, length: int) -> None:
        del length
        assert isinstance(source, PrefixText)
        self.salt = source.salt

    def _gather(self, path: Sequence[int]) -> None:
        raise AssertionError(f"{path}: trees are not computed here")

    def _crop(self, length: int) -> None:
        """Do nothing: blocks of tokens that no prefix names are evicted first."""


class VllmBackend(Backend):
    """A model of vLLM's.

    Attributes:
        engine: vLLM.
    """

    def __init__(
        self,
        engine: Engine,
        description: ModelDescription,
        *,
        tokenizer: bytes,
        chat_template: ChatTemplate | None,
    ) -> None:
        self.description = description
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.engine = engine
        self._texts: dict[PrefixText, Work] = {}
        self._places: dict[str, tuple[PrefixText, int]] = {}
        self._numbers = itertools.count()
        self._salt = secrets.token_hex(16)

    @property
    def cuts_prompts(self) -> bool:
        """False: vLLM cuts prompts by itself, where it sees fit."""
        return False

    def token_memory(self) -> TokenMemory:
        """Return how many tokens vLLM has room for, as it measured at its start."""
        # vLLM tells tokens and no bytes.
        return TokenMemory(
            free_bytes=self.engine.cache_tokens, usable_share=_USABLE_SHARE, bytes_per_token=1
        )

    def new_cache(self, spec: SessionSpec) -> PrefixText:
        """Begin an empty sequence for a session."""
        del spec
        return PrefixText(f"{self._salt}-{next(self._numbers)}")

    def run(
        self, items: Sequence[Item], interrupt: Interrupt, *, row_limit: int | None = None
    ) -> list[Outcome | Exception]:
        """Do a step of each item: see `Backend.run`. The limit is vLLM's own."""
        del row_limit
        if interrupt.is_set():
            raise ForwardInterrupted
        self._forget_all_but(items)
        errors = [self._begin(item) for item in items]
        begun = [item for item, error in zip(items, errors, strict=True) if error is None]
        if any(not self._work(item).is_ready for item in begun):
            self._step()
        return [error or self._answer(item) for item, error in zip(items, errors, strict=True)]

    def _work(self, item: Item) -> Work:
        return self._texts[_text(item)]

    def _forget_all_but(self, items: Sequence[Item]) -> None:
        """Abort requests of ended sessions, and those that nobody has asked for lately."""
        asked = {item.cache for item in items}
        for text, work in [*self._texts.items()]:
            if text in asked:
                work.idle_steps = 0
            elif text.has_ended or work.idle_steps > work.most_idle_steps:
                self._drop(text)

    def _begin(self, item: Item) -> Exception | None:
        """Send an item's requests, unless they are under way."""
        text = _text(item)
        work = self._texts.get(text)
        if work is not None and work.serves(item):
            work.item = item
            return None
        self._drop(text)
        try:
            self._check(item)
            self._send(item, self._new_work(item))
        except (PacelineError, ValueError) as error:
            self._drop(text)
            return error
        return None

    def _check(self, item: Item) -> None:
        """Check a proposal's distributions, as `ModelBackend` does."""
        if not isinstance(item.task, Judge) or item.task.score:
            return
        if item.spec.rule is VerificationRule.REJECTION:
            size = self.description.vocabulary_size
            validation.check_distributions(item.task.proposal, vocabulary_size=size)

    def _new_work(self, item: Item) -> Work:
        if not isinstance(item.task, Judge):
            return Stream(item)
        is_plain = item.spec.sampling.temperature == 0 and not item.spec.sampling.shapes
        is_told = is_plain and item.block and item.row_count() <= MOST_TOLD_ROWS
        if item.task.score or is_told:
            return GivenTokens(item, vocabulary_size=self.description.vocabulary_size)
        return RowByRow(item)

    def _send(self, item: Item, work: Work) -> None:
        text = _text(item)
        text.keep(item.prefix)
        self._texts[text] = work
        requests = work.requests()
        told = row_task(item.spec, fingerprint=self.engine.fingerprint)
        work.open_count = len(requests)
        for place, request in enumerate(requests):
            name = str(next(self._numbers))
            self._places[name] = text, place
            self.engine.add(name, request, salt=text.salt, row_task=told)

    def _drop(self, text: PrefixText) -> None:
        """Forget a sequence's work, and abort what is left of its requests."""
        self._texts.pop(text, None)
        names = [name for name, (own, _) in self._places.items() if own is text]
        for name in names:
            del self._places[name]
        if names:
            self.engine.abort(names)

    def _step(self) -> None:
        try:
            outputs = self.engine.step()
        except Exception as error:
            # Nobody knows what its scheduler and its cache hold now.
            raise DeviceLostError(f"vLLM failed: {first_line(error)}") from error
        for work in self._texts.values():
            work.idle_steps += 1
        for output in outputs:
            if (place := self._places.get(output.request_id)) is None:
                continue
            if output.finished:
                del self._places[output.request_id]
            text, number = place
            self._texts[text].take(number, output)

    def _answer(self, item: Item) -> Outcome | Exception:
        text, work = _text(item), self._work(item)
        if not work.is_ready:
            if not work.open_count:
                self._drop(text)
                return InternalError("vLLM ended a request without a token")
            rows = min(work.left_rows - 1, self.engine.step_tokens)
            work.left_rows -= rows
            return Outcome(rows)
        try:
            answer = work.answer()
        except PacelineError as error:
            self._drop(text)
            return error
        if answer is None:
            return self._ask_otherwise(item, work)
        rows = work.left_rows + self._evicted_tokens(text, work)
        work.left_rows, work.has_answered = 1, True
        text.extend(item.prefix[text.length :])
        text.extend(array("I", item.block))
        if work.is_over:
            self._drop(text)
        if isinstance(answer, Judgement):
            return Outcome(rows, judgement=answer)
        return Outcome(rows, drafted=answer)

    def _ask_otherwise(self, item: Item, work: Work) -> Outcome | Exception:
        """Ask for an item's rows anew, where prompt log probabilities cannot tell."""
        assert isinstance(work, GivenTokens)
        text = _text(item)
        self._drop(text)
        size = self.description.vocabulary_size
        again: Work = (
            GivenTokens(item, vocabulary_size=size, reads_cache=False)
            if work.scores
            else RowByRow(item)
        )
        try:
            self._send(item, again)
        except ValueError as error:
            self._drop(text)
            return error
        return Outcome(0)

    def _evicted_tokens(self, text: PrefixText, work: Work) -> int:
        """Count the kept tokens that vLLM had to compute again, because it had evicted them."""
        if work.has_answered or work.cached_tokens is None:
            return 0
        size = self.engine.block_size
        return max(0, text.length // size * size - work.cached_tokens)


def _text(item: Item) -> PrefixText:
    assert isinstance(item.cache, PrefixText)
    return item.cache
