"""LoRA adapters are models of their own over HTTP, and requests with these names ask for them."""

from __future__ import annotations

import openai
import pytest

from paceline.errors import ModelNotFoundError
from support.fake_orchestrator import FakeOrchestrator
from support.gateway import TEMPLATE, gateway_over

CHAT = [{"role": "user", "content": "hello"}]
ASKED = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": CHAT, "max_tokens": 3},
}


def an_orchestrator():
    return FakeOrchestrator(
        chat_template=TEMPLATE, lora_fingerprints={"verse": "model-v", "law": "model-l"}
    )


async def test_models_are_listed_with_their_root_and_each_is_described_by_its_name():
    async with gateway_over(an_orchestrator()) as gateway:
        listed = (await gateway.http.get("/v1/models")).json()["data"]
        assert [(it["id"], it["root"], it["parent"]) for it in listed] == [
            ("fake", "fake", None),
            ("law", "fake", "fake"),
            ("verse", "fake", "fake"),
        ]
        assert [it["paceline"]["fingerprint"] for it in listed[1:]] == ["model-l", "model-v"]
        assert (await gateway.http.get("/v1/models/law")).json() == listed[1]
        assert (await gateway.http.get("/v1/models/prose")).status_code == 404


async def test_an_adapter_that_is_called_as_the_model_is_hides_nothing_and_is_listed_once():
    """Another target's model can have the name: its server refuses only its own."""
    orchestrator = FakeOrchestrator(lora_fingerprints={"fake": "model-f", "law": "model-l"})
    async with gateway_over(orchestrator) as gateway:
        listed = (await gateway.http.get("/v1/models")).json()["data"]
        assert [(it["id"], it["parent"]) for it in listed] == [("fake", None), ("law", "fake")]
        assert (await gateway.http.get("/v1/models/fake")).json() == listed[0]
        assert listed[0]["paceline"]["fingerprint"] != "model-f"
        await gateway.post("/v1/completions", model="fake", prompt="x")
        assert not gateway.requests[-1].lora


@pytest.mark.parametrize("path", ASKED)
async def test_the_model_of_a_request_chooses_its_adapter(path):
    async with gateway_over(an_orchestrator()) as gateway:
        for name, lora in (("law", "law"), ("fake", ""), ("verse", "verse")):
            answer = await gateway.post(path, **{**ASKED[path], "model": name})
            assert answer.status_code == 200
            assert answer.json()["model"] == name
            assert gateway.requests[-1].lora == lora


async def test_the_pages_stream_has_the_adapter_too():
    async with gateway_over(an_orchestrator()) as gateway:
        await gateway.post("/paceline/generate", prompt="x", model="law")
        assert gateway.requests[-1].lora == "law"


@pytest.mark.parametrize("path", ASKED)
async def test_a_model_that_is_neither_is_not_found(path):
    async with gateway_over(an_orchestrator()) as gateway:
        answer = await gateway.post(path, **{**ASKED[path], "model": "prose"})
        assert answer.status_code == 404
        assert not gateway.requests
    assert "prose" in answer.text


async def test_an_adapter_that_went_away_meanwhile_is_not_found_either():
    orchestrator = an_orchestrator()
    async with gateway_over(orchestrator) as gateway:
        await gateway.http.get("/v1/models")  # its answer is good for a while
        orchestrator.refusal = ModelNotFoundError("lora: no target has a LoRA adapter 'law'")
        with pytest.raises(openai.NotFoundError) as caught:
            await gateway.client.completions.create(model="law", prompt="x")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
