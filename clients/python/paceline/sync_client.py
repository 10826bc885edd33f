"""The client without asyncio: the same requests and transcripts over gRPC's blocking calls."""

from __future__ import annotations

import threading
from contextlib import closing
from typing import TYPE_CHECKING, Self

import grpc

from paceline.channel import Tls, open_channel
from paceline.client import DEFAULT_TIMEOUT_SECONDS
from paceline.generation import Chunk, Completion, SystemInfo, TimelineEvent
from paceline.request import GenerateOptions, Prompt, build_request
from paceline.responses import read_system_info
from paceline.status import decode
from paceline.transcript import StreamState, Transcript, check_client_open
from paceline.v1 import orchestrator_service_pb2 as orchestrator_pb
from paceline.v1 import orchestrator_service_pb2_grpc as orchestrator_grpc

if TYPE_CHECKING:
    from collections.abc import Generator
    from types import TracebackType
    from typing import Unpack

__all__ = ["Client", "Generation"]


class Generation(StreamState["orchestrator_grpc.OrchestratorServiceStub"]):
    """A generation as it streams; see `AsyncGeneration`. `close` may be called by any thread."""

    _call: grpc.CallIterator[orchestrator_pb.GenerateResponse] | None = None

    def __iter__(self) -> Generator[Chunk, None, None]:
        with closing(self.events()) as events:
            for event in events:
                if isinstance(event, Chunk):
                    yield event

    def events(self) -> Generator[Chunk | TimelineEvent, None, None]:
        """Iterate over chunks and, with `stream_timeline`, what happens behind them."""
        plan = self._plan()
        while self.finished is None:
            self._check_open()
            call = self._stub.Generate(
                self._transcript.next_request(), timeout=plan.remaining_seconds
            )
            self._call = call
            try:
                self._check_open()  # again: another thread's close() may not have seen this call
                for response in call:
                    event = self._transcript.add(response)
                    if event is not None:
                        yield event
                self._transcript.completion()
            except grpc.RpcError as broken:
                if self.finished is None:
                    self._closed.wait(plan.delay_seconds(decode(broken)))
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
        self._channel = open_channel(address, tls=tls, insecure=insecure)
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
        check_client_open(self._closed)
        request = orchestrator_pb.GetSystemInfoRequest()
        try:
            response = self._stub.GetSystemInfo(request, timeout=self._seconds(timeout))
        except grpc.RpcError as broken:
            raise decode(broken) from broken
        return read_system_info(response)

    def close(self) -> None:
        """Close the connection, and cancel what runs on it."""
        self._closed.set()
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _generation(
        self, transcript: Transcript, *, timeout: float | None, resume_attempts: int
    ) -> Generation:
        return Generation(
            self._stub,
            transcript,
            timeout=self._seconds(timeout),
            resume_attempts=resume_attempts,
            client_closed=self._closed,
        )

    def _seconds(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else timeout
