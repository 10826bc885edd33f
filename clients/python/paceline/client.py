"""The asyncio client; `paceline.sync_client` is the same without asyncio."""

from __future__ import annotations

import asyncio
import math
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, Self, TypeVar

import grpc

from paceline.call_metadata import CallMetadata, Metadata, checked_metadata
from paceline.call_plan import CallPlan, RetryBudget, timeout_seconds
from paceline.channel import Route
from paceline.connection import AsyncConnection
from paceline.endpoints import Endpoint, Endpoints, listed
from paceline.errors import ClientCancelledError
from paceline.generation import Chunk, Completion, SystemInfo, TimelineEvent
from paceline.interruption import Interruption
from paceline.request import GenerateOptions, Prompt, build_request
from paceline.responses import parsed, read_chat_template, read_system_info
from paceline.stream_state import StreamState
from paceline.transcript import Transcript
from paceline.v1 import orchestrator_service_pb2 as orchestrator_pb

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterator,
        Awaitable,
        Callable,
        Collection,
        Sequence,
    )
    from types import TracebackType
    from typing import Unpack

    from grpc.aio import UnaryStreamCall

    from paceline.call_metadata import AsyncToken, MetadataSource
    from paceline.channel import ChannelOptions
    from paceline.connection import AsyncWire
    from paceline.credentials import Tls
    from paceline.generation import ChatTemplate

    _GenerateCall = UnaryStreamCall[
        orchestrator_pb.GenerateRequest, orchestrator_pb.GenerateResponse
    ]

_Message = TypeVar("_Message")

DEFAULT_TIMEOUT_SECONDS = 120.0


class AsyncGeneration(StreamState[AsyncConnection]):
    """A generation as it streams; iterating sends the request.

    Cancellation:
        Leaving the iteration (break, an exception, `aclose`, the end of `async with`, a cancelled
        task) cancels the RPC, and with it everything the servers do for it. What was received
        stays: iterating again, or after `aclose` `AsyncClient.resume`, goes on from there.

    Raises:
        PacelineError: From the iteration; its class says what to do. A second reader beside the
            first is an InvalidFieldError.
    """

    _call: _GenerateCall | None = None

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._interruption = Interruption(self._endpoints, check_wanted=self._check_wanted)

    async def __aiter__(self) -> AsyncGenerator[Chunk, None]:
        async with aclosing(self.events()) as events:
            async for event in events:
                if isinstance(event, Chunk):
                    yield event

    async def events(self) -> AsyncGenerator[Chunk | TimelineEvent, None]:
        """Iterate over chunks and, with `stream_timeline`, what happens behind them."""
        plan, reader = self._plan(), self._begin_reading()
        if self._call is not None:
            self._call.cancel()  # of the reader before, which may not have been told to end
        try:
            while self.finished is None:
                self._check_open()
                async with aclosing(self._stream(plan)) as events:
                    async for event in events:
                        self._hand_out()
                        yield event
                        self._go_on_reading(reader)
        finally:
            self._end_reading(reader)

    async def _stream(self, plan: CallPlan) -> AsyncGenerator[Chunk | TimelineEvent, None]:
        """Read one stream to its end, and wait until it is time for the next one."""
        delay_seconds = 0.0
        metadata = await self._interruption.pairs(
            self._metadata, self._own_metadata, seconds=plan.remaining_seconds
        )
        async with _wire(self._endpoints, plan.asked) as (endpoint, wire):
            request = self._transcript.next_request()
            call = wire.stub.Generate(request, timeout=plan.remaining_seconds, metadata=metadata)
            self._call, was_refused = call, True
            try:
                async for response in call:
                    was_refused = False
                    event = self._take(response, plan=plan, endpoint=endpoint)
                    if event is not None:
                        yield event
                self._transcript.completion()
            except grpc.RpcError as broken:
                if self.finished is None:
                    self._check_wanted()
                    error = wire.decoded(broken)
                    delay_seconds = self._delay_seconds(
                        error, plan=plan, endpoint=endpoint, was_refused=was_refused
                    )
            except asyncio.CancelledError as cancelled:
                _check_cancelled(cancelled, closed="the generation or its client")
                raise
            finally:
                call.cancel()
        if self.finished is None:  # without the wire, which others may have meanwhile
            await self._interruption.rest(delay_seconds)

    async def collect(self) -> Completion:
        """Wait for the end and return the whole; of a resumed generation, all its parts."""
        async for _ in self:
            pass
        return self._transcript.completion()

    async def text(self) -> str:
        """Wait for the end and return the whole text."""
        return (await self.collect()).text

    async def aclose(self) -> None:
        """Cancel the RPC, if it is running. It can be called again, and by any task."""
        self._closed.set()
        if self._call is not None:
            self._call.cancel()
        self._interruption.interrupt()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()


class AsyncClient:
    """A client of one or several orchestrators; any number of generations can run at once.

        async with AsyncClient("127.0.0.1:50050") as client:
            async for chunk in client.generate("def fib(n):", max_tokens=64):
                print(chunk.text, end="")

    Where there are several, requests are spread over those that serve, and what one of them leaves
    unfinished goes on at another: under EXACT with the text that it would have had there.

    Args:
        address: HOST:PORT, also with a gRPC scheme, such as dns:///HOST:PORT; or several of them,
            as a list or between commas. A name can lead to several, too.
        tls: How to trust the server. Without it the connection is plaintext. Files that were
            renewed are used once a connection is lost.
        insecure: Allow plaintext to another machine.
        timeout: The default deadline of a call, in seconds; more than a week is a week.
        metadata: What goes along with every call, such as {"x-tenant": "blue"}; or what is called
            for each call and returns that, such as the current trace's `traceparent`.
        token: Called for each call, resumptions included; what it returns, or what its awaitable
            yields, goes along as `authorization: Bearer ...`. What it raises, the call raises. An
            awaitable is waited for as long as the call has time and is wanted.
        channel_options: gRPC's own options for channels, where they have to differ from ours.
            There is no way to give interceptors: those of grpc.aio can swallow a cancel, and the
            servers would work on.
        patience: Where generations go on by themselves: for how many seconds after its last text
            one asks on while no orchestrator answers. By default for about a minute.

    Raises:
        InvalidFieldError: The address is malformed, a TLS file is unusable, a time is
            negative, metadata cannot be sent, or plaintext would leave this machine unasked.

    Concurrency:
        It can be made anywhere, and used by one event loop after another or by several at once;
        each has a connection of its own. A generation belongs to the loop that reads it.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        tls: Tls | None = None,
        insecure: bool = False,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
        metadata: MetadataSource | None = None,
        token: AsyncToken | None = None,
        channel_options: ChannelOptions = (),
        patience: float = math.inf,
    ) -> None:
        self._metadata = CallMetadata.of(metadata, token=token)
        routes = [
            Route.to(each, tls=tls, insecure=insecure, channel_options=channel_options)
            for each in listed(address)
        ]
        self._endpoints = Endpoints(
            [
                Endpoint(it.address, AsyncConnection(it), leads_to_one=it.leads_to_one)
                for it in routes
            ]
        )
        self._timeout = timeout_seconds(timeout)
        self._budget = RetryBudget(patience_seconds=timeout_seconds(patience))

    def generate(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        resume_attempts: int | None = None,
        metadata: Metadata | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGeneration:
        """Continue a prompt. Nothing is sent before the result is iterated over or awaited.

        Args:
            prompt: Text, token ids, parts of a text, or two texts with a gap.
            timeout: The deadline for all of it, in seconds. Default: the client's.
            resume_attempts: How often to go on by itself after a `TryAgainError`, such as a broken
                connection. The text has no gap and no duplicate. Default: with one orchestrator
                never, with several until all of them have been asked in vain, again and again. 0
                leaves it to the caller. A request that is refused because the orchestrator is
                shutting down goes to the next one in any case.
            metadata: What goes along with its calls, beside the client's.
            options: See `GenerateOptions`.

        Raises:
            InvalidFieldError: An option has a value that cannot be sent, or a time or number of
                attempts is negative.
        """
        transcript = Transcript(build_request(prompt, options))
        return self._generation(
            transcript, timeout=timeout, resume_attempts=resume_attempts, metadata=metadata
        )

    def resume(
        self,
        generation: AsyncGeneration,
        *,
        timeout: float | None = None,
        resume_attempts: int | None = None,
        metadata: Metadata | None = None,
    ) -> AsyncGeneration:
        """Go on with a generation that was left or broken, here or at another orchestrator.

        Iterating gives what is missing; `collect` and `text` give the whole.
        """
        transcript = generation.transcript.branch()
        return self._generation(
            transcript, timeout=timeout, resume_attempts=resume_attempts, metadata=metadata
        )

    async def info(
        self, *, timeout: float | None = None, metadata: Metadata | None = None
    ) -> SystemInfo:
        """Describe the models and servers the orchestrator works with now."""
        request = orchestrator_pb.GetSystemInfoRequest()
        response = await self._ask(
            lambda stub, **call: stub.GetSystemInfo(request, **call),
            timeout=timeout,
            metadata=metadata,
        )
        return read_system_info(response)

    async def chat_template(
        self, *, timeout: float | None = None, metadata: Metadata | None = None
    ) -> ChatTemplate:
        """Ask how the model wants a conversation written as a prompt.

        Raises:
            UnsupportedError: The model has no chat template: it continues text.
            PacelineError: What else the orchestrator or the transport said.
        """
        request = orchestrator_pb.GetSystemChatTemplateRequest()
        response = await self._ask(
            lambda stub, **call: stub.GetSystemChatTemplate(request, **call),
            timeout=timeout,
            metadata=metadata,
        )
        return read_chat_template(response)

    @property
    def endpoints(self) -> Endpoints[AsyncConnection]:
        """The orchestrators, and what is known of each."""
        return self._endpoints

    async def close(self) -> None:
        """Close the connections, and cancel what runs on them."""
        for each in self._endpoints:
            await each.connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _ask(
        self,
        question: Callable[..., Awaitable[_Message]],
        *,
        timeout: float | None,
        metadata: Metadata | None,
    ) -> _Message:
        """Ask one orchestrator after the other until one answers."""
        plan = self._plan(timeout)
        own = checked_metadata(metadata)
        interruption = Interruption(self._endpoints, check_wanted=self._endpoints.check_open)
        while True:
            seconds = plan.remaining_seconds
            pairs = await interruption.pairs(self._metadata, own, seconds=seconds)
            async with _wire(self._endpoints, plan.asked) as (endpoint, wire):
                seconds = plan.remaining_seconds
                try:
                    return parsed(await question(wire.stub, timeout=seconds, metadata=pairs))
                except grpc.RpcError as broken:
                    self._endpoints.check_open()
                    error = wire.decoded(broken)
                    pause_seconds = plan.resend_seconds(error, endpoint=endpoint)
                    if pause_seconds is None:
                        if not self._endpoints.is_another_left(error, endpoint, plan.asked):
                            raise error from broken
                        pause_seconds = 0.0
                except asyncio.CancelledError as cancelled:
                    _check_cancelled(cancelled, closed="the client")
                    raise
            await interruption.rest(pause_seconds)

    def _generation(
        self,
        transcript: Transcript,
        *,
        timeout: float | None,
        resume_attempts: int | None,
        metadata: Metadata | None,
    ) -> AsyncGeneration:
        return AsyncGeneration(
            self._endpoints,
            transcript,
            timeout=self._seconds(timeout),
            resume_attempts=resume_attempts,
            budget=self._budget,
            metadata=self._metadata,
            own_metadata=checked_metadata(metadata),
        )

    def _plan(self, timeout: float | None) -> CallPlan:
        count = len(self._endpoints)
        return CallPlan(self._seconds(timeout), budget=self._budget, endpoint_count=count)

    def _seconds(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else timeout_seconds(timeout)


@asynccontextmanager
async def _wire(
    endpoints: Endpoints[AsyncConnection], asked: Collection[object]
) -> AsyncIterator[tuple[Endpoint[AsyncConnection], AsyncWire]]:
    """Lend the best orchestrator's wire for a call."""
    with endpoints.lent(asked) as endpoint:
        async with endpoint.connection.wire() as wire:
            yield endpoint, wire


def _check_cancelled(cancelled: asyncio.CancelledError, *, closed: str) -> None:
    """Tell a cancelled task from a call that a close() has cancelled: grpc.aio raises the same.

    Raises:
        ClientCancelledError: Nobody cancels this task.
    """
    task = asyncio.current_task()
    if task is None or not task.cancelling():
        raise ClientCancelledError(f"{closed} was closed") from cancelled
