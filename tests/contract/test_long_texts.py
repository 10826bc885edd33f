"""What the model's context takes comes through a gateway, however it is written."""

from __future__ import annotations

import asyncio
import json

import pytest

from paceline.errors import InvalidFieldError
from paceline_contract.limits import most_request_bytes
from paceline_gateway.settings import GatewaySettings
from paceline_orchestrator.settings import OrchestratorSettings
from support.fake_orchestrator import FakeOrchestrator, Leg
from support.gateway import TEMPLATE, gateway_over
from support.orchestrating import orchestrating, targets
from support.waiting import until

# The byte tokenizer makes three tokens of a letter.
LETTERS = 170_000
CONTEXT = 3 * LETTERS + 64
KIND = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": "\u6c34" * LETTERS}),
        ("/v1/completions", {"prompt": [7] * (3 * LETTERS)}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "\u6c34" * LETTERS}]},
        ),
    ],
    ids=["text", "ids", "conversation"],
)
async def test_a_text_that_the_context_takes_comes_through(path, prompt):
    models = targets(1, context_length=CONTEXT, chat_template=TEMPLATE)
    async with (
        orchestrating(targets=models) as system,
        gateway_over(orchestrators=(system.address,)) as gateway,
    ):
        body = json.dumps({"model": "fake-target", "max_tokens": 1, **prompt}, ensure_ascii=True)
        answer = await gateway.http.post(path, content=body, headers=KIND)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens"] >= 3 * LETTERS


async def test_a_body_that_the_context_could_not_need_is_refused_with_the_limit_and_not_kept():
    async with (
        orchestrating(targets=targets(1, context_length=1 << 16)) as system,
        gateway_over(orchestrators=(system.address,)) as gateway,
    ):
        limit = 3 * most_request_bytes(1 << 16)

        async def in_chunks():
            for _ in range(2 * limit >> 16):
                yield b" " * (1 << 16)

        for content in (in_chunks(), b" " * (limit + 1)):
            answer = await gateway.http.post("/v1/completions", content=content, headers=KIND)
            assert answer.status_code == 413
            assert f"more than {limit} bytes" in answer.json()["error"]["message"]


async def test_a_text_that_orchestrators_do_not_even_read_is_refused_with_their_limit():
    async with (
        orchestrating(
            targets=targets(1, context_length=1 << 20), message_limit_bytes=1 << 20
        ) as system,
        gateway_over(orchestrators=(system.address,)) as gateway,
    ):
        answer = await gateway.http.post(
            "/v1/completions", json={"model": "fake-target", "prompt": "x" * (2 << 20)}
        )
    assert answer.status_code == 413
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("prompt", "too_large")
    assert f"more than {1 << 20} bytes" in error["message"]


async def test_a_body_that_says_that_it_is_too_large_is_refused_before_it_comes():
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n"
    async with gateway_over() as gateway, gateway.connected() as (reader, writer):
        writer.write(head.format(1 << 40).encode())
        assert (await reader.readline()).split()[1] == b"413"


async def test_many_large_bodies_at_once_have_one_room_and_the_others_are_told_to_come_again():
    fake = FakeOrchestrator(script=[Leg(hangs=True)])
    async with gateway_over(
        fake, body_limit_bytes=600_000, bodies_limit_bytes=1_000_000
    ) as gateway:
        asked = {"model": "fake", "prompt": "x" * 500_000}
        first = asyncio.create_task(gateway.http.post("/v1/completions", json=asked))
        await until(lambda: fake.requests, what="the first one runs")
        second = await gateway.http.post("/v1/completions", json=asked)
        assert (second.status_code, second.headers["retry-after"]) == (429, "1")
        small = await gateway.post("/v1/completions", prompt="p", max_tokens=1)
        assert small.status_code == 200
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await fake.cancelled.wait()
        await gateway.process.requests.idle()
        assert (await gateway.http.post("/v1/completions", json=asked)).status_code == 200


async def test_a_gateway_asks_how_large_a_body_may_be_only_where_it_is_not_small():
    fake = FakeOrchestrator()
    async with gateway_over(fake) as gateway:
        fake.refusal = InvalidFieldError("not now")
        small = await gateway.http.post("/v1/completions", content=b"{", headers=KIND)
        assert small.status_code == 400
        large = await gateway.http.post("/v1/completions", content=b" " * (2 << 20), headers=KIND)
        assert "not now" in large.json()["error"]["message"]


@pytest.mark.parametrize(
    ("settings_class", "values", "words"),
    [
        (
            OrchestratorSettings,
            {"targets": ("localhost:1",), "queue_limit_bytes": 1 << 20},
            "could never wait",
        ),
        (
            OrchestratorSettings,
            {"targets": ("localhost:1",), "default_deadline_seconds": 601},
            r"\(601\) must not be more than call_limit_seconds \(600\)",
        ),
        (
            GatewaySettings,
            {"orchestrators": ("localhost:1",), "bodies_limit_bytes": 1 << 20},
            "no room for it",
        ),
        (
            GatewaySettings,
            {
                "orchestrators": ("localhost:1",),
                "body_limit_bytes": 900_000,
                "bodies_limit_bytes": 1_000_000,
            },
            "four fifths",
        ),
    ],
)
def test_limits_that_exclude_each_other_stop_a_process_at_its_start(settings_class, values, words):
    with pytest.raises(ValueError, match=words):
        settings_class(**values)


def test_a_shorter_call_needs_no_shorter_deadline_to_be_said():
    settings = OrchestratorSettings(targets=("localhost:1",), call_limit_seconds=60)
    assert settings.default_deadline_seconds > settings.call_limit_seconds
