from __future__ import annotations

import re
from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from paceline import errors
from paceline.status import DETAILS_KEY, decode, encode
from paceline.v1.error_reason_pb2 import ErrorReason


def received(code: str, message: str, details: bytes | None) -> grpc.aio.AioRpcError:
    trailers = grpc.aio.Metadata(*([(DETAILS_KEY, details)] if details is not None else []))
    return grpc.aio.AioRpcError(grpc.StatusCode[code], grpc.aio.Metadata(), trailers, message)


def sent(error: errors.PacelineError) -> grpc.aio.AioRpcError:
    return received(error.code, error.message, encode(error).SerializeToString())


def test_every_reason_of_the_proto_has_a_class_and_every_class_a_reason():
    names = {name.removeprefix("ERROR_REASON_") for name in ErrorReason.DESCRIPTOR.values_by_name}
    assert set(errors.error_classes()) == names - {"UNSPECIFIED"}


def test_every_reason_has_the_code_that_the_proto_says():
    proto = Path(__file__).parents[3] / "protos" / "paceline" / "v1" / "error_reason.proto"
    # Each has a comment before it, whose first word is the code.
    first = r"(?<=[;{])\n +// ([A-Z_]+)\. "
    said = re.findall(first + r"(?:.*\n)(?: +//.*\n)* +ERROR_REASON_(\w+) = ", proto.read_text())
    codes = {reason: each.code for reason, each in errors.error_classes().items()}
    assert {reason: code for code, reason in said} == codes


@pytest.mark.parametrize("reason", sorted(errors.error_classes()))
def test_an_error_arrives_as_it_was_raised(reason):
    error = errors.error_classes()[reason](
        "what is wrong",
        metadata={"held_length": "7"},
        violations=(errors.FieldViolation("call.sequence", "must be 1 or more"),),
        retry_after_seconds=0.25,
    )
    arrived = decode(sent(error))
    assert type(arrived) is type(error)
    for name in ("message", "metadata", "violations", "retry_after_seconds"):
        assert getattr(arrived, name) == getattr(error, name)


def test_an_error_without_extras_arrives_without_them():
    arrived = decode(sent(errors.StaleCallError("old")))
    assert (arrived.metadata, arrived.violations, arrived.retry_after_seconds) == ({}, (), None)


def test_the_lost_connection_has_no_reason_and_is_still_the_same_class():
    error = errors.ConnectionLostError("broken pipe")
    assert not encode(error).details
    assert type(decode(sent(error))) is errors.ConnectionLostError


@pytest.mark.parametrize("code", [code.name for code in grpc.StatusCode if code.name != "OK"])
def test_every_bare_code_has_a_class(code):
    assert isinstance(decode(received(code, "", None)), errors.PacelineError)


@pytest.mark.parametrize(
    ("code", "error_class"),
    [
        ("UNAVAILABLE", errors.ConnectionLostError),
        ("DEADLINE_EXCEEDED", errors.DeadlineError),
        ("CANCELLED", errors.DrainingError),
        ("INTERNAL", errors.InternalError),
        ("UNKNOWN", errors.InternalError),
        ("UNAUTHENTICATED", errors.UnauthenticatedError),
        ("RESOURCE_EXHAUSTED", errors.InvalidFieldError),
    ],
)
def test_what_the_transport_says_has_its_class(code, error_class):
    assert type(decode(received(code, "text", None))) is error_class


def test_what_the_transport_says_of_a_deadline_is_in_our_words():
    error = decode(received("DEADLINE_EXCEEDED", "Stream removed (Deadline Exceeded)", None))
    assert error.message == "the call's deadline passed"
    ours = encode(errors.SlowConsumerError("read faster")).SerializeToString()
    assert decode(received("DEADLINE_EXCEEDED", "text", ours)).message == "read faster"


def test_a_lack_without_a_reason_may_pass_if_the_server_says_when():
    status = Status(code=8)
    status.details.add().Pack(RetryInfo(retry_delay=Duration(seconds=2)))
    arrived = decode(received("RESOURCE_EXHAUSTED", "text", status.SerializeToString()))
    assert type(arrived) is errors.OverloadedError
    assert arrived.retry_after_seconds == 2


@pytest.mark.parametrize(
    "details",
    [
        b"",
        b"\xff\xff",
        Status(code=14, message="proxy").SerializeToString(),
        encode(errors.DrainingError("x")).SerializeToString().replace(b"DRAINING", b"NEWREASN"),
        encode(errors.DrainingError("x")).SerializeToString().replace(b"paceline", b"fakeline"),
    ],
    ids=["empty", "garbage", "no reason", "a later version's reason", "another domain"],
)
def test_details_that_are_not_ours_leave_the_class_to_the_code(details):
    assert type(decode(received("UNAVAILABLE", "text", details))) is errors.ConnectionLostError


def test_a_status_fits_into_the_trailers_whatever_the_error_says():
    violations = tuple(errors.FieldViolation("f" * 5000, "d" * 5000) for _ in range(100))
    error = errors.InvalidFieldError("m" * 100_000, violations=violations)
    assert len(encode(error).SerializeToString()) < 3000  # of 8192, and base64 adds a third


@pytest.mark.parametrize("seconds", [-1, -(10**18), 10**18, 315_576_000_001])
def test_a_time_to_come_back_that_makes_no_sense_is_none(seconds):
    status = Status(code=8, message="full")
    status.details.add().Pack(RetryInfo(retry_delay=Duration(seconds=seconds)))
    arrived = decode(received("RESOURCE_EXHAUSTED", "full", status.SerializeToString()))
    assert isinstance(arrived, errors.OverloadedError)
    assert arrived.retry_after_seconds is None


def test_of_a_long_message_the_beginning_is_read():
    arrived = decode(received("INTERNAL", "x" * 7000, None))
    assert 256 <= len(arrived.message) <= 1024
