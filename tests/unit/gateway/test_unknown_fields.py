"""Fields that nobody knows are left out and named; those that would change the text are refused."""

from __future__ import annotations

import json

import pytest

from paceline_gateway.bodies.completion_schemas import ChatBody, CompletionBody
from paceline_gateway.bodies.json_body import MOST_FAULTS, parse
from paceline_gateway.bodies.message_schemas import MessagesBody
from paceline_gateway.bodies.prompt_schemas import LiveBody
from paceline_gateway.bodies.response_schemas import ResponseBody
from paceline_gateway.bodies.text_changing import TEXT_CHANGING
from paceline_gateway.errors import RequestError
from paceline_gateway.http.connection import IGNORED_HEADER
from support.gateway import gateway_over

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
BODIES = {
    ChatBody: CHAT,
    CompletionBody: {"model": "m", "prompt": "p"},
    MessagesBody: {**CHAT, "max_tokens": 1},
    ResponseBody: {"model": "m", "input": "hi"},
    LiveBody: {"model": "m", "prompt": "p"},
}


def read(body_class, value, ignored):
    return parse(body_class, json.dumps(value).encode(), ignored=ignored)


@pytest.mark.parametrize("body_class", BODIES)
def test_unknown_fields_are_left_out_and_named(body_class):
    ignored: list[str] = []
    base = BODIES[body_class]
    found = read(body_class, {**base, "cache_salt": "x", "priority": 3}, ignored)
    assert found == read(body_class, base, None)
    assert sorted(ignored) == ["cache_salt", "priority"]


def test_so_are_fields_of_messages_and_options():
    ignored: list[str] = []
    said = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": "b", "cache_control": {"type": "ephemeral"}},
    ]
    asked = {**CHAT, "messages": said, "stream": True}
    options = {"include_usage": True, "chunk_size": 3}
    found = read(ChatBody, {**asked, "stream_options": options}, ignored)
    assert [it.content for it in found.messages] == ["a", "b"]
    assert found.includes_usage
    assert sorted(ignored) == ["messages[1].cache_control", "stream_options.chunk_size"]


# What a client could believe that it has: of our other requests, and of other servers.
BELIEVED = {
    "echo", "frequency_penalty", "guided_json", "logit_bias", "max_new_tokens", "messages",
    "min_tokens", "n", "n_predict", "prompt", "reasoning_effort", "response_format", "samplers",
    "stop", "stop_sequences", "structured_outputs", "suffix", "text", "top_k",
}  # fmt: skip


def test_what_a_client_could_believe_to_have_is_known_to_change_the_text():
    assert BELIEVED <= TEXT_CHANGING


@pytest.mark.parametrize("name", sorted(TEXT_CHANGING))
def test_a_field_that_would_change_the_text_is_refused(name):
    for body_class, base in BODIES.items():
        if name in body_class.model_fields:
            continue
        with pytest.raises(RequestError) as refused:
            read(body_class, {**base, "unheard": 1, name: "x"}, [])
        error = refused.value.body["error"]
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")


def test_a_fault_beside_an_unknown_field_is_still_a_fault():
    with pytest.raises(RequestError) as refused:
        read(ChatBody, {**CHAT, "unheard": 1, "temperature": "hot"}, [])
    assert refused.value.body["error"]["param"] == "temperature"


def test_without_a_list_for_them_they_are_refused():
    with pytest.raises(RequestError) as refused:
        read(ChatBody, {**CHAT, "unheard": 1}, None)
    assert refused.value.body["error"]["param"] == "unheard"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_answers_header_names_what_was_left_out(stream):
    async with gateway_over() as gateway:
        answer = await gateway.post(
            "/v1/completions", prompt="p", stream=stream, **{"cache_salt": 1, "x\r\ny: é": 2}
        )
        assert answer.status_code == 200
        assert sorted(answer.headers[IGNORED_HEADER].split(", ")) == ["cache_salt", "x??y???"]
        plain = await gateway.post("/v1/completions", prompt="p", stream=stream)
        assert IGNORED_HEADER not in plain.headers


async def test_a_strict_gateway_refuses_unknown_fields():
    async with gateway_over(strict=True) as gateway:
        answer = await gateway.post("/v1/completions", prompt="p", cache_salt=1)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "cache_salt"
        assert IGNORED_HEADER not in answer.headers


def test_of_faults_beyond_number_the_first_is_named():
    with pytest.raises(RequestError) as refused:
        read(ChatBody, {**CHAT, "messages": [{"a": 1}] * MOST_FAULTS}, [])
    assert refused.value.body["error"]["param"] == "messages[0].role"


def test_more_unknown_fields_than_are_looked_at_are_refused_and_not_left_out():
    message = {"role": "user", "content": "hi", "unknown": 1}
    ignored: list[str] = []
    read(ChatBody, {**CHAT, "messages": [message] * MOST_FAULTS}, ignored)
    assert len(ignored) == MOST_FAULTS
    with pytest.raises(RequestError, match=f"more than {MOST_FAULTS} wrong and unknown fields"):
        read(ChatBody, {**CHAT, "messages": [message] * (MOST_FAULTS + 1)}, [])


# What front ends send with each request, on every route, though it changes nothing.
WITHOUT_EFFECT = {
    "best_of": 1, "chat_template_kwargs": {}, "echo": False, "frequency_penalty": 0.0,
    "ignore_eos": False, "include_stop_str_in_output": False, "length_penalty": 1.0,
    "logit_bias": {}, "min_tokens": 0, "mirostat": 0, "n": 1,
    "no_repeat_ngram_size": 0, "presence_penalty": 0, "repeat_penalty": 1.0,
    "skip_special_tokens": True, "stop_token_ids": [], "suffix": "",
    "tfs_z": 1, "typical_p": 1, "use_beam_search": False, "xtc_probability": 0,
}  # fmt: skip


@pytest.mark.parametrize("body_class", BODIES)
@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_a_value_that_changes_nothing_is_no_reason_to_refuse(body_class, name):
    read(body_class, {**BODIES[body_class], name: WITHOUT_EFFECT[name]}, [])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("best_of", True), ("echo", 0), ("ignore_eos", True), ("length_penalty", 2),
        ("skip_special_tokens", False), ("skip_special_tokens", 1), ("stop_token_ids", [1]),
        ("stop_token_ids", {}), ("use_beam_search", True),
    ],
)  # fmt: skip
def test_any_other_value_of_such_a_field_is_refused(name, value):
    with pytest.raises(RequestError) as refused:
        read(LiveBody, {**BODIES[LiveBody], name: value}, [])
    assert refused.value.body["error"]["param"] == name


@pytest.mark.parametrize("name", ["min_p", "repetition_penalty", "top_k"])
def test_a_parameter_that_a_model_may_have_a_default_for_is_never_left_out(name):
    with pytest.raises(RequestError):
        read(ResponseBody, {**BODIES[ResponseBody], name: 1}, [])


async def test_a_seed_of_64_bits_is_one_of_53():
    async with gateway_over() as gateway:
        await gateway.post("/v1/completions", prompt="p", seed=(1 << 53) + 7)
        await gateway.post("/v1/completions", prompt="p", seed=1 << 53)
        assert [it.seed for it in gateway.requests] == [7, 0]
