"""The asyncio client; `paceline.sync_client` is the same without asyncio."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Self, TypeVar

import grpc
from google.protobuf.message import DecodeError

from paceline.call_plan import RetryBudget, timeout_seconds
from paceline.channel import Route, Tls
from paceline.connection import AsyncConnection
from paceline.errors import ClientCancelledError, InternalError
from paceline.generation import Chunk, Completion, SystemInfo, TimelineEvent
from paceline.request import GenerateOptions, Prompt, build_request
from paceline.responses import read_chat_template, read_system_info
from paceline.stream_state import StreamState
from paceline.transcript import Transcript
from paceline.v1 import orchestrator_service_pb2 as orchestrator_pb

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator
    from types import TracebackType
    from typing import Unpack

    from grpc.aio import UnaryStreamCall

    from paceline.call_plan import CallPlan
    from paceline.connection import AsyncWire
    from paceline.generation import ChatTemplate

    _GenerateCall = UnaryStreamCall[
        orchestrator_pb.GenerateRequest, orchestrator_pb.GenerateResponse
    ]

__all__ = ["DEFAULT_TIMEOUT_SECONDS", "AsyncClient", "AsyncGeneration", "parsed"]

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
    _woken: asyncio.Event | None = None

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
        async with self._connection.wire() as wire:
            request = self._transcript.next_request()
            call = wire.stub.Generate(request, timeout=plan.remaining_seconds)
            self._call, was_refused = call, True
            try:
                async for response in call:
                    was_refused = False
                    event = self._transcript.add(parsed(response))
                    if event is not None:
                        yield event
                self._transcript.completion()
            except grpc.RpcError as broken:
                if self.finished is None:
                    self._check_wanted()
                    error = wire.decoded(broken)
                    await self._rest(plan.delay_seconds(error, was_refused=was_refused))
            except asyncio.CancelledError as cancelled:
                _check_cancelled(cancelled, closed="the generation or its client")
                raise
            finally:
                call.cancel()

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
        if self._woken is not None:
            self._woken.set()

    async def _rest(self, seconds: float) -> None:
        """Sleep, but not beyond `aclose`."""
        self._woken = asyncio.Event()
        if self._closed.is_set():
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._woken.wait()

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
    """A client of one orchestrator; any number of generations can run at once.

        async with AsyncClient("127.0.0.1:50050") as client:
            async for chunk in client.generate("def fib(n):", max_tokens=64):
                print(chunk.text, end="")

    Args:
        address: HOST:PORT, also with a gRPC scheme, such as dns:///HOST:PORT.
        tls: How to trust the server. Without it the connection is plaintext.
        insecure: Allow plaintext to another machine.
        timeout: The default deadline of a call, in seconds; more than a week is a week.

    Raises:
        InvalidFieldError: The address is malformed, a TLS file is unusable, the timeout is
            negative, or plaintext would leave this machine unasked.

    Concurrency:
        It can be made anywhere, and used by one event loop after another or by several at once;
        each has a connection of its own. A generation belongs to the loop that reads it.
    """

    def __init__(
        self,
        address: str,
        *,
        tls: Tls | None = None,
        insecure: bool = False,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> None:
        self._connection = AsyncConnection(Route.to(address, tls=tls, insecure=insecure))
        self._timeout = timeout_seconds(timeout)
        self._budget = RetryBudget()

    def generate(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        resume_attempts: int = 0,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGeneration:
        """Continue a prompt. Nothing is sent before the result is iterated over or awaited.

        Args:
            prompt: Text, or token ids.
            timeout: The deadline for all of it, in seconds. Default: the client's.
            resume_attempts: How often to go on by itself after a `TryAgainError`, such as a broken
                connection. The text has no gap and no duplicate. A request that is refused because
                the orchestrator is shutting down goes to the next one in any case.
            options: See `GenerateOptions`.

        Raises:
            InvalidFieldError: An option has a value that cannot be sent, or a time or number of
                attempts is negative.
        """
        transcript = Transcript(build_request(prompt, options))
        return self._generation(transcript, timeout=timeout, resume_attempts=resume_attempts)

    def resume(
        self,
        generation: AsyncGeneration,
        *,
        timeout: float | None = None,
        resume_attempts: int = 0,
    ) -> AsyncGeneration:
        """Go on with a generation that was left or broken, here or at another orchestrator.

        Iterating gives what is missing; `collect` and `text` give the whole.
        """
        transcript = generation.transcript.branch()
        return self._generation(transcript, timeout=timeout, resume_attempts=resume_attempts)

    async def info(self, *, timeout: float | None = None) -> SystemInfo:
        """Describe the models and servers the orchestrator works with now."""
        async with self._asking() as wire:
            response = await wire.stub.GetSystemInfo(
                orchestrator_pb.GetSystemInfoRequest(), timeout=self._seconds(timeout)
            )
        return read_system_info(parsed(response))

    async def chat_template(self, *, timeout: float | None = None) -> ChatTemplate:
        """Ask how the model wants a conversation written as a prompt.

        Raises:
            UnsupportedError: The model has no chat template: it continues text.
            PacelineError: What else the orchestrator or the transport said.
        """
        async with self._asking() as wire:
            response = await wire.stub.GetSystemChatTemplate(
                orchestrator_pb.GetSystemChatTemplateRequest(), timeout=self._seconds(timeout)
            )
        return read_chat_template(parsed(response))

    async def close(self) -> None:
        """Close the connection, and cancel what runs on it."""
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    @asynccontextmanager
    async def _asking(self) -> AsyncIterator[AsyncWire]:
        """Lend the wire for a call with one answer, whose failures become our errors."""
        async with self._connection.wire() as wire:
            try:
                yield wire
            except grpc.RpcError as broken:
                self._connection.check_open()
                raise wire.decoded(broken) from broken
            except asyncio.CancelledError as cancelled:
                _check_cancelled(cancelled, closed="the client")
                raise

    def _generation(
        self, transcript: Transcript, *, timeout: float | None, resume_attempts: int
    ) -> AsyncGeneration:
        return AsyncGeneration(
            self._connection,
            transcript,
            timeout=self._seconds(timeout),
            resume_attempts=resume_attempts,
            budget=self._budget,
        )

    def _seconds(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else timeout_seconds(timeout)


def _check_cancelled(cancelled: asyncio.CancelledError, *, closed: str) -> None:
    """Tell a cancelled task from a call that a close() has cancelled: grpc.aio raises the same.

    Raises:
        ClientCancelledError: Nobody cancels this task.
    """
    task = asyncio.current_task()
    if task is None or not task.cancelling():
        raise ClientCancelledError(f"{closed} was closed") from cancelled


def parsed(message: _Message | DecodeError | None) -> _Message:
    """Refuse what could not be parsed: grpc.aio logs that, and goes on with None.

    Raises:
        InternalError: It is no message.
    """
    if message is None or isinstance(message, DecodeError):
        raise InternalError("the server sent bytes that are not the answer's message")
    return message
