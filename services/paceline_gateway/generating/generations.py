"""The generations of a request: makes one or several, and reads them as one stream."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from paceline import Chunk
from paceline.errors import ContextLengthExceededError
from paceline_gateway.errors import RequestError
from paceline_serving import lanes

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

    from paceline import (
        AsyncClient,
        AsyncGeneration,
        Finished,
        GenerateOptions,
        PromptChunk,
        Started,
        TimelineEvent,
    )
    from paceline_gateway.bodies.parameter_types import Prompt
    from paceline_gateway.generating.sampling_defaults import SamplingDefaults
    from paceline_gateway.http.connection import Connection

Take: TypeAlias = "Callable[[Choice, Chunk | None], Awaitable[None]]"
Event: TypeAlias = "Chunk | TimelineEvent"

_log = logging.getLogger(__name__)

_MOST_NAME = 64  # characters of a request id on the wire


class Choice:
    """One generation of a request; if an orchestrator ends, the client resumes it at another.

    Args:
        index: The number of the choice in the request.
        generation: The generation that is read.
        without_default: Makes the same generation without the gateway's default `max_tokens`, if
            the context has less room: the orchestrator then uses the whole room.
        prompt_index: The number of the prompt that it continues.
        resumed: Called each time the generation resumed.
        charge: Called with numbers of tokens: the prompt's once, at the first chunk or at the end,
            and those of each chunk.
    """

    def __init__(
        self,
        index: int,
        generation: AsyncGeneration,
        *,
        without_default: Callable[[], AsyncGeneration] | None = None,
        prompt_index: int,
        resumed: Callable[[], None] = lambda: None,
        charge: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.index = index
        self.prompt_index = prompt_index
        self._generation = generation
        self._without_default = without_default
        self._resumed = resumed
        self._resumption_count = 0
        self._charge = charge
        self._is_prompt_charged = False

    @property
    def started(self) -> Started:
        """The first message; known at the first event, and again after each resumption."""
        assert self._generation.started is not None
        return self._generation.started

    @property
    def prompt_chunks(self) -> Sequence[PromptChunk]:
        """The prompt's tokens, if they were asked for; known at the first chunk, or at the end."""
        return self._generation.prompt_chunks

    @property
    def finished(self) -> Finished:
        """The last message."""
        assert self._generation.finished is not None
        return self._generation.finished

    async def chunks(self) -> AsyncGenerator[Chunk]:
        """Yield the text as it becomes final; see `events`."""
        async with aclosing(self.events()) as events:
            async for event in events:
                if isinstance(event, Chunk):
                    yield event

    async def events(self) -> AsyncGenerator[Event]:
        """Yield the text as it becomes final and, with `stream_timeline`, the timeline's events.

        Cancellation:
            Closing the generator cancels the servers' work for it.

        Raises:
            PacelineError: The generation cannot continue.
        """
        try:
            async with aclosing(self._events()) as events:
                async for event in events:
                    if isinstance(event, Chunk):
                        self._charge_prompt()
                        self._charge(len(event.token_ids))
                    self._count_resumptions()
                    yield event
        finally:
            self._charge_prompt()  # computed even if the client left before the first token
            self._count_resumptions()

    async def _events(self) -> AsyncGenerator[Event]:
        """Read the generation; without the default `max_tokens` if there is no room for it."""
        while True:
            try:
                async with self._generation, aclosing(self._generation.events()) as events:
                    async for event in events:
                        yield event
                return
            except ContextLengthExceededError as error:
                if self._without_default is None or not self.lacks_room(error):
                    raise
                # Room for fewer tokens than this default is also less than the orchestrator's own
                # default, so the orchestrator uses the whole room.
                self._generation, self._without_default = self._without_default(), None

    def lacks_room(self, error: ContextLengthExceededError) -> bool:
        """Whether `max_tokens` was refused, and not the prompt, before the generation began.

        What has begun is never begun again: its text would be told twice.
        """
        is_about_it = any(violation.field == "max_tokens" for violation in error.violations)
        return is_about_it and self._generation.started is None

    def _charge_prompt(self) -> None:
        """Charge the prompt once, if a server has begun to compute it."""
        if self._generation.started is not None and not self._is_prompt_charged:
            self._is_prompt_charged = True
            self._charge(self.started.prompt_token_count)

    def _count_resumptions(self) -> None:
        while self._resumption_count < self._generation.resumption_count:
            self._resumption_count += 1
            _log.info("a generation continued at another orchestrator")
            self._resumed()


class Generations:
    """Makes the generations of requests.

    Args:
        client: The client of all orchestrators.
        defaults: Say how tokens are chosen where a request does not.
        choice_limit: Most generations of a request.
        call_limit_seconds: Most seconds of a generation.
        resumed: Called each time a generation resumed.
    """

    def __init__(
        self,
        client: AsyncClient,
        *,
        defaults: SamplingDefaults,
        choice_limit: int,
        call_limit_seconds: float,
        resumed: Callable[[], None],
    ) -> None:
        self._client = client
        self._defaults = defaults
        self._choice_limit = choice_limit
        self._call_limit_seconds = call_limit_seconds
        self._resumed = resumed

    def completed(self, options: GenerateOptions) -> GenerateOptions:
        """Return options with the defaults of what they do not say about sampling."""
        return self._defaults.complete(options)

    def choices(
        self,
        prompts: Sequence[Prompt],
        options: GenerateOptions,
        *,
        count: int,
        connection: Connection,
        default_max_tokens: int | None = None,
    ) -> list[Choice]:
        """Make a request's generations: `count` of each prompt, with consecutive seeds.

        The requests of different clients take turns in the orchestrators' queues.

        Args:
            default_max_tokens: The `max_tokens` of options without one, limited to the context's
                room; None: the orchestrator's default.

        Raises:
            RequestError: There would be too many.
        """
        total = len(prompts) * count
        if total > self._choice_limit:
            raise RequestError(
                f"n: {total} generations (prompts times n) are more than {self._choice_limit}",
                param="n",
            )
        choices = []
        options = self.completed(options)
        for index in range(total):
            prompt_index, number = divmod(index, count)
            name = _name(connection.request_id, index=index, total=total)
            generate = partial(
                self._client.generate,
                prompts[prompt_index],
                timeout=self._call_limit_seconds,
                metadata={lanes.HEADER: connection.lane},
                **_own(options, number=number, request_id=name),
            )
            limited = None
            if default_max_tokens is not None and "max_tokens" not in options:
                limited = generate(max_tokens=default_max_tokens)
            choices.append(
                Choice(
                    index,
                    limited or generate(),
                    without_default=generate if limited else None,
                    prompt_index=prompt_index,
                    resumed=self._resumed,
                    charge=connection.charge,
                )
            )
        return choices


async def deliver(choices: Sequence[Choice], take: Take) -> None:
    """Run generations at the same time; hand over their chunks, and None at each one's end.

    Chunks are handed over one at a time, so a slow receiver delays all generations.

    Raises:
        Exception: A generation or `take` failed; the other generations are cancelled.
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


def _own(options: GenerateOptions, *, number: int, request_id: str) -> GenerateOptions:
    """Return a choice's options: a seed and a name of its own."""
    own = options.copy()
    if "seed" in own:
        own["seed"] = (own["seed"] + number) % (1 << 53)
    own["request_id"] = request_id
    return own


def _name(request_id: str, *, index: int, total: int) -> str:
    """Name a choice in the servers' logs after its request."""
    suffix = f"-{index}" if total > 1 else ""
    return request_id[: _MOST_NAME - len(suffix)] + suffix
