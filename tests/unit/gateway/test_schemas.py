"""Bodies: what is refused is refused by its name, and nothing makes a 500."""

from __future__ import annotations

import gzip
import json
import zlib
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import InvalidFieldError, UnsupportedError
from paceline.request import build_request
from paceline.v1 import orchestrator_service_pb2 as pb
from paceline_contract.shares import FairShares
from paceline_gateway.bodies.completion_schemas import ChatBody, CompletionBody
from paceline_gateway.bodies.json_body import parse
from paceline_gateway.bodies.message_schemas import MessagesBody
from paceline_gateway.bodies.prompt_schemas import LiveBody
from paceline_gateway.bodies.request_schemas import PacelineOptions
from paceline_gateway.bodies.response_schemas import ResponseBody
from paceline_gateway.errors import RequestError, of_paceline
from support.examples import examples
from support.gateway import gateway_over

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "fake", "prompt": "p"}


def refused(body_class, value):
    with pytest.raises(RequestError) as caught:
        parse(body_class, json.dumps(value).encode())
    return caught.value.body["error"]


@pytest.mark.parametrize(
    ("body_class", "base", "name", "value", "param"),
    [
        (ChatBody, CHAT, "top_logprobs", 3, "top_logprobs"),  # without logprobs
        (ChatBody, CHAT | {"logprobs": True}, "top_logprobs", 21, "top_logprobs"),
        (ChatBody, CHAT, "reasoning_effort", "hardly", "reasoning_effort"),
        (ChatBody, CHAT, "chat_template", "{{ 1 }}", "chat_template"),
        (ChatBody, CHAT, "n", 0, "n"),
        (ChatBody, CHAT, "temperature", 2.5, "temperature"),
        (ChatBody, CHAT, "temperature", "1", "temperature"),
        (ChatBody, CHAT, "seed", -2, "seed"),
        (ChatBody, CHAT, "messages", [], "messages"),
        (ChatBody, CHAT, "messages", [{"role": "robot", "content": "x"}], "messages[0].role"),
        (ChatBody, CHAT, "messages", [{"role": "user"}], "messages[0].content"),
        (
            ChatBody,
            CHAT,
            "messages",
            [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}],
            "messages[0].tool_calls[0].function",
        ),
        (
            ChatBody,
            CHAT,
            "messages",
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[0].content",
        ),
        (ChatBody, CHAT, "paceline", {"strategy": "best"}, "paceline.strategy"),
        (ChatBody, CHAT, "paceline", {"drafter": "unknown"}, "paceline.drafter"),
        (ChatBody, CHAT, "paceline", {"width": 17}, "paceline.width"),
        (ChatBody, CHAT, "paceline", {"branches": -1}, "paceline.branches"),
        (ChatBody, CHAT, "paceline", {"more": 1}, "paceline.more"),
        (CompletionBody, {**TEXT, "suffix": "x"}, "echo", True, "echo"),
        (CompletionBody, {**TEXT, "stream": True}, "prompt_logprobs", 1, "prompt_logprobs"),
        (ChatBody, CHAT, "prompt_logprobs", -1, "prompt_logprobs"),
        (ChatBody, CHAT, "prediction", "text", "prediction"),
        (ChatBody, CHAT, "prediction", {"type": "content"}, "prediction"),
        (
            ChatBody,
            CHAT,
            "prediction",
            {"type": "content", "content": [{"text": "x"}]},
            "prediction",
        ),
        (ChatBody, CHAT, "max_tokens", 0, "max_tokens"),
        (CompletionBody, TEXT, "logprobs", 21, "logprobs"),
        (CompletionBody, TEXT, "logprobs", True, "logprobs"),
        (CompletionBody, TEXT, "best_of", 2, "best_of"),
        (CompletionBody, TEXT | {"n": 2}, "best_of", 3, "best_of"),
        (CompletionBody, {**TEXT, "prompt": [1]}, "suffix", "x", "suffix"),
        (CompletionBody, TEXT, "prompt", [], "prompt"),
        (CompletionBody, TEXT, "prompt", ["a", 1], "prompt"),
        (CompletionBody, TEXT, "prompt", [1 << 32], "prompt"),
        (CompletionBody, TEXT, "prompt", [True], "prompt"),
        (CompletionBody, TEXT, "stop", [1], "stop"),
        (CompletionBody, TEXT, "max_tokens", 1 << 40, "max_tokens"),
        (CompletionBody, TEXT, "stream_options", {"include_usage": True}, "stream_options"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_name(body_class, base, name, value, param):
    error = refused(body_class, {**base, name: value})
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")
    assert error["type"] == "invalid_request_error"


RESPONSE = {"model": "fake", "input": "hi"}
MESSAGES = {**CHAT, "max_tokens": 1}
IMAGE = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
FILE = [{"type": "input_file", "file_id": "f"}]
UNREADABLE = {"type": "reasoning", "summary": [], "encrypted_content": "x"}


@pytest.mark.parametrize(
    ("body_class", "base", "fields", "message"),
    [
        (ChatBody, CHAT, {"messages": ["hi"]}, "messages[0]: must be an object"),
        (ChatBody, CHAT, {"messages": "hi"}, "messages: must be a list"),
        (ChatBody, CHAT, {"messages": []}, "messages: must have at least 1 item"),
        (ChatBody, CHAT, {"model": 5}, "model: must be text"),
        (ChatBody, CHAT, {"n": "2"}, "n: must be a whole number"),
        (ChatBody, CHAT, {"n": 0}, "n: must be greater than or equal to 1"),
        (ChatBody, CHAT, {"temperature": "1"}, "temperature: must be a number"),
        (ChatBody, CHAT, {"stream": "true"}, "stream: must be true or false"),
        (
            ChatBody,
            CHAT,
            {"chat_template_kwargs": "x"},
            "chat_template_kwargs: must be an object",
        ),
        (
            ChatBody,
            CHAT,
            {"messages": [{"role": "user", "content": IMAGE}]},
            'messages[0].content: has a part ([1]) of the kind "image_url", which is not supported',
        ),
        (
            ChatBody,
            CHAT,
            {"messages": [{"role": "user", "content": ["x"]}]},
            "messages[0].content: has a part ([0]) that is not text",
        ),
        (ResponseBody, RESPONSE, {"input": 5}, "input: must be text or a list of items"),
        (ResponseBody, RESPONSE, {"reasoning": "low"}, "reasoning: must be an object"),
        (ResponseBody, RESPONSE, {"text": "json"}, "text: must be an object"),
        (
            ResponseBody,
            RESPONSE,
            {"input": [UNREADABLE]},
            "input: has nothing but reasoning that cannot be read here",
        ),
        (
            ResponseBody,
            RESPONSE,
            {"input": [{"type": "function_call_output", "call_id": "c", "output": FILE}]},
            'input[0].output: has a part ([0]) of the kind "input_file", which is not supported',
        ),
        (MessagesBody, MESSAGES, {"system": 5}, "system: must be text or a list of blocks"),
        (MessagesBody, MESSAGES, {"tool_choice": "auto"}, "tool_choice: must be an object"),
        (
            MessagesBody,
            MESSAGES,
            {"messages": [{"role": "user", "content": 5}]},
            "messages[0].content: must be text or a list of blocks",
        ),
    ],
)
def test_what_is_wrong_is_said_in_the_words_of_json(body_class, base, fields, message):
    assert refused(body_class, base | fields)["message"] == message


def test_a_part_of_another_kind_is_what_is_not_supported():
    error = refused(ChatBody, CHAT | {"messages": [{"role": "user", "content": IMAGE}]})
    assert error["code"] == "unsupported_parameter"
    malformed = refused(ChatBody, CHAT | {"messages": [{"role": "user", "content": ["x"]}]})
    assert malformed["code"] is None


LIVE = {"model": "fake", "prompt": "p"}
TOKENS = ([1, (1 << 32) - 1], [0, 1 << 32])
LIKELIEST = ([0, 20], [-1, 21])
OF_ALL = {
    "temperature": ([0, 2], [-0.01, 2.01]),
    "top_p": ([0, 1], [-0.01, 1.01]),
    "seed": ([-1, 0, (1 << 53) - 1, (1 << 64) - 1], [-2, 1 << 64]),
    "paceline.lookahead": ([1, 64], [0, 65]),
    "paceline.targets": ([1, 64], [0, 65]),
    "paceline.width": ([1, 16], [0, 17]),
    "paceline.branches": ([0, 64], [-1, 65]),
    "paceline.top_k": ([0, (1 << 32) - 1], [-1, 1 << 32]),
    "paceline.min_p": ([0, 1], [-0.01, 1.01]),
}
CHOICES = {
    "n": ([1, 128], [0, 129]),
    "max_tokens": TOKENS,
    "frequency_penalty": ([-2, 2], [-2.01, 2.01]),
    "presence_penalty": ([-2, 2], [-2.01, 2.01]),
    "repetition_penalty": ([0.01, 100], [0.009, 100.1]),
    "prompt_logprobs": LIKELIEST,
    "min_tokens": ([0, (1 << 32) - 1], [-1, 1 << 32]),
    "min_p": ([0, 1], [-0.01, 1.01]),
    "top_k": ([-1, (1 << 32) - 1], [-2, 1 << 32]),
    "logit_bias": (
        [{}, {"0": -100, "7": 100.0}, {str(token): 1 for token in range(1024)}],
        [
            {"7": 100.1},
            {"7": None},
            {"7": True},
            {"-1": 1},
            {"a": 1},
            {str(1 << 32): 1},
            {str(token): 1 for token in range(1025)},
            [[7, 1]],
        ],
    ),
}
SCORED = ([0, (1 << 32) - 1], [-1, 1 << 32])
OF_COMPLETION = {**OF_ALL, **CHOICES, "logprobs": LIKELIEST, "max_tokens": SCORED}
OF_CHAT = {**OF_ALL, **CHOICES, "max_completion_tokens": TOKENS, "top_logprobs": LIKELIEST}
LIMITS = {
    "completion": (CompletionBody, TEXT, OF_COMPLETION),
    "chat": (ChatBody, {**CHAT, "logprobs": True}, OF_CHAT),
    "response": (ResponseBody, RESPONSE, {**OF_ALL, "max_output_tokens": TOKENS}),
    "live": (LiveBody, LIVE, {**OF_ALL, "max_tokens": TOKENS}),
}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, (_, _, names) in LIMITS.items() for name in names]
)
def test_a_number_may_be_as_far_as_its_limits_and_no_farther(kind, name):
    body_class, base, names = LIMITS[kind]
    parent, _, field = name.rpartition(".")

    def body(value):
        return {**base, parent: {field: value}} if parent else {**base, field: value}

    within, beyond = names[name]
    for value in within:
        assert parse(body_class, json.dumps(body(value)).encode())
    for value in beyond:
        assert refused(body_class, body(value))["param"] == name


OWN_NAMES = PacelineOptions.model_fields.keys() - {"ignore_eos", "top_k", "min_p"}
USUAL_NAMES = {
    f"sampling.{name}"
    for name in (
        "frequency_penalty",
        "logit_bias",
        "min_p",
        "min_tokens",
        "presence_penalty",
        "repetition_penalty",
        "top_k",
    )
}


@pytest.mark.parametrize("name", sorted(OWN_NAMES | USUAL_NAMES))
def test_what_an_orchestrator_refuses_has_the_name_it_has_here(name):
    for error in (InvalidFieldError.of(name, "no"), UnsupportedError(f"{name}: no")):
        refusal = of_paceline(error, prompt="prompt").body["error"]
        here = name.removeprefix("sampling.") if "." in name else f"paceline.{name}"
        assert refusal["param"] == here
        assert refusal["message"] == f"{here}: no"


def test_biases_and_penalties_reach_the_orchestrator_by_their_names():
    given = {
        "logit_bias": {"5": -1},
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "min_tokens": 3,
        "min_p": 0.25,
        "top_k": 7,
    }
    for body_class, base in ((ChatBody, CHAT), (CompletionBody, TEXT)):
        options = parse(body_class, json.dumps({**base, **given}).encode()).options()
        assert {name: options[name] for name in given} == {**given, "logit_bias": {5: -1.0}}
        zero = dict.fromkeys(("temperature", "min_p", "frequency_penalty", "presence_penalty"), 0)
        options = parse(body_class, json.dumps({**base, **zero}).encode()).options()
        assert {name: options[name] for name in zero} == zero, "a zero that is given is handed on"
        everything = parse(body_class, json.dumps({**base, "top_k": -1}).encode()).options()
        assert everything["top_k"] == 0


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ({"strategy": "dsi", "drafter": "both"}, ("distributed", "server_and_max_gram")),
        ({"strategy": "self", "drafter": "max-gram"}, ("self_speculative", "max_gram")),
        ({"strategy": "non-si", "drafter": "max_gram"}, ("autoregressive", "max_gram")),
    ],
)
def test_the_command_lines_short_words_are_taken(words, meant):
    options = parse(ChatBody, json.dumps({**CHAT, "paceline": words}).encode()).options()
    assert (options["strategy"], options["drafter"]) == meant


def test_what_servers_cannot_do_at_all_has_no_parameter():
    refusal = of_paceline(UnsupportedError("this model: continues text"), prompt="messages")
    assert refusal.body["error"]["param"] is None
    assert refusal.body["error"]["message"] == "this model: continues text"


@pytest.mark.parametrize(
    "more",
    [
        {"stream_options": {"include_usage": False}, "functions": []},
        {"messages": [{**CHAT["messages"][0], "annotations": [], "tool_calls": []}]},
        {"messages": [{**CHAT["messages"][0], "reasoning_content": "", "refusal": None}]},
        {"logit_bias": {}, "tools": []},
        {"tool_choice": "none", "response_format": {"type": "text"}, "store": False},
        {"user": "u", "metadata": {"a": "b"}, "safety_identifier": "s", "service_tier": "auto"},
        {"stop": None, "seed": None, "stream_options": None, "logprobs": None, "n": None},
    ],
)
def test_what_changes_nothing_is_allowed(more):
    plain = parse(ChatBody, json.dumps(CHAT).encode())
    assert parse(ChatBody, json.dumps({**CHAT, **more}).encode()).options() == plain.options()


@pytest.mark.parametrize(
    ("body_class", "value"),
    [
        (CompletionBody, TEXT | {"n": 2, "best_of": 2}),
        (CompletionBody, TEXT | {"best_of": 1}),
        (ResponseBody, {"model": "fake", "input": "hi", "reasoning": {}}),
    ],
)
def test_so_it_is_of_completions_and_responses(body_class, value):
    parse(body_class, json.dumps(value).encode())


def test_the_newer_name_of_a_chats_limit_wins():
    both = {**CHAT, "max_tokens": 5, "max_completion_tokens": 7}
    for more, most in ((both, 7), ({**CHAT, "max_tokens": 5}, 5), (CHAT, None)):
        assert parse(ChatBody, json.dumps(more).encode()).options().get("max_tokens") == most


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
BODIES = {
    ChatBody: CHAT,
    CompletionBody: TEXT,
    MessagesBody: {**CHAT, "max_tokens": 1},
    ResponseBody: {"model": "fake", "input": "hi"},
}
FIELDS = sorted({name for body_class in BODIES for name in body_class.model_fields})


@given(st.dictionaries(st.sampled_from(FIELDS), JSON), st.sampled_from([*BODIES]))
def test_any_json_is_a_body_or_a_refusal(more, body_class):
    base = BODIES[body_class]
    with suppress(RequestError):
        parse(body_class, json.dumps({**base, **more}).encode()).options()


@given(st.binary(max_size=200))
def test_any_bytes_are_a_body_or_a_refusal(content):
    with pytest.raises(RequestError):
        parse(ChatBody, content)


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b"null", 400),
        (b'{"model":"fake","prompt":"\xff"}', 400),
        (b'{"model":"fake","prompt":"\\ud800"}', 400),
        (b'{"model":"fake","prompt":' + b"[" * 50_000, 400),
        (b'{"model":"fake","prompt":' + b'{"a":' * 5_000 + b"1" + b"}" * 5_001, 400),
        (b'{"model":"fake","prompt":"p","temperature":NaN}', 400),
        (b'{"model":"fake","prompt":"p","seed":1e400}', 400),
        (b'{"model":"fake","prompt":"p","seed":' + b"9" * 5_000 + b"}", 400),
        (b'{"model":"' + b"x" * 100_000 + b'","prompt":"p"}', 404),
        (b'{"model":"fake","prompt":"\\u0000"}', 200),
        (b'\xef\xbb\xbf{"model":"fake","prompt":"p"}', 200),
        (b'\xef\xbb\xbf\xef\xbb\xbf{"model":"fake","prompt":"p"}', 400),
        ('{"model":"fake","prompt":"p"}'.encode("utf-16"), 400),
        (b"model=fake&prompt=p", 400),
        (gzip.compress(mtime=0, data=b'{"model":"fake","prompt":"p"}'), 400),
        (b'{"model":"fake","prompt":"p","prompt":"q"}', 400),
        (b'{"model":"fake","prompt":"p","paceline":{"width":1,"width":2}}', 400),
        (b'{"model":"fake","prompt":"p","user":{"a":1,"a":1}}', 400),
        (b'{"model":"fake","prompt":"p","stop":"\\udfff"}', 400),
        (b'{"model":"fake","prompt":"p","stop":["\\u0000"]}', 200),
        (b'{"model":"fake","prompt":[1e0]}', 400),
        (b'{"model":"fake","prompt":[-1]}', 400),
        (b'{"model":"fake","prompt":"p","temperature":-0.0}', 200),
        (b'{"model":"fake","prompt":"p","seed":' + b"9" * 100_000 + b"}", 400),
        (b" " * (3 << 20) + b"{}", 413),
    ],
)
async def test_over_http_a_strange_body_is_answered_with_what_is_wrong(content, status):
    async with gateway_over() as gateway:
        response = await gateway.http.post("/v1/completions", content=content)
    assert response.status_code == status, response.text
    if status != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert len(response.content) < 2000


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "application/json"}, 200),
        ({"content-type": "Application/JSON; charset=UTF-8"}, 200),
        ({"content-type": 'application/json; charset="utf-8"'}, 200),
        ({"content-encoding": "identity"}, 200),
        ({}, 200),
        ({"content-type": ""}, 415),
        ({"content-type": "application/json; charset=utf-16"}, 415),
        ({"content-type": "application/json-patch+json"}, 415),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": "multipart/form-data; boundary=x"}, 415),
        ({"content-encoding": ""}, 200),
        ({"content-encoding": "gzip"}, 400),
        ({"content-encoding": "deflate"}, 400),
        ({"content-encoding": "br"}, 415),
        ({"content-encoding": "identity, gzip"}, 415),
    ],
    ids=str,
)
async def test_a_body_that_is_said_to_be_something_else_is_refused_unread(headers, status):
    content = json.dumps(TEXT).encode()
    async with gateway_over() as gateway:
        answer = await gateway.http.post("/v1/completions", content=content, headers=headers)
    assert answer.status_code == status
    if status != 200:
        assert answer.json()["error"]["param"] == next(iter(headers))
    if status == 415 and "content-encoding" in headers:
        assert answer.headers["accept-encoding"] == "gzip, deflate, identity"
        assert "gzip, deflate, identity" in answer.json()["error"]["message"]


def raw_deflate(content):
    stream = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return stream.compress(content) + stream.flush()


LONG = json.dumps({**TEXT, "prompt": "\u6c34 long " * 60_000}).encode()


@pytest.mark.parametrize(
    ("encoding", "content"),
    [
        ("gzip", gzip.compress(LONG)),
        ("GZIP", gzip.compress(LONG)),
        ("x-gzip", gzip.compress(LONG)),
        ("gzip", gzip.compress(LONG[:9]) + gzip.compress(LONG[9:])),
        ("deflate", zlib.compress(LONG)),
        ("deflate", raw_deflate(LONG)),
    ],
)
async def test_a_compressed_body_is_taken_in_whatever_pieces_it_comes(encoding, content):
    async def pieces():
        for start in range(0, len(content), 1000):
            yield content[start : start + 1000]

    headers = {"content-type": "application/json", "content-encoding": encoding}
    async with gateway_over() as gateway:
        for sent in (content, pieces()):
            answer = await gateway.http.post("/v1/completions", content=sent, headers=headers)
            assert answer.status_code == 200, answer.text
        assert {it.text for it in gateway.requests} == {json.loads(LONG)["prompt"]}


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (gzip.compress(bytes(10 << 20)), 413),
        (gzip.compress(bytes(3 << 20)) * 2, 413),
        (gzip.compress(b"")[:10] + b"\0\0\0\xff\xff" * (2 << 20), 413),
        (gzip.compress(LONG)[:-9], 400),
        (gzip.compress(LONG) + b"more", 400),
        (gzip.compress(LONG)[:100] + bytes(100), 400),
        (b"", 400),
    ],
    ids=["a bomb", "two", "nothing without an end", "cut", "more behind", "broken", "nothing"],
)
async def test_a_compressed_body_is_limited_by_what_it_is_inflated_and_has_to_be_whole(
    content, status, monkeypatch
):
    async def pieces():
        """Send it without its length, of which a body in chunks says nothing."""
        for start in range(0, len(content), 1 << 16):
            yield content[start : start + (1 << 16)]

    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    kept, take = [], FairShares.take
    monkeypatch.setattr(
        FairShares,
        "take",
        lambda shares, share, amount=1: (kept.append(amount), take(shares, share, amount)),
    )
    async with gateway_over() as gateway:
        answer = await gateway.http.post("/v1/completions", content=pieces(), headers=headers)
    assert answer.status_code == status
    assert sum(kept) <= (3 << 20) + 1  # its place is counted, too


WHOLE = [
    json.dumps(
        {
            **TEXT,
            "seed": 7,
            "stop": ["a", "\u00e9"],
            "temperature": 0.5,
            "logprobs": 2,
            "stream_options": None,
            "paceline": {"strategy": "distributed", "width": 2, "min_p": 0.1, "top_k": 40},
        }
    ).encode(),
    json.dumps({**TEXT, "prompt": [[1, 2], [3]], "n": 2, "max_tokens": 5}).encode(),
]
ODD = [
    *(b'"', b"\\", b"\0", b"\xff", b"[", b"]", b"{", b"}", b",", b":", b"-", b"e", b"."),
    *(b"null", b"true", b"NaN", b"-Infinity", b"1e999", b"-1e-999", b"9" * 400, b"0x10", b"1_0"),
    *(b'"\\ud800"', b'"\\u0000"', b'"\xed\xa0\x80"', b"\xef\xbb\xbf", b"[" * 300, b'{"a":' * 300),
]


@settings(max_examples=examples(500))
@given(
    st.sampled_from(WHOLE),
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 12), st.sampled_from(ODD)), max_size=3),
)
def test_a_body_that_was_tampered_with_is_a_message_or_a_refusal(content, changes):
    for start, length, odd in changes:
        content = content[:start] + odd + content[start + length :]
    with suppress(RequestError):
        body = parse(CompletionBody, content)
        for prompt in body.prompt:
            with suppress(InvalidFieldError):
                request = build_request(prompt, body.options())
                assert pb.GenerateRequest.FromString(request.SerializeToString()) == request


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("ab", "ab"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ("", None),
    ],
)
def test_a_prediction_is_a_text_or_its_parts(content, text):
    body = {**CHAT, "prediction": {"type": "content", "content": content}}
    assert parse(ChatBody, json.dumps(body).encode()).options().get("predicted_text") == text
