"""Generations that outlive their orchestrator, one or several for a request, as one stream."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, TypeAlias

from paceline.errors import OverloadedError, TryAgainError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

    from paceline import AsyncGeneration, Chunk, Finished, GenerateOptions, Started
    from paceline_gateway.bodies import Prompt
    from paceline_gateway.orchestrators import Orchestrator, Orchestrators

__all__ = ["Choice", "Take", "deliver"]

Take: TypeAlias = "Callable[[Choice, Chunk | None], Awaitable[None]]"

_log = logging.getLogger(__name__)

# After all orchestrators were asked in vain they get so long to come back, each time longer.
_FIRST_REST_SECONDS, _LONGEST_REST_SECONDS = 0.1, 2.0
# Before anything was sent, a client is better told to come back than left waiting.
_MOST_ROUNDS_UNHEARD = 2
_MOST_ROUNDS = 30


class Choice:
    """One generation, begun at one orchestrator and gone on with at others.

    Invariants:
        Under EXACT the chunks' text is that of one orchestrator that never failed: what was
        received, and the seed, go along.

    Args:
        index: Its number in the request.
        prompt_index: Whose continuation it is.
        seconds: The time for all of it.
        resumed: Called each time it goes on elsewhere.
        charge: Called with numbers of tokens: the prompt's, and those of each chunk.
    """

    def __init__(
        self,
        index: int,
        prompt: Prompt,
        *,
        prompt_index: int,
        options: GenerateOptions,
        orchestrators: Orchestrators,
        seconds: float,
        resumed: Callable[[], None] = lambda: None,
        charge: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.index = index
        self.prompt_index = prompt_index
        self._prompt = prompt
        self._options = options
        self._orchestrators = orchestrators
        self._ends = time.monotonic() + seconds
        self._resumed = resumed
        self._charge = charge
        self._generation: AsyncGeneration | None = None

    @property
    def started(self) -> Started:
        """What it is; known with its first chunk."""
        assert self._generation is not None
        assert self._generation.started is not None
        return self._generation.started

    @property
    def finished(self) -> Finished:
        """How it ended."""
        assert self._generation is not None
        assert self._generation.finished is not None
        return self._generation.finished

    async def chunks(self) -> AsyncGenerator[Chunk]:
        """Yield the text as it becomes final.

        Cancellation:
            Closing the generator cancels what the servers do for it.

        Raises:
            PacelineError: It cannot go on.
        """
        asked: set[Orchestrator] = set()
        rounds = 0
        while True:
            orchestrator = self._orchestrators.choose(asked)
            received = self._received
            try:
                async with aclosing(self._part(orchestrator)) as chunks:
                    async for chunk in chunks:
                        if self._received == 1:
                            self._charge(self.started.prompt_token_count)
                        self._charge(len(chunk.token_ids))
                        yield chunk
            except TryAgainError as error:
                if self._received > received:
                    asked.clear()
                    rounds = 0
                asked.add(orchestrator)
                if len(asked) >= self._orchestrators.count:
                    asked.clear()
                    rounds += 1
                    await self._rest(error, rounds)
                _log.info("a generation goes on elsewhere: %s", error.message)
                self._resumed()
            else:
                return

    @property
    def _received(self) -> int:
        return len(self._generation.transcript.chunks) if self._generation else 0

    async def _part(self, orchestrator: Orchestrator) -> AsyncGenerator[Chunk]:
        """Let one orchestrator go on, as far as it comes."""
        seconds = max(0.0, self._ends - time.monotonic())
        with orchestrator.counted() as client:
            if self._generation is None:
                self._generation = client.generate(self._prompt, timeout=seconds, **self._options)
            else:
                self._generation = client.resume(self._generation, timeout=seconds)
            async with self._generation, aclosing(aiter(self._generation)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def _rest(self, error: TryAgainError, rounds: int) -> None:
        """Wait before the next round, if there is one.

        Raises:
            TryAgainError: There is none.
        """
        heard = self._received > 0
        most = _MOST_ROUNDS if heard else _MOST_ROUNDS_UNHEARD
        if rounds >= most or (isinstance(error, OverloadedError) and not heard):
            raise error
        seconds = min(_FIRST_REST_SECONDS * 2**rounds, _LONGEST_REST_SECONDS)
        if time.monotonic() + seconds >= self._ends:
            raise error
        await asyncio.sleep(seconds)


async def deliver(choices: Sequence[Choice], take: Take) -> None:
    """Run generations at the same time, and hand over their chunks, and None at the end.

    One at a time is handed over: who takes slowly holds all of them up.

    Raises:
        Exception: One of them cannot go on, or `take` cannot; then the others are cancelled.
    """
    turn = asyncio.Lock()

    async def read(choice: Choice) -> None:
        async with aclosing(choice.chunks()) as chunks:
            async for chunk in chunks:
                async with turn:
                    await take(choice, chunk)
        async with turn:
            await take(choice, None)

    try:
        async with asyncio.TaskGroup() as tasks:
            for choice in choices:
                tasks.create_task(read(choice), name=f"read choice {choice.index}")
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
