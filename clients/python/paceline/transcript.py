"""The received part of a generation, and the request for the missing part: no I/O here."""

from __future__ import annotations

from copy import copy

from paceline.errors import InvariantViolatedError, ModelMismatchError
from paceline.generation import (
    Chunk,
    Completion,
    Finished,
    PromptChunk,
    Started,
    TimelineEvent,
)
from paceline.responses import (
    read_chunk,
    read_finished,
    read_prompt_chunk,
    read_started,
    read_timeline_event,
)
from paceline.v1 import orchestrator_service_pb2 as orchestrator_pb


class Transcript:
    """A request and its answer, which can come over several streams.

    Invariants:
        Each chunk starts at the absolute position where the chunk before it ended, and no chunk is
        missing at the end. A stream that breaks this rule ends in an error, never in a gap or a
        duplicate.
    """

    def __init__(self, request: orchestrator_pb.GenerateRequest) -> None:
        self._request = request
        self.started: Started | None = None
        self.finished: Finished | None = None
        self.chunks: list[Chunk] = []
        self.prompt_chunks: list[PromptChunk] = []
        self._next_position = 0
        self._resumed_count = 0  # tokens that the current stream did not have to send

    def next_request(self) -> orchestrator_pb.GenerateRequest:
        """Return the request for the missing part."""
        request = orchestrator_pb.GenerateRequest()
        request.CopyFrom(self._request)
        if self.started is not None:
            request.seed = self.started.seed
            for chunk in self.chunks:
                request.resume_token_ids.extend(chunk.token_ids)
        if self.chunks:  # which come after all of the prompt
            request.ClearField("prompt_logprobs")
            request.ClearField("include_prompt")
        return request

    def add(self, response: orchestrator_pb.GenerateResponse) -> Chunk | TimelineEvent | None:
        """Add a message, and return the event for the caller, if any.

        Raises:
            ModelMismatchError: The resumed stream comes from another model.
            InvariantViolatedError: Tokens are missing or come twice.
        """
        match response.WhichOneof("event"):
            case "started":
                self._start(read_started(response.started))
            case "prompt_chunk":
                self._append_prompt(read_prompt_chunk(response.prompt_chunk))
            case "chunk":
                return self._append(read_chunk(response.chunk))
            case "timeline_event":
                return read_timeline_event(response.timeline_event)
            case "finished":
                self._finish(read_finished(response.finished))
        return None

    def completion(self) -> Completion:
        """Return the whole completion.

        Raises:
            InvariantViolatedError: The server closed the stream without its last message.
        """
        if self.started is None or self.finished is None:
            raise InvariantViolatedError("the stream ended before its last message")
        return Completion(
            started=self.started,
            chunks=tuple(self.chunks),
            finished=self.finished,
            resumed_token_count=self._resumed_count,
            prompt_chunks=tuple(self.prompt_chunks),
        )

    def branch(self) -> Transcript:
        """Return a copy that another generation continues."""
        twin = copy(self)
        twin.chunks = list(self.chunks)
        twin.prompt_chunks = list(self.prompt_chunks)
        return twin

    def _start(self, started: Started) -> None:
        before = self.started
        if before is None:
            resumed = len(self._request.resume_token_ids)
            self._next_position = started.prompt_token_count + resumed
        elif before.model_fingerprint != started.model_fingerprint:
            raise ModelMismatchError(
                "the stream was resumed with another model: "
                f"{started.model_fingerprint} instead of {before.model_fingerprint}"
            )
        self.started = started
        self._resumed_count = sum(len(chunk.token_ids) for chunk in self.chunks)

    def _append_prompt(self, chunk: PromptChunk) -> None:
        """Add tokens of the prompt; a stream that was resumed before the answer tells them anew."""
        before = [] if chunk.position == 0 else self.prompt_chunks
        due = before[-1].position + len(before[-1].token_ids) if before else 0
        if chunk.position != due:
            raise InvariantViolatedError(
                f"tokens of the prompt at position {chunk.position} came where {due} was due"
            )
        before.append(chunk)
        self.prompt_chunks = before

    def _append(self, chunk: Chunk) -> Chunk:
        if self.started is None:
            raise InvariantViolatedError("tokens came before the first message")
        if chunk.position != self._next_position:
            raise InvariantViolatedError(
                f"tokens at position {chunk.position} came where {self._next_position} was due"
            )
        self._next_position += len(chunk.token_ids)
        self.chunks.append(chunk)
        return chunk

    def _finish(self, finished: Finished) -> None:
        end = finished.usage.prompt_token_count + finished.usage.completion_token_count
        if end != self._next_position:
            raise InvariantViolatedError(
                f"the stream ended at position {self._next_position} instead of {end}"
            )
        self.finished = finished
