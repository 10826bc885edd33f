"""Which large requests are worth parsing.

A parser makes up to twenty times its bytes of a message: 28 MiB of empty distributions are 580 MiB,
and take 1.6 s in which the event loop does nothing else. So what is large is looked at before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from paceline.errors import InvalidFieldError, MalformedRequestError
from paceline.v1.session_service_pb2 import SessionCall
from paceline_engine.calls import VerificationRule

if TYPE_CHECKING:
    from paceline_model_server.host import Host

__all__ = ["check_large_request"]

# A block of 1024 ids, and all that is not a list.
_SMALL_BYTES = 1 << 16
_ID_BYTES = 5  # the longest varint of a uint32
_CALL_TAG = b"\x0a"  # field 1, length-delimited


def check_large_request(raw: bytes, *, host: Host, caller: str) -> None:
    """Let a large request pass if it is a call of a session that may be as large.

    A prompt takes what the context length says. More than that may only be distributions, in a
    session under REJECTION; there gRPC's own limit holds.

    Raises:
        InvalidFieldError: it is too large for its session, or for what it is.
        MalformedRequestError: it does not begin with its call, as every protobuf library has it.
        SessionNotFoundError: there is no such session, or it is not the caller's.
        LoadingError: the model is not loaded yet.
    """
    if len(raw) <= _SMALL_BYTES:
        return
    limit_bytes = _SMALL_BYTES + _ID_BYTES * host.description.context_length
    call = _leading_call(raw, limit_bytes=limit_bytes)
    spec = host.spec_of(call.session_id, caller=caller)
    if spec.rule is not VerificationRule.REJECTION and len(raw) > limit_bytes:
        raise _too_large(len(raw), limit_bytes)


def _leading_call(raw: bytes, *, limit_bytes: int) -> SessionCall:
    """Parse a request's first field alone."""
    length, start = _varint(raw, 1)
    if length > limit_bytes:
        raise _too_large(length, limit_bytes)
    call = raw[start : start + length]
    if raw[:1] != _CALL_TAG or len(call) != length:
        raise MalformedRequestError("a large request has to begin with its call")
    try:
        return SessionCall.FromString(call)
    except DecodeError:
        raise MalformedRequestError("the bytes are not the request message") from None


def _varint(raw: bytes, start: int) -> tuple[int, int]:
    """Return the number at a place, and where it ends."""
    value = 0
    for index in range(start, min(start + _ID_BYTES, len(raw))):
        value |= (raw[index] & 0x7F) << 7 * (index - start)
        if raw[index] < 0x80:
            return value, index + 1
    raise MalformedRequestError("the bytes are not the request message")


def _too_large(byte_count: int, limit_bytes: int) -> InvalidFieldError:
    return InvalidFieldError(f"the message has {byte_count} bytes, at most {limit_bytes} are taken")
