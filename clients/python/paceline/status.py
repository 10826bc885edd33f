"""Turns a `PacelineError` into a `google.rpc.Status`, and back into the same class.

The status travels in the trailers, which share an 8 KiB limit with all other metadata, so `encode`
shortens the parts that could grow without bound.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, cast

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from paceline import errors

if TYPE_CHECKING:
    from collections.abc import Iterable

    from google.protobuf.message import Message

DETAILS_KEY = "grpc-status-details-bin"
_DOMAIN = "paceline"
_TEXT_LIMIT = 256
_VIOLATION_LIMIT = 4
# The most that is read of a peer's answer: the peer may be a proxy or a server of another kind,
# with longer texts. A retry time that is negative, or beyond a Duration's limit, is ignored.
_READ_TEXT_LIMIT = 1024
_MOST_RETRY_SECONDS = 315_576_000_000.0

# The meaning of a status without a reason of ours: the transport's, a proxy's, a newer server's.
# gRPC itself answers RESOURCE_EXHAUSTED to a message that is too large: sending it again is
# useless. Its servers answer CANCELLED to calls that they cut, or that arrive, as they stop
# (grpc/grpc#41785).
_CLASS_OF_CODE: dict[str, type[errors.PacelineError]] = {
    "CANCELLED": errors.DrainingError,
    "DEADLINE_EXCEEDED": errors.DeadlineError,
    "INVALID_ARGUMENT": errors.InvalidFieldError,
    "PERMISSION_DENIED": errors.PermissionDeniedError,
    "RESOURCE_EXHAUSTED": errors.InvalidFieldError,
    "UNAUTHENTICATED": errors.UnauthenticatedError,
    "UNAVAILABLE": errors.ConnectionLostError,
    "UNIMPLEMENTED": errors.UnsupportedError,
}

# gRPC's words for a deadline that passed here, also inside others: "Stream removed (...)".
_GRPC_DEADLINE = "Deadline Exceeded"


def encode(error: errors.PacelineError) -> Status:
    """Turn an error into its status.

    A class without a reason (ConnectionLostError) becomes its bare code, as the transport's would.
    """
    code: tuple[int, str] = grpc.StatusCode[error.code].value
    status = Status(code=code[0], message=error.message[:_TEXT_LIMIT])
    details: list[Message] = []
    if error.reason:
        details.append(
            ErrorInfo(reason=error.reason, domain=_DOMAIN, metadata=error.metadata),
        )
    if error.retry_after_seconds is not None:
        details.append(RetryInfo(retry_delay=_duration(error.retry_after_seconds)))
    if error.violations:
        details.append(
            BadRequest(
                field_violations=[
                    BadRequest.FieldViolation(
                        field=violation.field[:_TEXT_LIMIT],
                        description=violation.description[:_TEXT_LIMIT],
                    )
                    for violation in error.violations[:_VIOLATION_LIMIT]
                ],
            ),
        )
    for detail in details:
        status.details.add().Pack(detail)
    return status


def decode(rpc_error: grpc.RpcError) -> errors.PacelineError:
    """Rebuild the error that a server raised, or name the transport's error.

    Never fails: if the details are not a `google.rpc.Status`, or have no reason that this version
    knows, the status code decides the class. A call that this side cancelled looks like a call
    that the server cancelled: the caller has to know, and not to call this for its own cancels.
    """
    code = rpc_error.code().name
    status = _status_of(rpc_error)
    info, retry, bad_request = ErrorInfo(), RetryInfo(), BadRequest()
    for detail in status.details:
        for message in (info, retry, bad_request):
            with suppress(DecodeError):
                detail.Unpack(message)  # does nothing if it is of another type
    known = errors.error_classes() if info.domain == _DOMAIN else {}
    may_pass = retry.HasField("retry_delay")
    seconds = _seconds(retry.retry_delay)
    error_class = known.get(info.reason) or _class_of(code, may_pass=may_pass)
    text = (status.message or rpc_error.details() or code)[:_READ_TEXT_LIMIT]
    if error_class is errors.DeadlineError and _GRPC_DEADLINE in text:
        text = "the call's deadline passed"
    return error_class(
        text,
        metadata=dict(info.metadata),
        violations=tuple(
            errors.FieldViolation(violation.field, violation.description)
            for violation in bad_request.field_violations
        ),
        retry_after_seconds=seconds if may_pass and 0 <= seconds <= _MOST_RETRY_SECONDS else None,
    )


def _class_of(code: str, *, may_pass: bool) -> type[errors.PacelineError]:
    if code == "RESOURCE_EXHAUSTED" and may_pass:
        return errors.OverloadedError
    return _CLASS_OF_CODE.get(code, errors.InternalError)


def _status_of(rpc_error: grpc.RpcError) -> Status:
    trailers = cast("Iterable[tuple[str, bytes]]", rpc_error.trailing_metadata() or ())
    for key, value in trailers:
        if key == DETAILS_KEY:
            with suppress(DecodeError):
                return Status.FromString(value)
    return Status()


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9  # ToTimedelta refuses values out of bounds


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration
