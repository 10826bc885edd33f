"""The asyncio client; `paceline.sync_client` is the same without asyncio."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, Self

import grpc

from paceline.call_metadata import AsyncToken, Metadata, checked_metadata
from paceline.client_state import ClientState
from paceline.connection import AsyncConnection
from paceline.errors import ClientCancelledError
from paceline.generation import Chunk, Completion, SystemInfo, TimelineEvent
from paceline.interruption import Interruption
from paceline.responses import parsed, read_chat_template, read_system_info, read_tokens
from paceline.stream_state import StreamState
from paceline.tokenizing import detokenize_request, tokenize_request
from paceline.v1 import orchestrator_service_pb2 as orchestrator_pb

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterator,
        Collection,
        Sequence,
    )
    from types import TracebackType

    from google.protobuf.message import Message
    from grpc.aio import UnaryStreamCall

    from paceline.call_plan import CallPlan
    from paceline.connection import AsyncWire
    from paceline.endpoints import Endpoint, Endpoints
    from paceline.generation import ChatTemplate, Tokens
    from paceline.prompts import PromptPart

    _GenerateCall = UnaryStreamCall[
        orchestrator_pb.GenerateRequest, orchestrator_pb.GenerateResponse
    ]

# So many are read within milliseconds.
_FEW_TOKENS = 1 << 15


class AsyncGeneration(StreamState[AsyncConnection]):
    """A generation as it streams; iterating sends the request.

    Cancellation:
        Leaving the iteration (break, an exception, `aclose`, the end of `async with`, a cancelled
        task) cancels the RPC, and all work of the servers for it. The received part stays: a new
        iteration continues there, and after `aclose` so does `AsyncClient.resume`.

    Raises:
        PacelineError: Raised by the iteration; the error's class says what to do. A second reader
            beside the first gets an InvalidFieldError.
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
        """Iterate over chunks and, with `stream_timeline`, over the timeline's events."""
        plan, reader = self._plan(), self._begin_reading()
        if self._call is not None:
            self._call.cancel()  # the previous reader's: its iterator may not have been closed
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
        """Read one stream to its end, then wait until the next one may begin."""
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
        if self.finished is None:  # the wire is given back: other calls can use it meanwhile
            await self._interruption.rest(delay_seconds)

    async def collect(self) -> Completion:
        """Wait for the end, and return the whole completion, a resumed one from its start."""
        async for _ in self:
            pass
        return self._transcript.completion()

    async def text(self) -> str:
        """Wait for the end, and return the whole text."""
        return (await self.collect()).text

    async def aclose(self) -> None:
        """Cancel the RPC, if it runs. Any task may call this, also more than once."""
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


class AsyncClient(ClientState[AsyncConnection, AsyncGeneration, AsyncToken]):
    """A client of one or several orchestrators; any number of generations can run at once.

        async with AsyncClient("127.0.0.1:50050") as client:
            async for chunk in client.generate("def fib(n):", max_tokens=64):
                print(chunk.text, end="")

    The client spreads requests over the orchestrators that serve. A generation that one of them
    leaves unfinished continues at another; under EXACT the text is the same.

    Args:
        address: HOST:PORT, also with a gRPC scheme, such as dns:///HOST:PORT; or several of them,
            as a list or separated by commas. A name can have several addresses, too.
        tls: Certificates. Without them the connection is plaintext. Renewed files are used when
            a connection is lost and made again.
        insecure: Allow plaintext to another machine.
        timeout: The default deadline of a call, in seconds; more than a week is a week.
        metadata: Metadata of every call, such as {"x-tenant": "blue"}; or a function that returns
            it for each call, for example with the current trace's `traceparent`.
        token: A function that is called for each call, resumptions included. Its result, or the
            result of the awaitable that it returns, is sent as `authorization: Bearer ...`. Its
            exceptions become the call's. An awaitable may take as long as the call has time.
        channel_options: gRPC's own options of channels, in addition to ours or instead of them.
            Interceptors cannot be given: those of grpc.aio can swallow a cancel, and the servers
            would work on.
        patience: Seconds for which a broken generation asks for an orchestrator that continues it,
            counted from its last text. Default: about a minute.

    Raises:
        InvalidFieldError: The address is malformed, a TLS file is unusable, a time is
            negative, metadata cannot be sent, or plaintext would leave this machine without
            `insecure`.

    Concurrency:
        A client can be made outside an event loop, and be used by several loops, also at the same
        time: each loop has a connection of its own. A generation belongs to the loop that reads it.
    """

    _link_class = AsyncConnection
    _stream_class = AsyncGeneration

    async def info(
        self, *, timeout: float | None = None, metadata: Metadata | None = None
    ) -> SystemInfo:
        """Describe the models and servers that the orchestrator works with now."""
        request = orchestrator_pb.GetSystemInfoRequest()
        response = await self._ask("GetSystemInfo", request, timeout=timeout, metadata=metadata)
        return read_system_info(response)

    async def chat_template(
        self, *, timeout: float | None = None, metadata: Metadata | None = None
    ) -> ChatTemplate:
        """Return the template by which the model wants a conversation written as a prompt.

        Raises:
            UnsupportedError: The model has no chat template: it continues text.
            PacelineError: Another error of the orchestrator or the transport.
        """
        request = orchestrator_pb.GetSystemChatTemplateRequest()
        response = await self._ask(
            "GetSystemChatTemplate", request, timeout=timeout, metadata=metadata
        )
        return read_chat_template(response)

    async def tokenize(
        self,
        text: str | Sequence[PromptPart],
        *,
        add_special_tokens: bool = True,
        parse_special_tokens: bool = False,
        include_token_bytes: bool = False,
        timeout: float | None = None,
        metadata: Metadata | None = None,
    ) -> Tokens:
        """Return the tokens of a text, as `generate` would take it."""
        request = tokenize_request(
            text,
            add_special_tokens=add_special_tokens,
            parse_special_tokens=parse_special_tokens,
            include_token_bytes=include_token_bytes,
        )
        response = await self._ask("Tokenize", request, timeout=timeout, metadata=metadata)
        if len(response.token_ids) <= _FEW_TOKENS:
            return read_tokens(response)
        return await asyncio.to_thread(read_tokens, response)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        timeout: float | None = None,
        metadata: Metadata | None = None,
    ) -> str:
        """Return the text of tokens, with the names of special tokens."""
        request = detokenize_request(token_ids)
        response = await self._ask("Detokenize", request, timeout=timeout, metadata=metadata)
        return str(response.text)

    async def close(self) -> None:
        """Close the connections, and cancel the calls on them."""
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
        rpc: str,
        request: Message,
        *,
        timeout: float | None,
        metadata: Metadata | None,
    ) -> Any:
        """Ask one orchestrator after another until one answers.

        Args:
            rpc: The name of the RPC.
        """
        plan = self._plan(timeout)
        own = checked_metadata(metadata)
        interruption = Interruption(self._endpoints, check_wanted=self._endpoints.check_open)
        while True:
            seconds = plan.remaining_seconds
            pairs = await interruption.pairs(self._metadata, own, seconds=seconds)
            async with _wire(self._endpoints, plan.asked) as (endpoint, wire):
                seconds = plan.remaining_seconds
                try:
                    call = getattr(wire.stub, rpc)(request, timeout=seconds, metadata=pairs)
                    return parsed(await call)
                except grpc.RpcError as broken:
                    self._endpoints.check_open()
                    error = wire.decoded(broken)
                    pause_seconds = self._pause_seconds(error, plan=plan, endpoint=endpoint)
                except asyncio.CancelledError as cancelled:
                    _check_cancelled(cancelled, closed="the client")
                    raise
            await interruption.rest(pause_seconds)


@asynccontextmanager
async def _wire(
    endpoints: Endpoints[AsyncConnection], asked: Collection[object]
) -> AsyncIterator[tuple[Endpoint[AsyncConnection], AsyncWire]]:
    """Lend the best orchestrator's wire for a call."""
    with endpoints.lent(asked) as endpoint:
        async with endpoint.connection.wire() as wire:
            yield endpoint, wire


def _check_cancelled(cancelled: asyncio.CancelledError, *, closed: str) -> None:
    """Tell a cancelled task from a call that a close() cancelled: grpc.aio raises the same error.

    Raises:
        ClientCancelledError: This task is not being cancelled.
    """
    task = asyncio.current_task()
    if task is None or not task.cancelling():
        raise ClientCancelledError(f"{closed} was closed") from cancelled
