"""Every error of Paceline, on both sides of the wire.

    PacelineError
    ├── InvalidFieldError               fix the request
    │   └── ContextLengthExceededError
    ├── MalformedRequestError           fix the client
    ├── UnsupportedError                leave it out, or ask another server
    ├── PermissionDeniedError           fix the credentials
    │   └── UnauthenticatedError        send the credential that it names
    ├── SessionError                    an orchestrator repairs it by itself
    │   ├── SessionNotFoundError        open a session, send the whole prefix
    │   ├── PrefixNotHeldError          call again with a base_length that is held
    │   ├── PrefixMismatchError         call again with the whole prefix
    │   ├── StaleCallError              drop this call
    │   └── SupersededError             drop this call
    ├── ModelMismatchError              pick another server
    ├── ModelNotFoundError              ask for another LoRA adapter, or for none
    ├── TokenizerMismatchError          pair other models
    ├── TryAgainError                   retry after `retry_after_seconds`, or elsewhere
    │   ├── CacheExhaustedError
    │   ├── OverloadedError
    │   ├── LoadingError
    │   ├── DrainingError
    │   ├── NoTargetError
    │   └── ConnectionLostError         has no reason on the wire: the transport broke
    ├── DeadlineError                   resume, with a later deadline
    │   └── SlowConsumerError           resume, and read faster
    ├── ClientCancelledError
    ├── InvariantViolatedError          report it
    └── InternalError                   report it

A server raises them, one interceptor turns them into `google.rpc.Status`, and the client raises the
same class again. This module knows neither gRPC nor protobuf, so that the engine can use it:
`code` is the name of a gRPC status code, `reason` the name of an `ErrorReason` without its prefix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """A field out of its limits: its path in the request, and the fault."""

    field: str
    description: str


class PacelineError(Exception):
    """The base of all errors.

    Attributes:
        code: Name of the gRPC status code.
        reason: Name of the ErrorReason, without its prefix; empty for a class that only groups.
        metadata: More facts, as in google.rpc.ErrorInfo; never prompts, tokens or handles.
        violations: The wrong fields of an InvalidFieldError, with their faults.
        retry_after_seconds: Time until a retry is useful, if the server said one.
    """

    code: ClassVar[str] = "INTERNAL"
    reason: ClassVar[str] = ""

    def __init__(
        self,
        message: str,
        *,
        metadata: dict[str, str] | None = None,
        violations: tuple[FieldViolation, ...] = (),
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.metadata = metadata or {}
        self.violations = violations
        self.retry_after_seconds = retry_after_seconds


class InvalidFieldError(PacelineError):
    """A field is out of its limits: fix the request."""

    code, reason = "INVALID_ARGUMENT", "INVALID_FIELD"

    @classmethod
    def of(cls, field: str, description: str) -> InvalidFieldError:
        """Name one field and its limit."""
        violation = FieldViolation(field, description)
        return cls(f"{field}: {description}", violations=(violation,))


class ContextLengthExceededError(InvalidFieldError):
    """Prompt and max_tokens do not fit the model's context: fix the request."""

    reason = "CONTEXT_LENGTH_EXCEEDED"


class MalformedRequestError(PacelineError):
    """The bytes are not the request message: fix the client."""

    code, reason = "INVALID_ARGUMENT", "MALFORMED_REQUEST"


class UnsupportedError(PacelineError):
    """This server does not support the request: leave the option out, or ask another server."""

    code, reason = "UNIMPLEMENTED", "UNSUPPORTED"


class PermissionDeniedError(PacelineError):
    """The peer may not call this method: fix the credentials."""

    code, reason = "PERMISSION_DENIED", "PERMISSION_DENIED"


class UnauthenticatedError(PermissionDeniedError):
    """A credential is missing or wrong: send the one that the message names."""

    code, reason = "UNAUTHENTICATED", "UNAUTHENTICATED"


class SessionError(PacelineError):
    """An error between an orchestrator and a model server; the orchestrator repairs it."""


class SessionNotFoundError(SessionError):
    """The session is unknown here: open a new one and send the whole prefix."""

    code, reason = "NOT_FOUND", "SESSION_NOT_FOUND"


class PrefixNotHeldError(SessionError):
    """The session holds fewer tokens than base_length: call again with a held base_length.

    `metadata["held_length"]` is the number of held tokens.
    """

    code, reason = "OUT_OF_RANGE", "PREFIX_NOT_HELD"


class PrefixMismatchError(SessionError):
    """The session holds other tokens than the digest says: call again with the whole prefix."""

    code, reason = "FAILED_PRECONDITION", "PREFIX_MISMATCH"


class StaleCallError(SessionError):
    """A call with a higher sequence arrived before: drop this call."""

    code, reason = "ABORTED", "STALE_CALL"


class SupersededError(SessionError):
    """A newer call of the session replaced this call: drop it."""

    code, reason = "ABORTED", "SUPERSEDED"


class ModelMismatchError(PacelineError):
    """The server's model is not the expected one: pick another server."""

    code, reason = "FAILED_PRECONDITION", "MODEL_MISMATCH"


class ModelNotFoundError(PacelineError):
    """No target has the LoRA adapter that the request names: ask for another, or for none."""

    code, reason = "NOT_FOUND", "MODEL_NOT_FOUND"


class TokenizerMismatchError(PacelineError):
    """Drafter and target have different tokenizers: pair other models."""

    code, reason = "FAILED_PRECONDITION", "TOKENIZER_MISMATCH"


class TryAgainError(PacelineError):
    """The cause may pass: retry after `retry_after_seconds`, or at another server."""

    code = "UNAVAILABLE"


class CacheExhaustedError(TryAgainError):
    """There is no memory for another session, or for a longer text in a session."""

    code, reason = "RESOURCE_EXHAUSTED", "CACHE_EXHAUSTED"


class OverloadedError(TryAgainError):
    """There are too many requests at once."""

    code, reason = "RESOURCE_EXHAUSTED", "OVERLOADED"


class LoadingError(TryAgainError):
    """The server is still loading."""

    reason = "LOADING"


class DrainingError(TryAgainError):
    """The server is shutting down, or cancelled the call without a reason."""

    reason = "DRAINING"


class NoTargetError(TryAgainError):
    """No target is reachable."""

    reason = "NO_TARGET"


class ConnectionLostError(TryAgainError):
    """The connection broke or could not be made; no server reports this error."""


class DeadlineError(PacelineError):
    """The call's deadline passed: resume with a later deadline."""

    code, reason = "DEADLINE_EXCEEDED", "DEADLINE"


class SlowConsumerError(DeadlineError):
    """The client read nothing for too long: resume, and read faster."""

    reason = "SLOW_CONSUMER"


class ClientCancelledError(PacelineError):
    """The caller went away."""

    code, reason = "CANCELLED", "CLIENT_CANCELLED"


class InvariantViolatedError(PacelineError):
    """The stream was stopped before it could break a promise: report it."""

    code, reason = "DATA_LOSS", "INVARIANT_VIOLATED"


class InternalError(PacelineError):
    """A bug: report it. The server's log has it under the request id."""

    code, reason = "INTERNAL", "INTERNAL"


def error_classes() -> dict[str, type[PacelineError]]:
    """Map every reason to its class."""
    found: dict[str, type[PacelineError]] = {}
    waiting: list[type[PacelineError]] = [PacelineError]
    while waiting:
        cls = waiting.pop()
        if cls.reason and cls.reason not in found:
            found[cls.reason] = cls
        waiting.extend(cls.__subclasses__())
    return found
