"""The client without asyncio: the same requests and transcripts over gRPC's blocking calls."""

from __future__ import annotations

import threading
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, Self

import grpc

from paceline.call_metadata import Metadata, Token, checked_metadata
from paceline.client_state import ClientState
from paceline.connection import Connection
from paceline.generation import Chunk, Completion, SystemInfo, TimelineEvent
from paceline.responses import read_chat_template, read_system_info, read_tokens
from paceline.stream_state import StreamState
from paceline.tokenizing import detokenize_request, tokenize_request
from paceline.v1 import orchestrator_service_pb2 as orchestrator_pb

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Iterator, Sequence
    from types import TracebackType

    from google.protobuf.message import Message

    from paceline.call_plan import CallPlan
    from paceline.connection import BlockingWire
    from paceline.endpoints import Endpoint, Endpoints
    from paceline.generation import ChatTemplate, Tokens
    from paceline.prompts import PromptPart


class Generation(StreamState[Connection]):
    """A generation as it streams; see `AsyncGeneration`. `close` may be called by any thread."""

    _call: grpc.CallIterator[orchestrator_pb.GenerateResponse] | None = None

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._woken = threading.Event()  # by `close` of the generation or of the client

    def __iter__(self) -> Generator[Chunk, None, None]:
        with closing(self.events()) as events:
            for event in events:
                if isinstance(event, Chunk):
                    yield event

    def events(self) -> Generator[Chunk | TimelineEvent, None, None]:
        """Iterate over chunks and, with `stream_timeline`, over the timeline's events."""
        plan, reader = self._plan(), self._begin_reading()
        if self._call is not None:
            self._call.cancel()  # type: ignore[no-untyped-call] # the previous reader's
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
        """Read one stream to its end, then wait until the next one may begin."""
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
        if self.finished is None:  # the wire is given back: other calls can use it meanwhile
            self._rest(delay_seconds)

    def _rest(self, seconds: float) -> None:
        """Sleep until the time is over, or until a `close`."""
        with self._endpoints.waking(self._woken.set):
            self._woken.wait(seconds)

    def collect(self) -> Completion:
        """Wait for the end, and return the whole completion, a resumed one from its start."""
        for _ in self:
            pass
        return self._transcript.completion()

    def text(self) -> str:
        """Wait for the end, and return the whole text."""
        return self.collect().text

    def close(self) -> None:
        """Cancel the RPC, if it runs."""
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


class Client(ClientState[Connection, Generation, Token]):
    """A client of orchestrators without asyncio; arguments and errors are those of `AsyncClient`.

    with Client("127.0.0.1:50050") as client:
        for chunk in client.generate("def fib(n):", max_tokens=64):
            print(chunk.text, end="")
    """

    _link_class = Connection
    _stream_class = Generation

    def info(self, *, timeout: float | None = None, metadata: Metadata | None = None) -> SystemInfo:
        """Describe the models and servers that the orchestrator works with now."""
        request = orchestrator_pb.GetSystemInfoRequest()
        response = self._ask("GetSystemInfo", request, timeout=timeout, metadata=metadata)
        return read_system_info(response)

    def chat_template(
        self, *, timeout: float | None = None, metadata: Metadata | None = None
    ) -> ChatTemplate:
        """Return the model's chat template; see `AsyncClient.chat_template`."""
        request = orchestrator_pb.GetSystemChatTemplateRequest()
        response = self._ask("GetSystemChatTemplate", request, timeout=timeout, metadata=metadata)
        return read_chat_template(response)

    def tokenize(
        self,
        text: str | Sequence[PromptPart],
        *,
        add_special_tokens: bool = True,
        parse_special_tokens: bool = False,
        include_token_bytes: bool = False,
        timeout: float | None = None,
        metadata: Metadata | None = None,
    ) -> Tokens:
        """Return the tokens of a text; see `AsyncClient.tokenize`."""
        request = tokenize_request(
            text,
            add_special_tokens=add_special_tokens,
            parse_special_tokens=parse_special_tokens,
            include_token_bytes=include_token_bytes,
        )
        response = self._ask("Tokenize", request, timeout=timeout, metadata=metadata)
        return read_tokens(response)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        timeout: float | None = None,
        metadata: Metadata | None = None,
    ) -> str:
        """Return the text of tokens, with the names of special tokens."""
        request = detokenize_request(token_ids)
        response = self._ask("Detokenize", request, timeout=timeout, metadata=metadata)
        return str(response.text)

    def close(self) -> None:
        """Close the connections, and cancel the calls on them."""
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
        while True:
            pairs = self._metadata.pairs(own)
            with _wire(self._endpoints, plan.asked) as (endpoint, wire):
                seconds = plan.remaining_seconds
                try:
                    return getattr(wire.stub, rpc)(request, timeout=seconds, metadata=pairs)
                except grpc.RpcError as broken:
                    self._endpoints.check_open()
                    error = wire.decoded(broken)
                    pause_seconds = self._pause_seconds(error, plan=plan, endpoint=endpoint)
            woken = threading.Event()
            with self._endpoints.waking(woken.set):
                woken.wait(pause_seconds)


@contextmanager
def _wire(
    endpoints: Endpoints[Connection], asked: Collection[object]
) -> Iterator[tuple[Endpoint[Connection], BlockingWire]]:
    """Lend the best orchestrator's wire for a call."""
    with endpoints.lent(asked) as endpoint, endpoint.connection.wire() as wire:
        yield endpoint, wire
