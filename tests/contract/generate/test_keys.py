"""Keys over gRPC: nobody calls without one, each has its limits, and each is a client."""

from __future__ import annotations

import asyncio
import hashlib
import logging

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from paceline import AsyncClient
from paceline.errors import InvalidFieldError, OverloadedError, UnauthenticatedError
from paceline.status import decode
from paceline.v1 import orchestrator_service_pb2 as pb
from support.fake_text import byte_tokenizer, continuation
from support.keys import SECRET, entry
from support.orchestrating import PROMPT, a_drafter, orchestrating, targets

_SERVICE = pb.DESCRIPTOR.services_by_name["OrchestratorService"]


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text(entry())
    return file


def client_with(key, address):
    return AsyncClient(address, token=(lambda: key) if key else None)


@pytest.mark.parametrize("key", [None, "wrong"])
@pytest.mark.parametrize("method", [method.name for method in _SERVICE.methods])
async def test_no_method_may_be_called_without_a_key(path, method, key):
    async with orchestrating(targets=targets(1), api_keys=path) as system:
        # The key is asked for before anything is read of a request.
        metadata = (("authorization", f"Bearer {key}"),) if key else ()
        call = system.channel.unary_stream(f"/{_SERVICE.full_name}/{method}")(
            b"\xff", metadata=metadata, timeout=60
        )
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        error = decode(refused.value)
        assert type(error) is UnauthenticatedError
        assert "authorization: Bearer KEY" in error.message
        assert not system.targets[0].specs


@pytest.mark.parametrize("others", [("wrong", SECRET), (SECRET, "wrong"), (SECRET, SECRET)])
async def test_a_call_with_two_keys_has_none(path, others):
    async with orchestrating(targets=targets(1), api_keys=path) as system:
        metadata = tuple(("authorization", f"Bearer {key}") for key in others)
        call = system.channel.unary_stream(f"/{_SERVICE.full_name}/GetSystemInfo")(
            b"", metadata=metadata, timeout=60
        )
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
    error = decode(refused.value)
    assert type(error) is UnauthenticatedError
    assert "more than one" in error.message


async def test_who_has_a_key_is_served_and_no_log_tells_of_it(path, caplog):
    caplog.set_level(logging.DEBUG)
    async with orchestrating(targets=targets(1), api_keys=path) as system:
        async with client_with(SECRET, system.address) as client:
            assert (await client.info()).model_name
            completion = await client.generate(PROMPT, max_tokens=6).collect()
        assert list(completion.token_ids) == continuation(PROMPT, 6)
    assert SECRET not in caplog.text
    assert hashlib.sha256(SECRET.encode()).hexdigest() not in caplog.text


async def test_health_and_reflection_ask_for_no_key(path):
    async with orchestrating(targets=targets(1), api_keys=path, reflection=True) as system:
        state = await HealthStub(system.channel).Check(HealthCheckRequest(), timeout=60)
        assert state.status == HealthCheckResponse.SERVING
        asked = iter([ServerReflectionRequest(list_services="")])
        call = ServerReflectionStub(system.channel).ServerReflectionInfo(asked, timeout=60)
        answer = await call.read()
        assert _SERVICE.full_name in {it.name for it in answer.list_services_response.service}


async def test_the_requests_at_once_of_a_key_are_its_own(path):
    path.write_text(entry(requests_at_once=1) + entry("bob", "other"))
    (target,) = targets(1)
    target.stalls = lambda text: len(text) > len(PROMPT)
    async with (
        orchestrating(targets=[target], api_keys=path) as system,
        client_with(SECRET, system.address) as alice,
        client_with("other", system.address) as bob,
    ):
        running = asyncio.create_task(alice.generate(PROMPT, max_tokens=6).collect())
        await target.until(lambda it: it.begun >= 2)
        with pytest.raises(OverloadedError, match="of this key") as refused:
            await alice.generate(PROMPT, max_tokens=1).collect()
        assert refused.value.retry_after_seconds == 1
        await bob.generate(PROMPT, max_tokens=1).collect()
        running.cancel()
        await system.settled()
        await alice.generate(PROMPT, max_tokens=1).collect()


# Far enough beyond the limit that what comes back meanwhile is no matter.
@pytest.mark.parametrize(
    ("limit", "max_tokens"), [(len(PROMPT) + 20, 60), (10, 1)], ids=["text", "prompt"]
)
async def test_the_tokens_of_a_key_are_those_of_its_prompts_and_its_texts(path, limit, max_tokens):
    path.write_text(entry(tokens_per_minute=limit))
    async with (
        orchestrating(targets=targets(1), api_keys=path) as system,
        client_with(SECRET, system.address) as client,
    ):
        await client.generate(PROMPT, max_tokens=max_tokens).collect()
        with pytest.raises(OverloadedError, match="tokens per minute are used up") as refused:
            await client.generate(PROMPT, max_tokens=1).collect()
        assert refused.value.retry_after_seconds > 0


async def charged(client):
    """Return how many tokens a key of one token a minute has to pay off: a minute for each."""
    with pytest.raises(OverloadedError, match="tokens per minute are used up") as refused:
        await client.generate(PROMPT, max_tokens=1).collect()
    return round(refused.value.retry_after_seconds / 60)


TEXT = byte_tokenizer().decode(continuation(PROMPT, 24))


@pytest.mark.parametrize("strategy", ["autoregressive", "speculative", "distributed"])
@pytest.mark.parametrize(
    ("asked", "computed"),
    [
        ({"max_tokens": 24}, 24),
        ({"max_tokens": 1}, 1),
        ({"max_tokens": 24, "resume_token_ids": continuation(PROMPT, 9)}, 24),
        # What was computed beyond a stop string is nobody's text.
        ({"max_tokens": 24, "stop": [TEXT[6:8]]}, 8),
    ],
    ids=["many", "one", "resumed", "stopped"],
)
async def test_a_key_is_charged_what_its_usage_says(path, strategy, asked, computed):
    path.write_text(entry(tokens_per_minute=1))
    async with (
        orchestrating(drafters=[a_drafter()], targets=targets(2), api_keys=path) as system,
        client_with(SECRET, system.address) as client,
    ):
        options = {"strategy": strategy, "lookahead": 3, **asked}
        completion = await client.generate(PROMPT, **options).collect()
        usage = completion.finished.usage
        assert (usage.prompt_token_count, usage.completion_token_count) == (len(PROMPT), computed)
        assert await charged(client) == len(PROMPT) + computed


async def test_a_key_pays_nothing_for_what_is_refused_and_the_prompt_of_what_it_leaves(path):
    path.write_text(entry(tokens_per_minute=1))
    (target,) = targets(1)
    async with (
        orchestrating(targets=[target], api_keys=path) as system,
        client_with(SECRET, system.address) as client,
    ):
        with pytest.raises(InvalidFieldError):
            await client.generate(PROMPT, max_tokens=6, lookahead=10**6).collect()
        target.answers.clear()
        leaving = asyncio.create_task(client.generate(PROMPT, max_tokens=6).collect())
        await target.until(lambda it: it.running)
        leaving.cancel()
        await system.settled()
        assert await charged(client) == len(PROMPT)


async def test_a_request_that_goes_on_at_another_target_is_charged_once(path):
    path.write_text(entry(tokens_per_minute=1))
    pair = targets(2)
    for target in pair:
        target.faults.extend(["", "lose_session", "fail"])
    async with (
        orchestrating(targets=pair, api_keys=path) as system,
        client_with(SECRET, system.address) as client,
    ):
        completion = await client.generate(
            PROMPT, max_tokens=6, strategy="autoregressive"
        ).collect()
        assert completion.finished.statistics.fallbacks
        assert await charged(client) == len(PROMPT) + 6


async def test_a_key_is_a_client_of_its_own_wherever_it_comes_from(path):
    path.write_text(entry() + entry("bob", "other"))
    async with orchestrating(targets=targets(1), api_keys=path) as system:
        for key in (SECRET, "other", SECRET):
            async with client_with(key, system.address) as client:
                await client.generate(PROMPT, max_tokens=1).collect()
        alice, bob, again = (spec.share for spec in system.targets[0].specs)
        assert alice == again != bob


async def test_a_file_that_is_no_list_of_keys_stops_the_start(path):
    path.write_text("{")
    with pytest.raises(ValueError, match="not readable as YAML"):
        async with orchestrating(targets=targets(1), api_keys=path):
            pass
