"""The tokenizer of the model that is served: which target is asked for it, and when again."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from paceline.errors import NoTargetError, PacelineError
from paceline_orchestrator.fleet.questions import Question
from paceline_orchestrator.fleet.wire import TokenizerRefusedError

if TYPE_CHECKING:
    from paceline_orchestrator.fleet.pool import ServerPool
    from paceline_orchestrator.fleet.server import ModelServer
    from paceline_orchestrator.fleet.wire import ModelFacts
    from paceline_orchestrator.front.tokenizer import Codecs

_log = logging.getLogger(__name__)


class ServedTokenizer:
    """Keeps the tokenizer of the targets' model fetched.

    Args:
        pool: The targets.
        codecs: Where tokenizers are kept.
    """

    def __init__(self, pool: ServerPool, codecs: Codecs) -> None:
        self._pool = pool
        self._codecs = codecs
        self._question = Question()
        self._looked_at = 0.0

    async def fetch(self) -> ModelFacts | None:
        """Fetch the tokenizer of the targets' model, and return that model; None without a target.

        None also while no target has given its tokenizer, and not all have said that there is none.
        """
        self._codecs.forget_all_but(self._pool.servers)
        while True:
            self._looked_at = time.monotonic()
            try:
                model = self._pool.model()
            except NoTargetError:
                return None
            asked: set[ModelServer] = set()
            await self._question.ask(partial(self._next, model, asked), self._ask)
            if not asked:  # until a server changes: what was refused stays refused
                return model if self._is_known(model) else None

    async def wait(self, changed: asyncio.Event) -> None:
        """Return when servers have changed, or one may be asked that could not be asked before."""
        seconds = self._question.next_in_seconds(since=self._looked_at)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await changed.wait()

    def _is_known(self, model: ModelFacts) -> bool:
        could_have_it = [
            it
            for it in self._pool.targets_with_tokenizer_of(model, with_paused=True)
            if self._question.is_still_open(it)
        ]
        return self._codecs.conclude(model.tokenizer_fingerprint, could_have_it)

    def _next(self, model: ModelFacts, asked: set[ModelServer]) -> ModelServer | None:
        """Return the next target to ask, and note that it is asked."""
        in_turn = self._question.in_turn(self._pool.targets_with_tokenizer_of(model))
        target = self._codecs.choose([it for it in in_turn if it not in asked])
        if target is not None:
            asked.add(target)
        return target

    async def _ask(self, target: ModelServer) -> bool | None:
        """Fetch a target's tokenizer; tell whether it has come, None if it has not."""
        asked_at = time.monotonic()
        try:
            await self._codecs.fetch(target)
        except TokenizerRefusedError as error:
            _log.error("not fetched again from this server: %s", error.message)
        except PacelineError as error:
            _log.warning("no tokenizer yet: %s", error.message)
            # Another target has it, or this one later.
            self._question.note_failure(target, asked_at=asked_at)
        else:
            self._question.note_answer(target)
            return self._codecs.has_of(target) or None
        return None
