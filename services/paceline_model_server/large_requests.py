"""A check of large requests before they are parsed.

A parsed message can take twenty times its bytes: 28 MiB of empty distributions become 580 MiB, and
parsing them takes 0.5 s, in which the event loop does nothing else. So large requests are checked
first. A request that passes has no more parts than its session can use, and no part that is longer
than allowed. The worst such request, 28 MiB of short ids in the distributions of 1024 draft tokens,
takes 230 MiB and 0.2 s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from paceline.errors import InvalidFieldError, MalformedRequestError
from paceline.v1.session_service_pb2 import SessionCall
from paceline_contract.calls import VerificationRule
from paceline_engine.terms.validation import MOST_ENTRIES, MOST_TOKENS
from paceline_serving.wire_format import fields_of, varint

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline_engine.sessions.host import ModelHost

# A block of 1024 ids, and all fields that are not lists.
_SMALL_BYTES = 1 << 16
_ID_BYTES = 5  # the longest varint of a uint32
_PROBABILITY_BYTES = 4
_CALL_TAG = 0x0A  # field 1, length-delimited
_PROPOSAL_TAG = 0x12  # field 2 of VerifyRequest, length-delimited
_DISTRIBUTION_TAG = 0x1A  # field 3 of Proposal, length-delimited
# The tags and lengths of a distribution and of its two lists.
_DISTRIBUTION_FRAME_BYTES = 3 * (1 + _ID_BYTES)
# A request and its proposal have seven fields. Some senders have a field for each entry of a list.
_MOST_OTHER_FIELDS = 4 * MOST_TOKENS


def check_large_request(raw: bytes, *, host: ModelHost, caller: str) -> None:
    """Let a large request pass if it is a call of a session that can use all of it.

    That is a prompt as long as the context, and in a session under REJECTION the distributions of
    the longest proposal that it takes: one for each token up to 1024 or the session's own limit,
    each with 4096 entries or as many as the vocabulary has.

    Cost: 1 ms for the longest proposal. Nothing but the call and the proposal is looked into.

    Raises:
        InvalidFieldError: it is too large for its session, or for what it is.
        MalformedRequestError: it is no message, or does not begin with its call, as every protobuf
            library has it.
        SessionNotFoundError: there is no such session, or it is not the caller's.
        LoadingError: the model is not loaded yet.
    """
    if len(raw) <= _SMALL_BYTES:
        return
    model = host.description
    limit_bytes = _SMALL_BYTES + _ID_BYTES * model.context_length
    try:
        call = _leading_call(raw, limit_bytes=limit_bytes)
        spec = host.spec_of(call.session_id, caller=caller)
        is_rejection = spec.rule is VerificationRule.REJECTION
        _check_fields(
            raw,
            limit_bytes=limit_bytes,
            block=min(MOST_TOKENS, spec.longest_length) if is_rejection else 0,
            distribution_bytes=_largest_distribution(model.vocabulary_size),
        )
    except DecodeError:
        raise MalformedRequestError("the bytes are not the request message") from None


def _check_fields(raw: bytes, *, limit_bytes: int, block: int, distribution_bytes: int) -> None:
    """Check how many fields there are, and how long they are.

    Args:
        limit_bytes: The most bytes of all fields but distributions.
        block: The most distributions.
        distribution_bytes: The most bytes of a distribution.
    """
    distribution_count = other_count = other_bytes = 0
    for is_distribution, byte_count in _parts(raw):
        if is_distribution:
            if distribution_count == block:
                raise InvalidFieldError.of(
                    "proposal.distributions", f"has more entries, at most {block} are taken"
                )
            if byte_count > distribution_bytes:
                raise InvalidFieldError.of(
                    f"proposal.distributions[{distribution_count}]",
                    f"has {byte_count} bytes, at most {distribution_bytes} are taken",
                )
            distribution_count += 1
        else:
            other_count, other_bytes = other_count + 1, other_bytes + byte_count
            if other_bytes > limit_bytes:
                raise _too_large(len(raw), limit_bytes)
            if other_count > _MOST_OTHER_FIELDS:
                raise InvalidFieldError(f"the message has more than {_MOST_OTHER_FIELDS} fields")


def _parts(raw: bytes) -> Iterator[tuple[bool, int]]:
    """Yield each field of a request and its proposals: whether it is a distribution, its bytes."""
    for field in fields_of(raw):
        if field.tag != _PROPOSAL_TAG:
            yield False, field.end - field.start
            continue
        yield False, field.content - field.start
        for inner in fields_of(raw, start=field.content, limit=field.end):
            yield inner.tag == _DISTRIBUTION_TAG, inner.end - inner.start


def _leading_call(raw: bytes, *, limit_bytes: int) -> SessionCall:
    """Parse a request's first field alone."""
    length, start = varint(raw, 1)
    if length > limit_bytes:
        raise _too_large(length, limit_bytes)
    call = raw[start : start + length]
    if raw[0] != _CALL_TAG or len(call) != length:
        raise MalformedRequestError("a large request has to begin with its call")
    return SessionCall.FromString(call)


def _largest_distribution(vocabulary_size: int) -> int:
    """Return the bytes of a distribution with the most tokens that are allowed."""
    id_bytes = -(-vocabulary_size.bit_length() // 7)
    entries = min(MOST_ENTRIES, vocabulary_size)
    return _DISTRIBUTION_FRAME_BYTES + entries * (id_bytes + _PROBABILITY_BYTES)


def _too_large(byte_count: int, limit_bytes: int) -> InvalidFieldError:
    return InvalidFieldError(f"the message has {byte_count} bytes, at most {limit_bytes} are taken")
