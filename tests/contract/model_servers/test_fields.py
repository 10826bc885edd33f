"""Every field at its limits, and past them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

from paceline.v1 import drafter_service_pb2, session_service_pb2, target_service_pb2
from support.model_contract import PROMPT, Told, assert_names, assert_no_forward

if TYPE_CHECKING:
    from support.model_servers import ModelClient

VOCABULARY = Told("vocabulary_size")
LAST_TOKEN = Told("vocabulary_size", -1)
CONTEXT = Told("context_length")
SPEC_FIELDS = [
    # field, values at its limits, values past them
    ("sampling.temperature", [0.0, 100.0], [-0.1, 100.1, math.nan, math.inf, -math.inf]),
    ("sampling.top_k", [0, VOCABULARY], [Told("vocabulary_size", 1), 2**32 - 1]),
    ("sampling.top_p", [1e-300, 1.0], [0.0, 1.0000001, -1.0, math.nan, math.inf]),
    ("sampling.min_p", [0.0, 1.0], [-0.1, 1.1, math.nan]),
    ("seed", [0, 2**53 - 1], [2**53, 2**64 - 1]),
    ("verification_rule", [0, 1], [3, 99]),
    ("reserve_length", [1, CONTEXT], [0, Told("context_length", 1), 2**32 - 1]),
    ("limit_length", [64, CONTEXT], [0, 63, Told("context_length", 1), 2**32 - 1]),
    ("lease.seconds", [1, 300], [0, 301, -1, 2**63 - 1, -(2**63)]),
    ("lease.nanos", [], [999_999_999, -1]),
    ("request_id", ["", "a.b_c-9", "x" * 64], ["x" * 65, "a b", "ü", "a/b"]),
    ("share", ["", "a.b_c-9", "x" * 64], ["x" * 65, "a b", "ü", "a/b"]),
    ("expected_model_fingerprint", [], [""]),
]
CALL_FIELDS = [
    ("sequence", [1, 2**64 - 1], [0]),
    ("base_length", [0], [65, 2**32 - 1]),
    ("base_digest", [b""], [b"x", b"x" * 15, b"x" * 17]),
    (
        "token_ids",
        [[0], [LAST_TOKEN], [1] * 64],
        [[], [VOCABULARY], [2**31], [2**32 - 1], [1] * 65],
    ),
    ("expected_model_fingerprint", [], [""]),
]
VERIFY_FIELDS = [
    (
        "proposal.token_ids",
        [[0], [LAST_TOKEN], [1] * 60],
        [[VOCABULARY], [2**32 - 1], [1] * 61, [1] * 1025],
    ),
    ("proposal.parents", [[]], [[0], [0, 1]]),
    ("speculation_depth", [0, 65535], [65536, 2**32 - 1]),
]
DECODE_FIELDS = [
    ("max_tokens", [1, 60], [0, 61, 1025, 2**32 - 1]),
    ("end_token_ids", [[], [LAST_TOKEN], [1] * 64], [[VOCABULARY], [2**32 - 1], [1] * 65]),
    ("message_interval.seconds", [0, 1], [-1, 2, 2**40]),
]
DRAFT_FIELDS = [
    ("max_tokens", [1, 60], [0, 61, 1025, 2**32 - 1]),
    ("chunk_tokens", [0, 1, 64], [65, 2**32 - 1]),
    ("width", [0, 1, 16], [17, 2**32 - 1]),
    ("branch_count", [0, 64], [65, 2**32 - 1]),
]


def cases(prefix: str, table: list[tuple[str, list[Any], list[Any]]], *, good: bool) -> list[Any]:
    return [
        pytest.param(f"{prefix}{path}", value, id=f"{prefix}{path}={str(value)[:24]}")
        for path, at_limit, past_limit in table
        for value in (at_limit if good else past_limit)
    ]


def put(message: Any, path: str, value: Any, *, to: ModelClient) -> None:
    value = Told.put_in(value, to.info)
    *parents, name = path.split(".")
    for parent in parents:
        message = getattr(message, parent)
    if isinstance(value, list):
        del getattr(message, name)[:]
        getattr(message, name).extend(value)
    else:
        setattr(message, name, value)


@pytest.mark.parametrize(("path", "value"), cases("spec.", SPEC_FIELDS, good=False))
async def test_a_session_with_a_field_past_its_limits_is_refused(target, path, value):
    request = session_service_pb2.OpenSessionRequest(spec=target.spec())
    put(request, path, value, to=target)
    if path == "spec.lease.nanos":
        request.spec.lease.seconds = 0
    assert_names(await target.error_of(target.open_with(request.spec)), path)


@pytest.mark.parametrize(("path", "value"), cases("spec.", SPEC_FIELDS, good=True))
async def test_a_session_with_a_field_at_its_limits_is_opened(target, path, value):
    request = session_service_pb2.OpenSessionRequest(spec=target.spec())
    put(request, path, value, to=target)
    assert (await target.open_with(request.spec)).session_id


@pytest.mark.parametrize(
    ("path", "value"),
    cases("call.", CALL_FIELDS, good=False) + cases("", VERIFY_FIELDS, good=False),
)
async def test_a_verification_with_a_field_past_its_limits_runs_no_forward(target, path, value):
    session = await target.open()
    call = target.call(session, 1, new=PROMPT)
    request = target_service_pb2.VerifyRequest(call=call)
    put(request, path, value, to=target)
    assert_names(await target.error_of(target.verify_with(request)), path)
    assert_no_forward(target)
    assert (await target.verify(target.call(session, 2, new=PROMPT))).held_length == 4


@pytest.mark.parametrize(
    ("path", "value"), cases("call.", CALL_FIELDS, good=True) + cases("", VERIFY_FIELDS, good=True)
)
async def test_a_verification_with_a_field_at_its_limits_is_answered(target, path, value):
    session = await target.open()
    request = target_service_pb2.VerifyRequest(call=target.call(session, 1, new=PROMPT))
    put(request, path, value, to=target)
    assert (await target.verify_with(request)).next_token_id < target.info.vocabulary_size


@pytest.mark.parametrize(
    ("path", "value"),
    cases("call.", CALL_FIELDS, good=False) + cases("", DECODE_FIELDS, good=False),
)
async def test_a_decode_with_a_field_past_its_limits_runs_no_forward(target, path, value):
    session = await target.open()
    request = target_service_pb2.DecodeRequest(
        call=target.call(session, 1, new=PROMPT), max_tokens=1
    )
    put(request, path, value, to=target)
    error = await target.error_of(target.decode_with(request))
    assert_names(error, path.removesuffix(".seconds"))
    assert_no_forward(target)
    assert await target.decode(target.call(session, 2, new=PROMPT), 1)


@pytest.mark.parametrize(("path", "value"), cases("", DECODE_FIELDS, good=True))
async def test_a_decode_with_a_field_at_its_limits_is_answered(target, path, value):
    session = await target.open()
    request = target_service_pb2.DecodeRequest(
        call=target.call(session, 1, new=PROMPT), max_tokens=1
    )
    put(request, path, value, to=target)
    assert await target.decode_with(request)


@pytest.mark.parametrize(
    ("path", "value"), cases("call.", CALL_FIELDS, good=False) + cases("", DRAFT_FIELDS, good=False)
)
async def test_a_draft_with_a_field_past_its_limits_runs_no_forward(drafter, path, value):
    session = await drafter.open()
    call = drafter.call(session, 1, new=PROMPT)
    request = drafter_service_pb2.DraftRequest(call=call, max_tokens=1)
    put(request, path, value, to=drafter)
    error = await drafter.error_of(drafter.draft_with(request))
    assert_names(error, path)
    assert_no_forward(drafter)


@pytest.mark.parametrize(("path", "value"), cases("", DRAFT_FIELDS, good=True))
async def test_a_draft_with_a_field_at_its_limits_is_answered(drafter, path, value):
    session = await drafter.open()
    call = drafter.call(session, 1, new=PROMPT)
    request = drafter_service_pb2.DraftRequest(call=call, max_tokens=1)
    put(request, path, value, to=drafter)
    assert await drafter.draft_with(request)
