"""The part of a generation that both clients share: all of it except reading the stream."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, TypeVar

from paceline.call_plan import CallPlan, RetryBudget, attempt_count
from paceline.connection import AsyncConnection, Connection
from paceline.errors import ClientCancelledError, InvalidFieldError, TryAgainError
from paceline.generation import Chunk
from paceline.responses import parsed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from google.protobuf.message import DecodeError

    from paceline.call_metadata import CallMetadata
    from paceline.endpoints import Endpoint, Endpoints
    from paceline.errors import PacelineError
    from paceline.generation import Finished, PromptChunk, Started, TimelineEvent
    from paceline.transcript import Transcript
    from paceline.v1.orchestrator_service_pb2 import GenerateResponse

_Link = TypeVar("_Link", Connection, AsyncConnection)


class StreamState(Generic[_Link]):
    """A generation's transcript, its orchestrators, and its reader.

    Invariants:
        There is one reader at a time. A second reader is refused while the first waits for a
        message. Between two messages the second reader takes over, since after a `break` the first
        one's iterator is not told to end; if the first reads again, it is refused.
    """

    def __init__(
        self,
        endpoints: Endpoints[_Link],
        transcript: Transcript,
        *,
        timeout: float,
        resume_attempts: int | None,
        budget: RetryBudget,
        metadata: CallMetadata,
        own_metadata: tuple[tuple[str, str | bytes], ...],
    ) -> None:
        self._endpoints: Endpoints[_Link] = endpoints
        self._transcript = transcript
        self._timeout = timeout
        if resume_attempts is None and not endpoints.may_be_several:
            resume_attempts = 0
        self._resume_attempts = attempt_count(resume_attempts)
        self._resumption_count = 0
        self._budget = budget
        self._metadata = metadata
        self._own_metadata = own_metadata
        self._closed = threading.Event()
        self._reading = threading.Lock()  # guards _reader and _is_awaited
        self._reader: object | None = None
        self._is_awaited = False

    @property
    def started(self) -> Started | None:
        """Seed, model and plan of the generation; None before its first message."""
        return self._transcript.started

    @property
    def finished(self) -> Finished | None:
        """The end, with statistics; None until then."""
        return self._transcript.finished

    @property
    def transcript(self) -> Transcript:
        """Everything received so far."""
        return self._transcript

    @property
    def prompt_chunks(self) -> Sequence[PromptChunk]:
        """The prompt's tokens, if they were asked for: all of them, once there is a chunk."""
        return self._transcript.prompt_chunks

    @property
    def resumption_count(self) -> int:
        """How often the generation resumed by itself, at another orchestrator if there is one."""
        return self._resumption_count

    def _plan(self) -> CallPlan:
        return CallPlan(
            self._timeout,
            resume_attempts=self._resume_attempts,
            budget=self._budget,
            endpoint_count=len(self._endpoints),
        )

    def _take(
        self,
        response: GenerateResponse | DecodeError | None,
        *,
        plan: CallPlan,
        endpoint: Endpoint[_Link],
    ) -> Chunk | TimelineEvent | None:
        """Add a message to the transcript, and return the event for the reader, if any."""
        event = self._transcript.add(parsed(response))
        if isinstance(event, Chunk):
            plan.hear()
            self._endpoints.answered(endpoint)
        return event

    def _delay_seconds(
        self, error: PacelineError, *, plan: CallPlan, endpoint: Endpoint[_Link], was_refused: bool
    ) -> float:
        """Return how long to wait before the next stream; see `CallPlan.delay_seconds`."""
        if isinstance(error, TryAgainError):
            self._endpoints.failed(endpoint)
        seconds = plan.delay_seconds(error, was_refused=was_refused, endpoint=endpoint)
        self._resumption_count += 1
        return seconds

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise ClientCancelledError("the generation was closed; resume() continues it")

    def _check_wanted(self) -> None:
        """Tell the caller's own cancel from a server's: gRPC reports both as CANCELLED."""
        self._check_open()
        self._endpoints.check_open()

    def _begin_reading(self) -> object:
        """Become the reader."""
        with self._reading:
            if self._is_awaited:
                raise _second_reader()
            self._reader, self._is_awaited = object(), True
            return self._reader

    def _hand_out(self) -> None:
        """Note that the reader handles a message, and waits for none."""
        with self._reading:
            self._is_awaited = False

    def _go_on_reading(self, reader: object) -> None:
        with self._reading:
            if self._reader is not reader:
                raise _second_reader()
            self._is_awaited = True

    def _end_reading(self, reader: object) -> None:
        with self._reading:
            if self._reader is reader:
                self._reader, self._is_awaited = None, False


def _second_reader() -> InvalidFieldError:
    return InvalidFieldError.of(
        "generation", "has two readers: let one read it, or give each its own by resume()"
    )
