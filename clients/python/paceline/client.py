"""The asyncio client; `paceline.sync_client` is the same without asyncio."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Self, TypeVar

import grpc

from paceline.channel import Tls, open_async_channel
from paceline.errors import ClientCancelledError, InternalError
from paceline.generation import Chunk, Completion, SystemInfo, TimelineEvent
from paceline.request import GenerateOptions, Prompt, build_request
from paceline.responses import read_system_info
from paceline.status import decode
from paceline.transcript import StreamState, Transcript, check_client_open
from paceline.v1 import orchestrator_service_pb2 as orchestrator_pb
from paceline.v1 import orchestrator_service_pb2_grpc as orchestrator_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from types import TracebackType
    from typing import Unpack

    from grpc.aio import UnaryStreamCall

    _GenerateCall = UnaryStreamCall[
        orchestrator_pb.GenerateRequest, orchestrator_pb.GenerateResponse
    ]

__all__ = ["DEFAULT_TIMEOUT_SECONDS", "AsyncClient", "AsyncGeneration"]

_Message = TypeVar("_Message")

DEFAULT_TIMEOUT_SECONDS = 120.0


class AsyncGeneration(StreamState["orchestrator_grpc.OrchestratorServiceAsyncStub"]):
    """A generation as it streams; iterating sends the request.

    Cancellation:
        Leaving the iteration (break, an exception, `aclose`, the end of `async with`, a cancelled
        task) cancels the RPC, and with it everything the servers do for it. What was received
        stays: iterating again, or after `aclose` `AsyncClient.resume`, goes on from there.

    Raises:
        PacelineError: From the iteration; its class says what to do.
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
        plan = self._plan()
        while self.finished is None:
            self._check_open()
            call = self._stub.Generate(
                self._transcript.next_request(), timeout=plan.remaining_seconds
            )
            self._call = call
            try:
                async for response in call:
                    event = self._transcript.add(_parsed(response))
                    if event is not None:
                        yield event
                self._transcript.completion()
            except grpc.RpcError as broken:
                if self.finished is None:
                    await self._rest(plan.delay_seconds(decode(broken)))
            except asyncio.CancelledError as cancelled:
                # grpc.aio also raises it where a close() has cancelled the call under the reader.
                task = asyncio.current_task()
                if task is None or not task.cancelling():
                    raise ClientCancelledError(
                        "the generation or its client was closed"
                    ) from cancelled
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
        timeout: The default deadline of a call, in seconds.

    Raises:
        InvalidFieldError: The address is malformed, a TLS file cannot be read, or plaintext would
            leave this machine unasked.
    """

    def __init__(
        self,
        address: str,
        *,
        tls: Tls | None = None,
        insecure: bool = False,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> None:
        self._channel = open_async_channel(address, tls=tls, insecure=insecure)
        self._stub = orchestrator_grpc.OrchestratorServiceStub(self._channel)
        self._timeout = timeout
        self._closed = threading.Event()

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
                connection. The text has no gap and no duplicate.
            options: See `GenerateOptions`.

        Raises:
            InvalidFieldError: An option has a value that cannot be sent.
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
        check_client_open(self._closed)
        request = orchestrator_pb.GetSystemInfoRequest()
        try:
            response = await self._stub.GetSystemInfo(request, timeout=self._seconds(timeout))
        except grpc.RpcError as broken:
            raise decode(broken) from broken
        return read_system_info(_parsed(response))

    async def close(self) -> None:
        """Close the connection, and cancel what runs on it."""
        self._closed.set()
        await self._channel.close(grace=None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def _generation(
        self, transcript: Transcript, *, timeout: float | None, resume_attempts: int
    ) -> AsyncGeneration:
        return AsyncGeneration(
            self._stub,
            transcript,
            timeout=self._seconds(timeout),
            resume_attempts=resume_attempts,
            client_closed=self._closed,
        )

    def _seconds(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else timeout


def _parsed(message: _Message | None) -> _Message:
    """Refuse what could not be parsed: grpc.aio logs that, and goes on with None."""
    if message is None:
        raise InternalError("the server sent bytes that are not the answer's message")
    return message
