"""/tokenize, /detokenize and /version, in vLLM's form; the model's own sampling defaults."""

from __future__ import annotations

import threading

import pytest

from paceline.v1.sampling_pb2 import SamplingDefaults
from paceline_gateway.generating.told_tokens import name_of
from paceline_gateway.openai import tokenizing
from support.fake_orchestrator import FakeOrchestrator
from support.gateway import TEMPLATE, gateway_over

CHAT = [{"role": "user", "content": "hé"}]


async def test_a_text_and_a_conversation_become_tokens_and_tokens_a_text():
    async with gateway_over() as gateway:
        told = (await gateway.post("/tokenize", prompt="hé", return_token_strs=True)).json()
        assert told == {
            "count": 3,
            "max_model_len": 100,
            "tokens": [*"hé".encode()],
            "token_strs": ["h", "bytes:\\xc3", "bytes:\\xa9"],
        }
        told = (await gateway.post("/tokenize", messages=CHAT)).json()
        assert bytes(told["tokens"]).decode() == "<s><user>hé<assistant>"
        assert told["token_strs"] is None
        told = (await gateway.post("/tokenize", messages=CHAT, add_generation_prompt=False)).json()
        assert bytes(told["tokens"]).decode() == "<s><user>hé"
        text, conversation, _ = gateway.requests
        assert text.add_special_tokens
        assert text.parse_special_tokens
        assert not conversation.add_special_tokens
        told = await gateway.http.post("/detokenize", json={"tokens": [*"hé".encode()]})
        assert told.json() == {"prompt": "hé"}
        assert (await gateway.http.get("/version")).json() == {"version": "1"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "messages"),
        ("/tokenize", {"prompt": "x", "messages": CHAT}, "messages"),
        ("/tokenize", {"prompt": ["x"]}, "prompt"),
        ("/tokenize", {"messages": CHAT, "continue_final_message": True}, "continue_final_message"),
        ("/tokenize", {"messages": CHAT, "tools": [{}]}, "tools[0].type"),
        ("/tokenize", {"prompt": "x", "model": "other"}, "model"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1 << 32]}, "tokens[0]"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ],
)
async def test_what_is_no_text_and_what_are_no_tokens_is_refused_by_name(path, body, param):
    async with gateway_over() as gateway:
        refused = await gateway.post(path, **body)
        assert refused.json()["error"]["param"] == param
        assert not gateway.requests


@pytest.mark.parametrize(("count", "is_here"), [(1000, True), (9000, False)])
async def test_many_tokens_are_named_on_a_thread(count, is_here, monkeypatch):
    threads = set()

    def watched(*token):
        threads.add(threading.get_ident())
        return name_of(*token)

    monkeypatch.setattr(tokenizing, "name_of", watched)
    async with gateway_over() as gateway:
        told = await gateway.post("/tokenize", prompt="x" * count, return_token_strs=True)
        assert told.json()["token_strs"] == ["x"] * count
    assert (threads == {threading.get_ident()}) is is_here


def a_model(**defaults):
    said = SamplingDefaults(**defaults)
    return FakeOrchestrator(chat_template=TEMPLATE, sampling_defaults=said)


async def test_the_models_own_defaults_count_where_a_request_does_not_say():
    orchestrator = a_model(temperature=0.5, top_k=20, repetition_penalty=1.25)
    async with gateway_over(orchestrator) as gateway:
        (model,) = (await gateway.http.get("/v1/models")).json()["data"]
        assert model["max_model_len"] == 100
        assert model["paceline"]["sampling_defaults"] == {
            "temperature": 0.5,
            "top_k": 20,
            "repetition_penalty": 1.25,
        }
        await gateway.post("/v1/completions", prompt="x")
        await gateway.post("/v1/chat/completions", messages=CHAT, temperature=0.75, seed=-1)
        answer = await gateway.post("/v1/responses", input="x", paceline={"top_k": 3})
        await gateway.post("/v1/completions", prompt="x", top_k=-1, repetition_penalty=1.0)
        said = [
            (it.sampling.temperature, it.sampling.top_p, it.sampling.top_k,
             it.sampling.repetition_penalty)
            for it in gateway.requests
        ]  # fmt: skip
        assert said == [(0.5, 1, 20, 1.25), (0.75, 1, 20, 1.25), (0.5, 1, 3, 1.25), (0.5, 1, 0, 1)]
        assert not any(it.HasField("seed") for it in gateway.requests)
        assert answer.json()["temperature"] == 0.5


async def test_without_the_models_defaults_those_of_openai_count():
    model = a_model(temperature=0.5, top_k=20)
    async with gateway_over(model, generation_config="none") as gateway:
        await gateway.post("/v1/completions", prompt="x")
        (request,) = gateway.requests
        assert (request.sampling.temperature, request.sampling.top_k) == (1, 0)
        (model,) = (await gateway.http.get("/v1/models")).json()["data"]
        assert model["paceline"]["sampling_defaults"] == {}
