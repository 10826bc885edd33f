"""The largest messages there can be, larger ones, and bytes that are none."""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace

import grpc
import pytest
from prometheus_client import CollectorRegistry

from paceline.errors import InvalidFieldError, MalformedRequestError, SessionNotFoundError
from paceline.status import decode
from paceline.v1 import sampling_pb2, target_service_pb2
from paceline_engine.terms.calls import SessionSpec
from paceline_model_server.records import CallRecorder
from support.fake_models import Capability
from support.model_contract import PROMPT, a_host
from support.model_servers import TARGET


def varint(value: int) -> bytes:
    low = b""
    while value > 0x7F:
        low, value = low + bytes([value & 0x7F | 0x80]), value >> 7
    return low + bytes([value])


def field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + varint(len(content)) + content


LARGE = 2 << 20
NO_SESSION = field(1, field(1, b"nobody's"))
EMPTY_DISTRIBUTIONS = field(2, field(3, b"") * (LARGE // 2))
LARGE_REQUESTS = {
    "two million token ids": field(1, field(1, b"nobody's") + field(5, b"\x01" * LARGE)),
    "a million empty distributions": NO_SESSION + EMPTY_DISTRIBUTIONS,
    "a call that is not the first field": EMPTY_DISTRIBUTIONS + NO_SESSION,
    "a length that has no end": b"\x0a" + b"\xff" * LARGE,
    "a call that is cut off": b"\x0a" + varint(70_000) + b"\x0a" * 69_000,
    "bytes that are no call": field(1, b"\xff" * 70_000),
}


@pytest.mark.parametrize("raw", LARGE_REQUESTS.values(), ids=LARGE_REQUESTS)
async def test_a_large_message_without_a_session_is_refused(target, raw):
    verify = target.channel.unary_unary("/paceline.v1.TargetService/Verify")
    with pytest.raises(grpc.RpcError) as caught:
        await verify(raw, timeout=60)
    error = decode(caught.value)
    assert isinstance(error, InvalidFieldError | MalformedRequestError | SessionNotFoundError)


@pytest.mark.needs(Capability.GUARDED_PARSING)
async def test_a_message_that_is_too_large_for_its_session_is_refused(target):
    session = await target.open()
    call = target.call(session, 1, new=PROMPT).SerializeToString()
    verify = target.channel.unary_unary("/paceline.v1.TargetService/Verify")
    with pytest.raises(grpc.RpcError) as caught:
        await verify(field(1, call) + EMPTY_DISTRIBUTIONS, timeout=60)
    error = decode(caught.value)
    assert isinstance(error, InvalidFieldError)
    assert "at most" in error.message


async def test_the_longest_prompt_there_can_be_is_taken(target):
    length = target.info.context_length
    session = await target.open(reserve_length=length)
    prompt = [target.info.vocabulary_size - 1] * length
    answer = await target.verify(target.call(session, 1, new=prompt))
    assert answer.prefix_length == length


async def test_the_longest_block_there_can_be_is_taken(target):
    count, size = 1024, min(4096, target.info.vocabulary_size)
    session = await target.open(
        reserve_length=len(PROMPT) + count,
        verification_rule=sampling_pb2.VERIFICATION_RULE_REJECTION,
    )
    drawn_from = sampling_pb2.SparseDistribution(
        token_ids=range(size), probabilities=[1 / size] * size
    )
    call = target.call(session, 1, new=PROMPT)
    answer = await target.verify(call, [1] * count, distributions=[drawn_from] * count)
    assert answer.held_length == len(PROMPT) + len(answer.accepted_path)


@pytest.mark.parametrize("session", ["nobody's", ""])
async def test_nothing_is_made_of_a_message_before_its_session_is_found(session):
    """Unless its lists lie in the message as they came, they take 30 times as much."""
    host = a_host()
    await host.start()
    servicer = TARGET.servicer(host, CallRecorder(CollectorRegistry(), role="target"))
    session = session or host.open_session(SessionSpec(9)).session_id
    request = target_service_pb2.VerifyRequest(
        proposal={"token_ids": range(300_000), "parents": range(300_000)}
    )
    request.call.expected_model_fingerprint = host.description.fingerprint
    request.call.session_id, request.call.sequence = session, 1
    request.call.token_ids.extend(range(300_000))
    for _ in range(1024):
        request.proposal.distributions.add(token_ids=range(1000), probabilities=[0.001] * 1000)
    context = SimpleNamespace(auth_context=dict)
    tracemalloc.start()
    try:
        with pytest.raises((SessionNotFoundError, InvalidFieldError)):
            await servicer.Verify(request, context)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 200_000


@pytest.mark.parametrize(
    "method",
    ["TargetService/Verify"]
    + [f"SessionService/{verb}Session" for verb in ("Open", "Renew", "Close")],
)
@pytest.mark.parametrize("raw", [b"\xff\xff\xff", b"\x0a\x7f", b"\x00", b"secret prompt"], ids=repr)
async def test_malformed_bytes_are_the_clients_fault(target, method, raw):
    call = target.channel.unary_unary(f"/paceline.v1.{method}")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(raw, timeout=60)
    error = decode(caught.value)
    assert (error.code, error.reason) == ("INVALID_ARGUMENT", "MALFORMED_REQUEST")
    assert "secret" not in str(caught.value)


async def test_malformed_bytes_of_a_stream_are_the_clients_fault(drafter):
    call = drafter.channel.unary_stream("/paceline.v1.DrafterService/Draft")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call(b"\xff\xff\xff", timeout=60):
            pass
    assert decode(caught.value).reason == "MALFORMED_REQUEST"
