"""Bodies that chance has spoilt: an answer or a refusal on every route, never a fault of ours."""

from __future__ import annotations

import copy
import json
import logging
import random

import pytest

from support.gateway import gateway_over
from support.spoken import CALL, model

USER = {"role": "user", "content": "What is the weather in Bonn?"}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "minLength": 1}, "n": {"enum": [1, "a", None]}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x"}, {"multipleOf": 2}]}},
}
FUNCTION = {"name": "weather", "description": "d", "parameters": SCHEMA, "strict": True}
CALLED = {
    "role": "assistant",
    "content": None,
    "reasoning_content": "so",
    "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    ],
}
SAMPLED = {
    "model": "fake",
    "temperature": 0.5,
    "top_p": 0.9,
    "seed": 7,
    "paceline": {"strategy": "distributed", "width": 2, "top_k": 40},
}
CHOSEN = {
    **SAMPLED,
    "max_tokens": 5,
    "n": 2,
    "stop": ["a"],
    "logit_bias": {"5": -1},
    "min_tokens": 1,
    "repetition_penalty": 1.1,
}
BODIES = [
    (
        "/v1/chat/completions",
        {
            **CHOSEN,
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "s"}]},
                USER,
                CALLED,
                {"role": "tool", "tool_call_id": "a", "content": "warm"},
            ],
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
            "logprobs": True,
            "top_logprobs": 2,
            "reasoning_effort": "low",
            "chat_template_kwargs": {"enable_thinking": False},
            "stream_options": None,
        },
    ),
    (
        "/v1/chat/completions",
        {
            **CHOSEN,
            "messages": [USER],
            "stream": True,
            "stream_options": {"include_usage": True},
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA, "lenient": True},
            },
            "prediction": {"type": "content", "content": "abc"},
        },
    ),
    (
        "/v1/completions",
        {
            **CHOSEN,
            "prompt": [[1, 2], [3]],
            "echo": True,
            "logprobs": 2,
            "structured_outputs": {"json": SCHEMA},
        },
    ),
    ("/v1/completions", {**SAMPLED, "prompt": "p", "suffix": "s", "stream": True, "best_of": 1}),
    (
        "/v1/responses",
        {
            **SAMPLED,
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
                {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "a", "output": "warm"},
            ],
            "instructions": "i",
            "tools": [{"type": "function", **FUNCTION}],
            "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
            "reasoning": {"effort": "low"},
            "max_output_tokens": 5,
            "include": ["reasoning.encrypted_content"],
            "store": False,
        },
    ),
    (
        "/v1/messages",
        {
            "model": "fake",
            "max_tokens": 5,
            "system": [{"type": "text", "text": "s"}],
            "messages": [
                {"role": "user", "content": "x"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "t", "signature": "s"},
                        {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "B"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "a", "content": "warm"}],
                },
            ],
            "tools": [{"name": "weather", "description": "d", "input_schema": SCHEMA}],
            "tool_choice": {"type": "any"},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "stop_sequences": ["a"],
        },
    ),
    ("/v1/messages/count_tokens", {"model": "fake", "messages": [USER], "system": "s"}),
    ("/tokenize", {"model": "fake", "prompt": "abc", "return_token_strs": True}),
    ("/tokenize", {"model": "fake", "messages": [USER], "add_generation_prompt": True}),
    ("/detokenize", {"model": "fake", "tokens": [1, 2, 3]}),
    ("/paceline/generate", {**SAMPLED, "messages": [USER], "max_tokens": 5}),
]
ODD = [
    *(None, True, False, 0, -1, 1, 0.5, 1e308, 1 << 31, 1 << 32, 1 << 63, 1 << 64, 10**400),
    *("", "a", "null", "\0", "\ud800", "\u6c34" * 50, "x" * 3000, "<tool_call>", "#/a", "../.."),
    *([], {}, [[]], [None], {"": None}, [0] * 40, {"type": "text"}, {"type": "x", "a": [{}]}),
    *({"$ref": "#"}, {"type": "function", "function": {}}, [{"role": "user", "content": []}]),
]
BYTES = [
    *(b'"', b"\\", b"\0", b"\xff", b"[", b"]", b"{", b"}", b",", b":", b"-", b"e", b"."),
    *(b"NaN", b"-Infinity", b"1e999", b"9" * 400, b'"\\ud800"', b"\xef\xbb\xbf", b"[" * 300),
]


def spoilt(body, chance: random.Random) -> bytes:
    """Change one to four values or names of a body, and at times bytes of what is written."""
    body = copy.deepcopy(body)
    for _ in range(chance.choice((1, 1, 1, 2, 2, 3, 4))):
        if places := [*places_of(body)]:
            spoil(*chance.choice(places), places, chance)
    content = json.dumps(body).encode()
    if chance.random() < 0.15:
        start = chance.randrange(len(content))
        end = start + chance.choice((0, 1, 1, 5))
        content = content[:start] + chance.choice(BYTES) + content[end:]
    return content


def spoil(holder, key, places, chance: random.Random):
    """Change what is at one place, its name, or how deep it is."""
    match chance.randrange(6):
        case 0 | 1:
            holder[key] = copy.deepcopy(chance.choice(ODD))
        case 2:
            del holder[key]
        case 3:
            other, name = chance.choice(places)
            holder[key] = copy.deepcopy(other[name])
        case 4 if isinstance(holder, dict):
            holder[chance.choice((*ALL_NAMES, "", "unknown"))] = holder.pop(key)
        case 4:
            holder += copy.deepcopy(holder) * chance.choice((1, 50))
        case 5:
            for _ in range(chance.choice((1, 5, 80))):
                holder[key] = [holder[key]] if chance.random() < 0.5 else {"items": holder[key]}


def places_of(value):
    """Yield each place in a body: what holds a value, and under which name or number."""
    for key, each in [*value.items()] if isinstance(value, dict) else [*enumerate(value)]:
        yield value, key
        if isinstance(each, dict | list):
            yield from places_of(each)


ALL_NAMES = sorted(
    {key for _, body in BODIES for _, key in places_of(body) if isinstance(key, str)}
)


# 10,000 with `make test-full`.
ROUNDS = [
    200,
    pytest.param(1000, marks=pytest.mark.long),
    *(pytest.param(1000 + it, marks=pytest.mark.full) for it in range(1, 10)),
]


@pytest.mark.parametrize("count", ROUNDS)
async def test_a_spoilt_body_is_answered_or_refused_with_what_is_wrong(count, caplog):
    chance, answered = random.Random(count), 0
    async with gateway_over(model(CALL)) as gateway:
        for number in range(count):
            route, body = BODIES[number % len(BODIES)]
            content = json.dumps(body).encode() if number < len(BODIES) else spoilt(body, chance)
            kind = {"content-type": "application/json"}
            answer = await gateway.http.post(route, content=content, headers=kind)
            told = (number, route, content, answer.text)
            assert answer.status_code in {200, 400, 404, 413}, told
            assert not [it for it in caplog.records if it.levelno >= logging.ERROR], told
            if answer.status_code == 200:
                answered += 1
            else:
                error = answer.json()["error"]
                assert error["message"], told
                assert len(answer.content) < 3000, told
    assert answered > count / 10
