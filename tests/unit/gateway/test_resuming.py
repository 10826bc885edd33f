"""A generation outlives its orchestrator: same text, no gap, no duplicate."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from paceline import errors
from support.fake_orchestrator import SEED, FakeOrchestrator, Leg, serving
from support.gateway import TEMPLATE, gateway_over
from support.waiting import until

LOST = errors.ConnectionLostError("gone")
WHOLE = "3 4 5 6 7 "


@pytest.mark.parametrize("leg", [Leg(error=LOST, chunks=2), Leg(error=LOST, refuses=True)])
async def test_one_address_is_asked_again_as_several_are(leg):
    async with gateway_over(FakeOrchestrator(script=[leg])) as gateway:
        response = await gateway.post("/v1/completions", prompt="p", max_tokens=5)
    assert response.json()["choices"][0]["text"] == WHOLE
    assert len(gateway.requests) == 2


async def test_one_address_is_not_asked_for_ever():
    legs = [Leg(error=LOST, refuses=True) for _ in range(10)]
    async with gateway_over(FakeOrchestrator(script=legs)) as gateway:
        response = await gateway.post("/v1/completions", prompt="p")
    assert response.status_code == 503
    assert len(gateway.requests) == 2


@pytest.mark.parametrize("streamed", [False, True])
async def test_what_the_only_orchestrator_leaves_ends_soon_and_says_when_to_come_again(streamed):
    fake = FakeOrchestrator(script=[Leg(hangs=True, chunks=2)])
    async with AsyncExitStack() as life:
        await life.enter_async_context(serving(fake))
        async with gateway_over(orchestrators=(fake.address,), resume_seconds=0.1) as gateway:
            asked = {"model": "fake", "prompt": "p", "stream": streamed}
            answer = asyncio.create_task(gateway.http.post("/v1/completions", json=asked))
            await until(lambda: fake.requests, what="it has begun")
            await life.aclose()
            async with asyncio.timeout(30):  # sixty rounds take 64 s
                response = await answer
            new = await gateway.post("/v1/completions", prompt="p")
    assert (new.status_code, new.headers["retry-after"]) == (503, "1")
    for text in (new.text, response.text):
        assert "no orchestrator can be reached" in text
        assert "127.0.0.1" not in text
    if not streamed:
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")


@pytest.mark.parametrize("streamed", [False, True])
async def test_what_one_orchestrator_leaves_goes_on_at_another(streamed):
    # Whichever comes first breaks; each breaks once.
    fakes = [FakeOrchestrator(script=[Leg(error=LOST, chunks=2)]) for _ in range(2)]
    async with gateway_over(*fakes) as gateway:
        asked = {"model": "fake", "prompt": "p", "max_tokens": 5}
        if streamed:
            stream = await gateway.client.completions.create(**asked, stream=True)
            text = "".join([event.choices[0].text async for event in stream])
        else:
            text = (await gateway.client.completions.create(**asked)).choices[0].text
        assert text == WHOLE
        parts = [list(it.resume_token_ids) for it in gateway.requests]
        assert sorted(parts, key=len) == [[], [3, 4], [3, 4, 5, 6]]
        assert {it.seed for it in gateway.requests if it.resume_token_ids} == {SEED}
        assert all(len(fake.requests) >= 1 for fake in fakes)
        resumed = gateway.registry.get_sample_value("paceline_http_resumed_generations_total")
        assert resumed == 2


async def test_an_overloaded_orchestrator_is_not_the_last_word_if_there_is_another():
    full = Leg(error=errors.OverloadedError("full"), refuses=True)
    fakes = [FakeOrchestrator(script=[full]), FakeOrchestrator()]
    async with gateway_over(*fakes) as gateway:
        for _ in range(4):
            response = await gateway.post("/v1/completions", prompt="p")
            assert response.status_code == 200


async def test_requests_are_spread():
    fakes = [FakeOrchestrator() for _ in range(3)]
    async with gateway_over(*fakes) as gateway:
        await gateway.post("/v1/completions", prompt="p", n=6)
    assert [len(fake.requests) for fake in fakes] == [2, 2, 2]


async def test_a_stream_that_is_resumed_with_another_model_ends_in_an_error():
    fakes = [
        FakeOrchestrator(script=[Leg(error=LOST, chunks=2, fingerprint=name)]) for name in "ab"
    ]
    async with gateway_over(*fakes) as gateway:
        response = await gateway.post("/v1/completions", prompt="p")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable")


_AWAY = errors.NoTargetError("no target is left for this request", retry_after_seconds=0.05)
_TOO_LONG = errors.ContextLengthExceededError.of("max_tokens", "must be in [1, 12]")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
async def test_what_has_begun_is_not_begun_again_where_the_context_left_is_shorter(path):
    legs = [Leg(error=_AWAY, chunks=2), Leg(error=_TOO_LONG, refuses=True), Leg()]
    fake = FakeOrchestrator(script=legs, chat_template=TEMPLATE)
    asked = {
        "/v1/completions": {"prompt": "p"},
        "/v1/messages": {"messages": [{"role": "user", "content": "p"}], "max_tokens": 8},
    }[path]
    async with gateway_over(fake) as gateway:
        response = await gateway.post(path, stream=True, **asked)
    assert response.text.count('"3 "') == response.text.count('"4 "') == 1
    assert "max_tokens: must be in [1, 12]" in response.text
    assert [list(it.resume_token_ids) for it in gateway.requests] == [[], [3, 4]]
