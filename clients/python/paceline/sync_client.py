"""The client without asyncio: the same requests and transcripts over gRPC's blocking calls."""

from __future__ import annotations

import math
import threading
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, Self, TypeVar

import grpc

from paceline.call_metadata import CallMetadata, Metadata, checked_metadata
from paceline.call_plan import CallPlan, RetryBudget, timeout_seconds
from paceline.channel import Route
from paceline.client import DEFAULT_TIMEOUT_SECONDS
from paceline.connection import Connection
from paceline.endpoints import Endpoint, Endpoints, listed
from paceline.generation import Chunk, Completion, SystemInfo, TimelineEvent
from paceline.request import GenerateOptions, Prompt, build_request
from paceline.responses import read_chat_template, read_system_info
from paceline.stream_state import StreamState
from paceline.transcript import Transcript
from paceline.v1 import orchestrator_service_pb2 as orchestrator_pb

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterator, Sequence
    from types import TracebackType
    from typing import Unpack

    from paceline.call_metadata import MetadataSource, Token
    from paceline.channel import ChannelOptions
    from paceline.connection import BlockingWire
    from paceline.credentials import Tls
    from paceline.generation import ChatTemplate

_Message = TypeVar("_Message")


class Generation(StreamState[Connection]):
    """A generation as it streams; see `AsyncGeneration`. `close` may be called by any thread."""

    _call: grpc.CallIterator[orchestrator_pb.GenerateResponse] | None = None

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._woken = threading.Event()  # by `close`, of this or of the client

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
                self._check_wanted()
                with closing(self._stream(plan)) as events:
                    for event in events:
                        self._hand_out()
                        yield event
                        self._go_on_reading(reader)
        finally:
            self._end_reading(reader)

    def _stream(self, plan: CallPlan) -> Generator[Chunk | TimelineEvent, None, None]:
        """Read one stream to its end, and wait until it is time for the next one."""
        metadata, delay_seconds = self._metadata.pairs(self._own_metadata), 0.0
        with _wire(self._endpoints, plan.asked) as (endpoint, wire):
            request = self._transcript.next_request()
            call = wire.stub.Generate(request, timeout=plan.remaining_seconds, metadata=metadata)
            self._call, was_refused = call, True
            try:
                self._check_open()  # again: another thread's close() may not have seen this call
                for response in call:
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
            finally:
                call.cancel()  # type: ignore[no-untyped-call]
        if self.finished is None:  # without the wire, which others may have meanwhile
            self._rest(delay_seconds)

    def _rest(self, seconds: float) -> None:
        """Sleep, but not beyond a `close`."""
        with self._endpoints.waking(self._woken.set):
            self._woken.wait(seconds)

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
        self._woken.set()
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
    """A client of orchestrators without asyncio; arguments and errors as of `AsyncClient`.

    with Client("127.0.0.1:50050") as client:
        for chunk in client.generate("def fib(n):", max_tokens=64):
            print(chunk.text, end="")
    """

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        tls: Tls | None = None,
        insecure: bool = False,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
        metadata: MetadataSource | None = None,
        token: Token | None = None,
        channel_options: ChannelOptions = (),
        patience: float = math.inf,
    ) -> None:
        self._metadata = CallMetadata.of(metadata, token=token)
        routes = [
            Route.to(each, tls=tls, insecure=insecure, channel_options=channel_options)
            for each in listed(address)
        ]
        self._endpoints = Endpoints(
            [Endpoint(it.address, Connection(it), leads_to_one=it.leads_to_one) for it in routes]
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
    ) -> Generation:
        """Continue a prompt; see `AsyncClient.generate`."""
        transcript = Transcript(build_request(prompt, options))
        return self._generation(
            transcript, timeout=timeout, resume_attempts=resume_attempts, metadata=metadata
        )

    def resume(
        self,
        generation: Generation,
        *,
        timeout: float | None = None,
        resume_attempts: int | None = None,
        metadata: Metadata | None = None,
    ) -> Generation:
        """Go on with a generation that was left or broken; see `AsyncClient.resume`."""
        transcript = generation.transcript.branch()
        return self._generation(
            transcript, timeout=timeout, resume_attempts=resume_attempts, metadata=metadata
        )

    def info(self, *, timeout: float | None = None, metadata: Metadata | None = None) -> SystemInfo:
        """Describe the models and servers the orchestrator works with now."""
        request = orchestrator_pb.GetSystemInfoRequest()
        response = self._ask(
            lambda stub, **call: stub.GetSystemInfo(request, **call),
            timeout=timeout,
            metadata=metadata,
        )
        return read_system_info(response)

    def chat_template(
        self, *, timeout: float | None = None, metadata: Metadata | None = None
    ) -> ChatTemplate:
        """Ask how the model wants conversations; see `AsyncClient.chat_template`."""
        request = orchestrator_pb.GetSystemChatTemplateRequest()
        response = self._ask(
            lambda stub, **call: stub.GetSystemChatTemplate(request, **call),
            timeout=timeout,
            metadata=metadata,
        )
        return read_chat_template(response)

    @property
    def endpoints(self) -> Endpoints[Connection]:
        """The orchestrators, and what is known of each."""
        return self._endpoints

    def close(self) -> None:
        """Close the connections, and cancel what runs on them."""
        for each in self._endpoints:
            each.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _ask(
        self,
        question: Callable[..., _Message],
        *,
        timeout: float | None,
        metadata: Metadata | None,
    ) -> _Message:
        """Ask one orchestrator after the other until one answers."""
        plan = self._plan(timeout)
        own = checked_metadata(metadata)
        while True:
            pairs = self._metadata.pairs(own)
            with _wire(self._endpoints, plan.asked) as (endpoint, wire):
                seconds = plan.remaining_seconds
                try:
                    return question(wire.stub, timeout=seconds, metadata=pairs)
                except grpc.RpcError as broken:
                    self._endpoints.check_open()
                    error = wire.decoded(broken)
                    pause_seconds = plan.resend_seconds(error, endpoint=endpoint)
                    if pause_seconds is None:
                        if not self._endpoints.is_another_left(error, endpoint, plan.asked):
                            raise error from broken
                        pause_seconds = 0.0
            woken = threading.Event()
            with self._endpoints.waking(woken.set):
                woken.wait(pause_seconds)

    def _generation(
        self,
        transcript: Transcript,
        *,
        timeout: float | None,
        resume_attempts: int | None,
        metadata: Metadata | None,
    ) -> Generation:
        return Generation(
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


@contextmanager
def _wire(
    endpoints: Endpoints[Connection], asked: Collection[object]
) -> Iterator[tuple[Endpoint[Connection], BlockingWire]]:
    """Lend the best orchestrator's wire for a call."""
    with endpoints.lent(asked) as endpoint, endpoint.connection.wire() as wire:
        yield endpoint, wire
