"""What a model server says, and what a failed RPC of it means, to the orchestrator."""

from __future__ import annotations

from types import SimpleNamespace

import grpc
import pytest

from paceline import errors
from paceline.status import DETAILS_KEY, encode
from paceline.v1 import model_service_pb2, sampling_pb2
from paceline.v1.session_service_pb2 import CallTiming
from paceline_contract import calls
from paceline_contract.calls import Hardware
from paceline_contract.limits import MOST_CONFIGURATION_CHARACTERS
from paceline_orchestrator.fleet.bad_answers import BadAnswerError
from paceline_orchestrator.fleet.discovery import Role
from paceline_orchestrator.fleet.wire import ModelFacts, answer, fetch_facts, read_timing


async def failed(code):
    raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="no details")


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.OverloadedError),
        (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidFieldError),
        (grpc.StatusCode.UNAVAILABLE, errors.ConnectionLostError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineError),
    ],
)
async def test_a_status_without_details_is_what_it_means_between_servers(code, error):
    with pytest.raises(error):
        await answer(failed(code))


@pytest.mark.parametrize(("said", "taken"), [(86_400.0, 86_400.0), (86_401.0, None), (3e11, None)])
async def test_a_server_cannot_send_an_orchestrator_away_for_more_than_a_day(said, taken):
    details = encode(errors.OverloadedError("full", retry_after_seconds=said)).SerializeToString()
    status = grpc.StatusCode.RESOURCE_EXHAUSTED
    trailers = grpc.aio.Metadata((DETAILS_KEY, details))

    async def refused():
        raise grpc.aio.AioRpcError(status, grpc.aio.Metadata(), trailers, "full")

    with pytest.raises(errors.OverloadedError) as raised:
        await answer(refused())
    assert raised.value.retry_after_seconds == taken


async def test_what_a_server_says_of_its_model_is_read_as_it_says_it():
    info = model_service_pb2.GetModelInfoResponse(
        model_name="name",
        fingerprint="fingerprint",
        tokenizer_fingerprint="tokenizer",
        vocabulary_size=4,
        eos_token_ids=[2, 3],
        context_length=4,
        verification_rules=[
            sampling_pb2.VERIFICATION_RULE_EXACT,
            sampling_pb2.VERIFICATION_RULE_REJECTION,
        ],
        forward_latencies=[{"rows": 5, "median_ns": 6}, {"rows": 7, "median_ns": 8}],
        prefill_fixed_ns=9,
        prefill_ns_per_token=10,
        shares_forwards=True,
        stages=[{"model_name": "base"}, {"model_name": "small"}],
        role=model_service_pb2.MODEL_ROLE_TARGET,
        hardware={"identity": "gpu", "share": 0.5},
        fim_token_ids=[3, 1, 2],
        lora_adapters=[{"name": "law", "fingerprint": "model with law"}],
        configuration='{"hidden_size": 8}',
    )

    async def say():
        return info

    models = SimpleNamespace(GetModelInfo=lambda *_, **__: say())
    assert await fetch_facts(models) == ModelFacts(
        model_name="name",
        fingerprint="fingerprint",
        tokenizer_fingerprint="tokenizer",
        vocabulary_size=4,
        eos_token_ids=frozenset({2, 3}),
        context_length=4,
        rejection_sampling=True,
        forward_latencies=((5, 6), (7, 8)),
        prefill_fixed_ns=9,
        prefill_ns_per_token=10,
        shares_forwards=True,
        stage_names=("base", "small"),
        role=Role.TARGET,
        hardware=Hardware("gpu", 0.5),
        fim_token_ids=(3, 1, 2),
        cancels_forwards=False,
        lora_fingerprints=(("law", "model with law"),),
        configuration='{"hidden_size": 8}',
    )
    del info.verification_rules[1:]
    info.ClearField("hardware")
    facts = await fetch_facts(models)
    assert not facts.rejection_sampling
    assert facts.hardware is None
    info.configuration = "x" * (1 + MOST_CONFIGURATION_CHARACTERS)
    with pytest.raises(BadAnswerError, match="the length of configuration"):
        await fetch_facts(models)


def test_where_a_calls_time_went_is_read_as_it_says_it():
    parts = {
        "queue_ns": 1,
        "forward_ns": 2,
        "forward_count": 3,
        "row_count": 4,
        "shared_row_count": 40,
        "shared_call_count": 30,
    }
    stages = [{"forward_count": 5, "forward_ns": 6}, {"forward_count": 7, "forward_ns": 8}]
    read = read_timing(CallTiming(**parts, stages=stages))
    assert read == calls.CallTiming(
        **parts, stages=(calls.StageTiming(5, 6), calls.StageTiming(7, 8))
    )


def test_a_server_that_does_not_say_who_shares_its_forwards_computes_one_call_at_a_time():
    timing = read_timing(CallTiming(forward_count=3, row_count=4))
    assert (timing.shared_row_count, timing.shared_call_count) == (4, 3)
