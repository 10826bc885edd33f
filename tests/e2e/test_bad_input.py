"""Bad input meets the documented error, runs no forward and harms nobody, on real processes."""

from __future__ import annotations

import math
from contextlib import asynccontextmanager

import grpc
import pytest

from paceline import errors
from paceline.status import decode
from paceline.v1 import drafter_service_pb2 as drafter_pb
from paceline.v1 import orchestrator_service_pb2 as orchestrator_pb
from paceline.v1 import orchestrator_service_pb2_grpc as orchestrator_grpc
from paceline.v1 import session_service_pb2 as session_pb
from paceline.v1 import target_service_pb2 as target_pb
from support.model_servers import DRAFTER, TARGET, ModelClient
from support.prefix_digest import prefix_digest
from support.streams import PROMPT, plain
from support.system import System, simulated_model
from support.waiting import eventually

TIMEOUT = 30.0
NOT_NUMBERS = (math.nan, math.inf, -math.inf, -1.0)
HUGE = 2**32 - 1
INVALID, CONTEXT = errors.InvalidFieldError, errors.ContextLengthExceededError

# What a request is given, and the field that the error names. {size}: the vocabulary's.
BAD_REQUESTS = [
    ({"text": ""}, "text"),
    ({"token_ids": {"ids": []}}, "token_ids"),
    ({"token_ids": {"ids": [1, 2**31]}}, "token_ids.ids"),
    ({"token_ids": {"ids": [HUGE]}}, "token_ids.ids"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"stop_strings": [""]}, "stop_strings"),
    ({"stop_strings": ["x" * 1025]}, "stop_strings"),
    ({"stop_strings": ["x"] * 65}, "stop_strings"),
    *(({"sampling": {"temperature": value}}, "sampling.temperature") for value in NOT_NUMBERS),
    ({"sampling": {"temperature": 100.001}}, "sampling.temperature"),
    ({"sampling": {"top_k": HUGE}}, "sampling.top_k"),
    ({"sampling": {"logit_bias": {HUGE: 1.0}}}, "sampling.logit_bias"),
    ({"sampling": {"presence_penalty": 2.1}}, "sampling.presence_penalty"),
    ({"sampling": {"repetition_penalty": 1e-38}}, "sampling.repetition_penalty"),
    ({"sampling": {"grammar": {}}}, "sampling.grammar"),
    *(({"sampling": {"top_p": value}}, "sampling.top_p") for value in (*NOT_NUMBERS, 0.0, 1.001)),
    *(({"sampling": {"min_p": value}}, "sampling.min_p") for value in (*NOT_NUMBERS, 1.001)),
    ({"seed": 2**53}, "seed"),
    ({"seed": 2**64 - 1}, "seed"),
    ({"strategy": 99}, "strategy"),
    ({"lookahead": 0}, "lookahead"),
    ({"lookahead": 65}, "lookahead"),
    ({"target_count": 0}, "target_count"),
    ({"target_count": 65}, "target_count"),
    ({"drafter_count": 0}, "drafter_count"),
    ({"drafter_count": 9}, "drafter_count"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 21, "max_tokens": 0}, "prompt_logprobs"),
    ({"verification_rule": 99}, "verification_rule"),
    ({"dispatch_policy": 99}, "dispatch_policy"),
    ({"resume_token_ids": [1], "sampling": {"temperature": 1.0}}, "resume_token_ids"),
    ({"resume_token_ids": [HUGE]}, "resume_token_ids"),
    ({"resume_token_ids": [1] * 5}, "resume_token_ids"),
    ({"request_id": "x" * 65}, "request_id"),
    ({"request_id": "no spaces"}, "request_id"),
    ({"lora": "no spaces"}, "lora"),
]
EXTREME_REQUESTS = [
    {"sampling": {"temperature": 100.0, "top_p": 1.0, "min_p": 1.0}, "seed": 2**53 - 1},
    {"sampling": {"temperature": 5e-324, "top_p": 5e-324, "min_p": 0.0, "top_k": 1}, "seed": 0},
    {"sampling": {"temperature": 1.0, "top_k": 2048}},
    {"lookahead": 64, "target_count": 64, "drafter_count": 8},
    {"lookahead": 1, "target_count": 1, "drafter_count": 1, "max_tokens": 1},
    {"stop_strings": ["x" * 1024] * 64, "request_id": "x" * 64},
    {"token_ids": {"ids": [2047]}},
    {"resume_token_ids": [5, 6, 7]},
]
BAD_SPECS = [
    *(({"sampling": {"temperature": value}}, "spec.sampling.temperature") for value in NOT_NUMBERS),
    *(({"sampling": {"top_p": value}}, "spec.sampling.top_p") for value in (*NOT_NUMBERS, 0.0)),
    *(({"sampling": {"min_p": value}}, "spec.sampling.min_p") for value in NOT_NUMBERS),
    ({"sampling": {"top_k": HUGE}}, "spec.sampling.top_k"),
    ({"seed": 2**53}, "spec.seed"),
    ({"reserve_length": 0}, "spec.reserve_length"),
    ({"reserve_length": HUGE}, "spec.reserve_length"),
    ({"lease": {"seconds": 0, "nanos": 999_999_999}}, "spec.lease"),
    ({"lease": {"seconds": 300, "nanos": 1}}, "spec.lease"),
    ({"lease": {"seconds": -1}}, "spec.lease"),
    ({"verification_rule": 99}, "spec.verification_rule"),
    ({"request_id": "x" * 65}, "spec.request_id"),
]
BAD_CALLS = [
    ({"sequence": 0}, "call.sequence", INVALID),
    ({"token_ids": []}, "call.token_ids", INVALID),
    ({"token_ids": [2048]}, "call.token_ids[0]", INVALID),
    ({"token_ids": [1, HUGE]}, "call.token_ids[1]", INVALID),
    ({"token_ids": [1] * 65}, "call.token_ids", INVALID),
    ({"base_length": 65}, "call.base_length", INVALID),
    ({"base_length": 1, "base_digest": b"short"}, "call.base_digest", INVALID),
    ({"base_length": 1, "base_digest": prefix_digest([1])}, "", errors.PrefixNotHeldError),
    ({"session_id": "nobody"}, "", errors.SessionNotFoundError),
    ({"session_id": ""}, "", errors.SessionNotFoundError),
    ({"expected_model_fingerprint": "another"}, "", errors.ModelMismatchError),
]
MODEL_ROLES = (TARGET, DRAFTER)
RESERVED = 64
PREFIX = (1, 2, 3)
CERTAIN = {"token_ids": [1], "probabilities": [1.0]}


def raised_by(call, *arguments):
    """Make a call that must fail, and return the typed error that a client would raise."""
    with pytest.raises(grpc.RpcError) as raised:
        read_all(call(*arguments, timeout=TIMEOUT))
    assert raised.value.code() not in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
    return decode(raised.value)


def read_all(answer):
    return list(answer) if hasattr(answer, "__next__") else [answer]


def fields(error):
    return {violation.field for violation in error.violations}


def request(**changes):
    asked = {"max_tokens": 4, "strategy": "STRATEGY_DISTRIBUTED"}
    if "token_ids" not in changes:
        asked["text"] = PROMPT
    return orchestrator_pb.GenerateRequest(**asked | changes)


def forwards(system):
    return [server.metric("paceline_forwards_total") for server in system.models]


@pytest.fixture
def unharmed(bundled):
    """The system, in which a test runs no forward and after which all is as before."""
    with bundled.client() as client:
        before = plain(client, max_tokens=8)
    eventually(lambda: not open_sessions(bundled), what="sessions are closed")
    count = forwards(bundled)
    yield bundled
    assert forwards(bundled) == count
    assert not open_sessions(bundled)
    with bundled.client() as client:
        assert plain(client, max_tokens=8) == before


def open_sessions(system):
    return sum(server.metric("paceline_sessions_active") for server in system.models)


def test_every_bad_field_of_a_request_is_named(unharmed):
    with grpc.insecure_channel(unharmed.orchestrators[0].address) as channel:
        stub = orchestrator_grpc.OrchestratorServiceStub(channel)
        for changes, field in BAD_REQUESTS:
            error = raised_by(stub.Generate, request(**changes))
            assert type(error) is INVALID, changes
            assert field in fields(error), (changes, error.violations)


def test_a_request_without_a_prompt_is_refused(unharmed):
    with grpc.insecure_channel(unharmed.orchestrators[0].address) as channel:
        stub = orchestrator_grpc.OrchestratorServiceStub(channel)
        error = raised_by(stub.Generate, orchestrator_pb.GenerateRequest(max_tokens=1))
    assert "prompt" in fields(error)


def test_a_prompt_over_the_context_is_refused(unharmed):
    with unharmed.client() as client:
        context = client.info().context_length
    with grpc.insecure_channel(unharmed.orchestrators[0].address) as channel:
        stub = orchestrator_grpc.OrchestratorServiceStub(channel)
        for length, max_tokens in ((context, 1), (context + 1, 1), (context - 3, 4)):
            tokens = {"ids": [5] * length}
            error = raised_by(stub.Generate, request(token_ids=tokens, max_tokens=max_tokens))
            assert type(error) is CONTEXT, length
        error = raised_by(stub.Generate, request(max_tokens=HUGE))
        assert type(error) is CONTEXT


def test_requests_at_the_limits_are_served(bundled):
    with grpc.insecure_channel(bundled.orchestrators[0].address) as channel:
        stub = orchestrator_grpc.OrchestratorServiceStub(channel)
        for changes in EXTREME_REQUESTS:
            responses = list(stub.Generate(request(**changes), timeout=TIMEOUT))
            assert responses[-1].WhichOneof("event") == "finished", changes


@pytest.mark.parametrize("role", ["orchestrator", "target", "drafter"])
def test_malformed_bytes_are_refused(role, unharmed):
    server = {
        "orchestrator": unharmed.orchestrators,
        "target": unharmed.targets,
        "drafter": unharmed.drafters,
    }[role][0]
    names = {
        "orchestrator": ["OrchestratorService/Generate", "OrchestratorService/GetSystemInfo"],
        "target": ["TargetService/Verify", "SessionService/OpenSession"],
        "drafter": ["DrafterService/Draft", "SessionService/OpenSession"],
    }
    with grpc.insecure_channel(server.address) as channel:
        for name in names[role]:
            streams = name.endswith(("Generate", "Draft"))
            kind = channel.unary_stream if streams else channel.unary_unary
            for content in (b"\xff" * 40, b"\x0a\xff\xff\xff\xff\x0f", b"\x00"):
                error = raised_by(kind(f"/paceline.v1.{name}"), content)
                assert type(error) is errors.MalformedRequestError, (name, content)


@pytest.mark.parametrize("role", MODEL_ROLES, ids=lambda role: role.name)
async def test_every_bad_field_of_a_session_is_named(role, unharmed):
    async with asking(unharmed, role) as client:
        for changes, field in BAD_SPECS:
            error = await client.error_of(client.open(**changes))
            assert type(error) is INVALID, changes
            assert field in fields(error), (changes, error.violations)
        error = await client.error_of(client.open(expected_model_fingerprint="another"))
        assert type(error) is errors.ModelMismatchError


@pytest.mark.parametrize("role", MODEL_ROLES, ids=lambda role: role.name)
async def test_every_bad_call_is_refused_and_the_next_good_one_is_served(role, bundled):
    async with asking(bundled, role) as client:
        session_id = await client.open(reserve_length=RESERVED)
        before = forwards(bundled)
        for sequence, (changes, field, expected) in enumerate(BAD_CALLS, start=1):
            call = client.call(session_id, sequence, new=PREFIX)
            for name in changes:
                call.ClearField(name)
            call.MergeFrom(session_pb.SessionCall(**changes))
            error = await client.error_of(work(client, role, call))
            assert type(error) is expected, changes
            assert not field or field in fields(error), (changes, error.violations)
        good = client.call(session_id, 50, new=PREFIX)
        for request in bad_work(role, good):
            send = client.verify_with if role is TARGET else client.draft_with
            assert type(await client.error_of(send(request))) is INVALID, request
        assert forwards(bundled) == before
        assert await work(client, role, good)
        assert forwards(bundled) != before
        error = await client.error_of(work(client, role, good))
        assert type(error) is errors.StaleCallError
        foreign = client.call(session_id, 51, held=[9], new=PREFIX)
        error = await client.error_of(work(client, role, foreign))
        assert type(error) is errors.PrefixMismatchError
        for closed in (session_id, session_id, "nobody"):
            await client.close(closed)


def work(client, role, call):
    return client.verify(call) if role is TARGET else client.draft(call, 2)


def bad_work(role, call):
    """Return requests whose call is good, and the rest is not."""
    if role is DRAFTER:
        limits = [(0, 1), (1025, 1), (HUGE, 1), (RESERVED, 1), (2, 65), (2, HUGE)]
        return [
            drafter_pb.DraftRequest(call=call, max_tokens=window, chunk_tokens=chunk)
            for window, chunk in limits
        ]
    blocks = [[2048], [HUGE], [1] * RESERVED, [1] * 1025]
    proposals = [
        *({"token_ids": block} for block in blocks),
        {"token_ids": [1], "distributions": [CERTAIN]},
        {"token_ids": [1], "parents": [1]},
    ]
    return [
        target_pb.VerifyRequest(call=call, speculation_depth=65_536),
        *(target_pb.VerifyRequest(call=call, proposal=proposal) for proposal in proposals),
    ]


@asynccontextmanager
async def asking(system, role):
    server = (system.targets if role is TARGET else system.drafters)[0]
    client = await ModelClient(role, server.address).learn()
    try:
        yield client
    finally:
        await client.channel.close()


@pytest.mark.parametrize("strategy", ["speculative", "distributed"])
def test_a_drafter_with_another_tokenizer_is_refused_before_it_drafts(strategy, mismatched):
    with mismatched.client() as client:
        with pytest.raises(errors.TokenizerMismatchError):
            client.generate(PROMPT, strategy=strategy, max_tokens=8).collect()
        assert len(plain(client, max_tokens=8)) == 8
    assert mismatched.drafters[0].metric("paceline_sessions_opened_total") == 0


@pytest.fixture(scope="module")
def mismatched():
    drafter = simulated_model("drafter", simulated_vocabulary_size=1024)
    with System(drafters=[drafter], targets=[simulated_model("target")]).running() as system:
        yield system
