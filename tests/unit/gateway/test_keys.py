"""Keys at the gateway: who has one may call, within its limits; and its own at orchestrators."""

from __future__ import annotations

import asyncio
import hashlib
import logging

import openai
import pytest
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from paceline.errors import (
    ConnectionLostError,
    InvalidFieldError,
    InvariantViolatedError,
    UnauthenticatedError,
)
from paceline_gateway.process import HttpProcess
from paceline_gateway.settings import GatewaySettings
from paceline_serving.lanes import HEADER
from support.fake_orchestrator import FakeOrchestrator, Leg, serving
from support.gateway import TEMPLATE, gateway_over
from support.keys import SECRET, entry, rewrite
from support.waiting import until


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text(entry())
    return file


@pytest.fixture
def one_a_minute(path):
    """One that lets nobody in who has used a token, for a minute for each."""
    path.write_text(entry(tokens_per_minute=1))
    return path


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    """Who is refused asks again at once."""
    monkeypatch.setattr("paceline_gateway.fleet.health_watch._KNOCK_AGAIN_SECONDS", 0.01)


async def test_only_who_has_a_key_may_call(path, caplog):
    caplog.set_level(logging.DEBUG)
    async with gateway_over(api_keys=path) as gateway:
        with pytest.raises(openai.AuthenticationError) as refused:
            await gateway.client.completions.create(model="fake", prompt="p")
        assert refused.value.code == "invalid_api_key"
        assert refused.value.response.headers["www-authenticate"] == "Bearer"
        assert (await gateway.http.get("/v1/models")).status_code == 401
        assert (await gateway.http.get("/health/ready")).status_code == 200
        good = gateway.client.with_options(api_key=SECRET)
        await good.completions.create(model="fake", prompt="p")
        assert len(gateway.requests) == 1
    assert SECRET not in caplog.text
    assert hashlib.sha256(SECRET.encode()).hexdigest() not in caplog.text


async def test_a_keys_limits_are_its_own(path):
    path.write_text(entry(requests_at_once=1) + entry("bob", "other", tokens_per_minute=5))
    fake = FakeOrchestrator(script=[Leg(hangs=True)])
    async with gateway_over(fake, api_keys=path) as gateway:
        alice = gateway.client.with_options(api_key=SECRET)
        bob = gateway.client.with_options(api_key="other")
        asked = {"model": "fake", "prompt": "p", "max_tokens": 3}
        running = asyncio.create_task(alice.completions.create(**asked))
        await until(lambda: fake.requests, what="the orchestrator is asked")
        with pytest.raises(openai.RateLimitError) as refused:
            await alice.completions.create(**asked)
        assert refused.value.response.headers["retry-after"] == "1"
        await bob.completions.create(**asked)  # 3 of the prompt, 3 of the text
        with pytest.raises(openai.RateLimitError, match="5 tokens per minute"):
            await bob.completions.create(**asked)
        running.cancel()


async def charged(gateway):
    """Return how many tokens a key of one token a minute has to pay off: a minute for each."""
    refused = await gateway.post("/v1/completions", prompt="p", max_tokens=1)
    assert refused.status_code == 429
    return round(int(refused.headers["retry-after"]) / 60)


PAIRS = Leg(chunk_tokens=2)  # of five tokens: 2, 2, 1
CHAT = [{"role": "user", "content": "p"}]


@pytest.mark.parametrize(
    ("route", "body", "tokens"),
    [
        ("/v1/completions", {"prompt": "p", "max_tokens": 5}, 3 + 5),
        ("/v1/completions", {"prompt": "p", "max_tokens": 5, "stream": True}, 3 + 5),
        ("/v1/completions", {"prompt": "p", "max_tokens": 1}, 3 + 1),
        ("/v1/completions", {"prompt": "p", "max_tokens": 5, "n": 2}, 2 * (3 + 5)),
        ("/v1/completions", {"prompt": ["p", "q", "r"], "max_tokens": 2}, 3 * (3 + 2)),
        ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 5}, 3 + 5),
        ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 5, "stream": True}, 3 + 5),
        ("/v1/responses", {"input": "p", "max_output_tokens": 5}, 3 + 5),
        ("/v1/responses", {"input": "p", "max_output_tokens": 5, "stream": True}, 3 + 5),
        ("/paceline/generate", {"prompt": "p", "max_tokens": 5}, 3 + 5),
    ],
)
async def test_a_key_is_charged_for_each_generations_prompt_once_and_for_its_tokens(
    route, body, tokens, one_a_minute
):
    fake = FakeOrchestrator(script=[PAIRS] * 3, chat_template=TEMPLATE)
    async with gateway_over(fake, api_keys=one_a_minute) as gateway:
        gateway.http.headers["authorization"] = f"Bearer {SECRET}"
        assert (await gateway.post(route, **body)).status_code == 200
        assert await charged(gateway) == tokens


@pytest.mark.parametrize(
    ("legs", "tokens"),
    [
        # Resumed twice, once before its first token.
        (
            [
                Leg(error=ConnectionLostError("gone")),
                Leg(error=ConnectionLostError("gone"), chunks=2, chunk_tokens=2),
            ],
            3 + 5,
        ),
        # Refused by the orchestrator: the request that follows is let in, and is all there is.
        ([Leg(error=InvalidFieldError("no"), refuses=True), PAIRS], 3 + 5),
        # Broken off in mid-stream.
        ([Leg(error=InvariantViolatedError("x"), chunks=1, chunk_tokens=2)], 3 + 2),
        ([Leg(error=InvariantViolatedError("x"))], 3),
    ],
)
async def test_a_key_is_charged_once_for_what_was_computed_however_it_went(
    legs, tokens, one_a_minute
):
    fakes = [FakeOrchestrator(script=legs)]
    async with gateway_over(*fakes, api_keys=one_a_minute) as gateway:
        gateway.http.headers["authorization"] = f"Bearer {SECRET}"
        for _ in range(1 + any(leg.refuses for leg in legs)):
            await gateway.post("/v1/completions", prompt="p", max_tokens=5)
        assert await charged(gateway) == tokens


async def test_who_goes_away_is_charged_for_what_came(one_a_minute):
    fake = FakeOrchestrator(script=[Leg(hangs=True, chunks=2, chunk_tokens=2)])
    async with gateway_over(fake, api_keys=one_a_minute) as gateway:
        gateway.http.headers["authorization"] = f"Bearer {SECRET}"
        client = gateway.client.with_options(api_key=SECRET)
        asked = {"model": "fake", "prompt": "p", "max_tokens": 5}
        stream = await client.completions.create(**asked, stream=True)
        assert [(await anext(stream)).choices[0].text for _ in range(2)] == ["3 4 ", "5 6 "]
        await stream.close()
        await gateway.process.requests.idle()
        assert await charged(gateway) == 3 + 4


async def test_orchestrators_are_told_whose_requests_take_turns(path):
    path.write_text(entry() + entry("bob", "other"))
    fake = FakeOrchestrator()
    async with gateway_over(fake, api_keys=path) as gateway:
        for key in (SECRET, "other", SECRET):
            client = gateway.client.with_options(api_key=key)
            await client.completions.create(model="fake", prompt="p", max_tokens=3)
    told = [it[HEADER] for it in fake.metadata if HEADER in it]
    assert told[0] == told[2] != told[1]
    assert not {"alice", "bob"} & set(told)


async def test_whatever_a_proxy_says_of_its_client_is_no_error():
    fake = FakeOrchestrator()
    async with gateway_over(fake) as gateway:
        for said in ("::no", "unknown", "10.0.0.1", "2001:db8::1"):
            answer = await gateway.http.post(
                "/v1/completions",
                json={"model": "fake", "prompt": "p", "max_tokens": 3},
                headers={"x-forwarded-for": said},
            )
            assert answer.status_code == 200, answer.text


async def test_one_client_cannot_take_all_requests_there_may_be(path):
    path.write_text(entry() + entry("bob", "other"))
    fake = FakeOrchestrator(script=[Leg(hangs=True)] * 5)
    async with gateway_over(fake, api_keys=path, request_limit=5) as gateway:
        alice = gateway.client.with_options(api_key=SECRET)
        bob = gateway.client.with_options(api_key="other")
        asked = {"model": "fake", "prompt": "p"}
        running = [asyncio.create_task(alice.completions.create(**asked)) for _ in range(4)]
        await until(lambda: len(fake.requests) == 4, what="four fifths are taken")
        with pytest.raises(openai.RateLimitError, match="4 of them from this client"):
            await alice.completions.create(**asked)
        running.append(asyncio.create_task(bob.completions.create(**asked)))
        await until(lambda: len(fake.requests) == 5, what="the other client is served")
        for each in running:
            each.cancel()


def test_an_exposed_address_demands_keys_and_tls(path):

    exposed = {"orchestrators": ("127.0.0.1:1",), "listen": "0.0.0.0:0"}
    with pytest.raises(ValidationError, match="needs TLS"):
        GatewaySettings(**exposed, api_keys=path)
    tls = {"tls_certificate": "c.pem", "tls_key": "k.pem"}
    with pytest.raises(ValidationError, match="needs --api-keys"):
        GatewaySettings(**exposed, **tls)
    GatewaySettings(**exposed, **tls, api_keys=path)
    GatewaySettings(**exposed, insecure=True)


async def test_orchestrators_are_shown_the_gateways_own_key_and_not_the_clients(path, tmp_path):
    own = tmp_path / "own"
    own.write_text("sk-the-gateways\n")
    fake = FakeOrchestrator(chat_template=TEMPLATE)
    async with gateway_over(fake, api_keys=path, orchestrator_key_file=own) as gateway:
        client = gateway.client.with_options(api_key=SECRET)
        await client.models.list()
        await client.completions.create(model="fake", prompt="p", max_tokens=1)
        assert {it["authorization"] for it in fake.metadata} == {"Bearer sk-the-gateways"}
        rewrite(own, "sk-the-next")
        await client.completions.create(model="fake", prompt="p", max_tokens=1)
        assert fake.metadata[-1]["authorization"] == "Bearer sk-the-next"


async def test_a_gateway_that_is_refused_says_so_to_its_users_and_is_not_ready(path, caplog):
    fake = FakeOrchestrator()
    async with gateway_over(fake, api_keys=path) as gateway:
        client = gateway.client.with_options(api_key=SECRET)
        asked = {"model": "fake", "prompt": "p"}
        await client.completions.create(**asked)  # its key is good, and then it is taken out
        fake.refusal = UnauthenticatedError("the API key is wrong")
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError, match="this gateway's own") as refused:
                await client.completions.create(**asked, stream=stream)
            assert (refused.value.status_code, refused.value.code) == (502, "gateway_refused")
        await until(lambda: gateway.process.readiness.why_not, what="it is not ready")
        ready = await gateway.http.get("/health/ready")
        assert (ready.status_code, ready.text) == (
            503,
            "orchestrators refuse this gateway's own key or certificate\n",
        )
        fake.refusal = None
        await until(lambda: not gateway.process.readiness.why_not, what="it is ready again")
        await client.completions.create(**asked)
    (told,) = [it.message for it in caplog.records if "refuses this gateway" in it.message]
    assert told.endswith(
        "(--orchestrator-key-file, --orchestrator-tls-certificate): the API key is wrong"
    )


async def test_who_refuses_the_gateway_gets_no_work_while_another_lets_it_in():
    fakes = [FakeOrchestrator(), FakeOrchestrator()]
    async with gateway_over(*fakes) as gateway:
        fakes[0].refusal = UnauthenticatedError("wrong")
        gateway.process.orchestrators.doubt()
        first, second = gateway.process.orchestrators.client.endpoints
        await until(lambda: not first.serves, what="the first one's refusal is known")
        for _ in range(4):
            assert (await gateway.post("/v1/completions", prompt="p")).status_code == 200
        assert second.serves
        assert (await gateway.http.get("/health/ready")).status_code == 200
    assert [len(fake.requests) for fake in fakes] == [0, 4]


async def test_a_gateway_that_is_refused_from_the_start_is_not_announced_as_ready():
    async with serving(FakeOrchestrator(refusal=UnauthenticatedError("wrong"))) as fake:
        settings = GatewaySettings(orchestrators=(fake.address,), listen="127.0.0.1:0")
        process = HttpProcess(settings, registry=CollectorRegistry())
        beginning = asyncio.create_task(process.begin())
        await until(lambda: process.orchestrators.any_refuses, what="it is refused")
        assert process.readiness.why_not
        assert not beginning.done()
        fake.refusal = None
        await beginning
        assert process.readiness.why_not is None
        await process.finish(drain=False)


def test_a_file_without_a_key_is_named_at_the_start(tmp_path):
    empty = tmp_path / "empty"
    empty.write_text("\n")
    settings = GatewaySettings(orchestrators=("127.0.0.1:1",), orchestrator_key_file=empty)

    async def start():
        HttpProcess(settings, registry=CollectorRegistry())

    with pytest.raises(ValueError, match="empty: must hold one key"):
        asyncio.run(start())
