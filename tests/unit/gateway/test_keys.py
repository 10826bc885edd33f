"""Keys: who has one may call, within its limits; the file is followed; nothing tells of them."""

from __future__ import annotations

import asyncio
import hashlib
import logging

import openai
import pytest
from pydantic import ValidationError

from paceline_gateway.errors import RequestError
from paceline_gateway.keys import Caller, Key, Keys
from paceline_gateway.settings import GatewaySettings
from support.fake_orchestrator import FakeOrchestrator, Leg
from support.gateway import gateway_over
from support.waiting import until

SECRET = "sk-a-long-random-word"


def entry(name="alice", secret=SECRET, **limits):
    lines = [f"- name: {name}", f"  sha256: {hashlib.sha256(secret.encode()).hexdigest()}"]
    return "\n".join([*lines, *(f"  {key}: {value}" for key, value in limits.items()), ""])


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text(entry())
    return file


def rewrite(path, text):
    """As Kubernetes does: another file under the same name."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


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


@pytest.mark.parametrize(
    "header",
    ["", SECRET, f"Basic {SECRET}", "Bearer", "Bearer ", f"Bearer {SECRET}x", "Bearer \xff"],
)
def test_what_is_no_key_is_refused(path, header):
    with pytest.raises(RequestError) as refused:
        Keys(path).find(header)
    assert refused.value.status == 401
    assert SECRET not in str(refused.value)


def test_the_file_is_read_again_when_it_changes_and_a_broken_one_changes_nothing(path, caplog):
    keys = Keys(path)
    alice = keys.find(f"Bearer {SECRET}")
    rewrite(path, entry("bob", "other") + entry(requests_at_once=3))
    assert keys.find("Bearer other").key.name == "bob"
    assert keys.find(f"Bearer {SECRET}") is alice
    assert alice.key.requests_at_once == 3
    rewrite(path, "- name: bob\n  sha256: short\n")
    assert keys.find("Bearer other").key.name == "bob"
    assert "keys stay as they were" in caplog.text
    rewrite(path, entry("bob", "other"))
    with pytest.raises(RequestError):
        keys.find(f"Bearer {SECRET}")


@pytest.mark.parametrize(
    "text",
    ["{", "a: b", entry() + entry(), entry(more=1), entry(requests_at_once=0), entry("no spaces!")],
)
def test_a_file_that_is_no_list_of_keys_is_named(path, text):
    path.write_text(text)
    with pytest.raises(ValueError, match=r"keys\.yaml: "):
        Keys(path)
    path.unlink()
    with pytest.raises(ValueError, match="No such file"):
        Keys(path)


def test_tokens_come_back_within_a_minute():
    now = [0.0]
    key = Key(name="a", sha256="0" * 64, tokens_per_minute=60)
    caller = Caller(key, clock=lambda: now[0])
    with caller.admitted():
        caller.charge(80)
    with pytest.raises(RequestError) as refused, caller.admitted():
        pass
    assert refused.value.status == 429
    assert refused.value.headers["retry-after"] == "21"
    now[0] = 21.0
    with caller.admitted():
        pass


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


def test_an_exposed_address_demands_keys_and_tls(path):

    exposed = {"orchestrators": ("127.0.0.1:1",), "listen": "0.0.0.0:0"}
    with pytest.raises(ValidationError, match="needs TLS"):
        GatewaySettings(**exposed, api_keys=path)
    tls = {"tls_certificate": "c.pem", "tls_key": "k.pem"}
    with pytest.raises(ValidationError, match="needs --api-keys"):
        GatewaySettings(**exposed, **tls)
    GatewaySettings(**exposed, **tls, api_keys=path)
    GatewaySettings(**exposed, insecure=True)
