"""The client without asyncio: the same requests and transcripts over gRPC's blocking calls."""

from __future__ import annotations

from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Self

import grpc

from paceline.call_plan import RetryBudget, timeout_seconds
from paceline.channel import Route, Tls
from paceline.client import DEFAULT_TIMEOUT_SECONDS, parsed
from paceline.connection import Connection
from paceline.generation import Chunk, Completion, SystemInfo, TimelineEvent
from paceline.request import GenerateOptions, Prompt, build_request
from paceline.responses import read_chat_template, read_system_info
from paceline.stream_state import StreamState
from paceline.transcript import Transcript
from paceline.v1 import orchestrator_service_pb2 as orchestrator_pb

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from types import TracebackType
    from typing import Unpack

    from paceline.call_plan import CallPlan
    from paceline.connection import BlockingWire
    from paceline.generation import ChatTemplate

__all__ = ["Client", "Generation"]


class Generation(StreamState[Connection]):
    """A generation as it streams; see `AsyncGeneration`. `close` may be called by any thread."""

    _call: grpc.CallIterator[orchestrator_pb.GenerateResponse] | None = None

    def __iter__(self) -> Generator[Chunk, None, None]:
        with closing(self.events()) as events:
            for event in events:
                if isinstance(event, Chunk):
                    yield event

    def events(self) -> Generator[Chunk | TimelineEvent, None, None]:
        """Iterate over chunks and, with `stream_timeline`, what happens behind them."""
        plan, reader = self._plan(), self._begin_reading()
        if self._call is not None:
            self._call.cancel()  # type: ignore[no-untyped-call] # of the reader before
        try:
            while self.finished is None:
                self._check_open()
                with closing(self._stream(plan)) as events:
                    for event in events:
                        self._hand_out()
                        yield event
                        self._go_on_reading(reader)
        finally:
            self._end_reading(reader)

    def _stream(self, plan: CallPlan) -> Generator[Chunk | TimelineEvent, None, None]:
        """Read one stream to its end, and wait until it is time for the next one."""
        with self._connection.wire() as wire:
            request = self._transcript.next_request()
            call = wire.stub.Generate(request, timeout=plan.remaining_seconds)
            self._call, was_refused = call, True
            try:
                self._check_open()  # again: another thread's close() may not have seen this call
                for response in call:
                    was_refused = False
                    event = self._transcript.add(parsed(response))
                    if event is not None:
                        yield event
                self._transcript.completion()
            except grpc.RpcError as broken:
                if self.finished is None:
                    self._check_wanted()
                    error = wire.decoded(broken)
                    self._closed.wait(plan.delay_seconds(error, was_refused=was_refused))
            finally:
                call.cancel()  # type: ignore[no-untyped-call]

    def collect(self) -> Completion:
        """Wait for the end and return the whole; of a resumed generation, all its parts."""
        for _ in self:
            pass
        return self._transcript.completion()

    def text(self) -> str:
        """Wait for the end and return the whole text."""
        return self.collect().text

    def close(self) -> None:
        """Cancel the RPC, if it is running."""
        self._closed.set()
        if self._call is not None:
            self._call.cancel()  # type: ignore[no-untyped-call]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class Client:
    """A client of one orchestrator without asyncio; arguments and errors as of `AsyncClient`.

    with Client("127.0.0.1:50050") as client:
        for chunk in client.generate("def fib(n):", max_tokens=64):
            print(chunk.text, end="")
    """

    def __init__(
        self,
        address: str,
        *,
        tls: Tls | None = None,
        insecure: bool = False,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> None:
        self._connection = Connection(Route.to(address, tls=tls, insecure=insecure))
        self._timeout = timeout_seconds(timeout)
        self._budget = RetryBudget()

    def generate(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        resume_attempts: int = 0,
        **options: Unpack[GenerateOptions],
    ) -> Generation:
        """Continue a prompt; see `AsyncClient.generate`."""
        transcript = Transcript(build_request(prompt, options))
        return self._generation(transcript, timeout=timeout, resume_attempts=resume_attempts)

    def resume(
        self, generation: Generation, *, timeout: float | None = None, resume_attempts: int = 0
    ) -> Generation:
        """Go on with a generation that was left or broken; see `AsyncClient.resume`."""
        transcript = generation.transcript.branch()
        return self._generation(transcript, timeout=timeout, resume_attempts=resume_attempts)

    def info(self, *, timeout: float | None = None) -> SystemInfo:
        """Describe the models and servers the orchestrator works with now."""
        with self._asking() as wire:
            response = wire.stub.GetSystemInfo(
                orchestrator_pb.GetSystemInfoRequest(), timeout=self._seconds(timeout)
            )
        return read_system_info(response)

    def chat_template(self, *, timeout: float | None = None) -> ChatTemplate:
        """Ask how the model wants conversations; see `AsyncClient.chat_template`."""
        with self._asking() as wire:
            response = wire.stub.GetSystemChatTemplate(
                orchestrator_pb.GetSystemChatTemplateRequest(), timeout=self._seconds(timeout)
            )
        return read_chat_template(response)

    def close(self) -> None:
        """Close the connection, and cancel what runs on it."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @contextmanager
    def _asking(self) -> Iterator[BlockingWire]:
        """Lend the wire for a call with one answer, whose failures become our errors."""
        with self._connection.wire() as wire:
            try:
                yield wire
            except grpc.RpcError as broken:
                self._connection.check_open()
                raise wire.decoded(broken) from broken

    def _generation(
        self, transcript: Transcript, *, timeout: float | None, resume_attempts: int
    ) -> Generation:
        return Generation(
            self._connection,
            transcript,
            timeout=self._seconds(timeout),
            resume_attempts=resume_attempts,
            budget=self._budget,
        )

    def _seconds(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else timeout_seconds(timeout)
