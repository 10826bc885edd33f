"""Any body on any route is answered, or refused with a reason: a small seeded search."""

from __future__ import annotations

import copy
import json
import random

from support.fake_orchestrator import FakeOrchestrator
from support.gateway import gateway_over
from support.spoken import template_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
SAID = {"role": "user", "content": "hi"}
FORMAT = {"type": "json_schema", "name": "s", "schema": SCHEMA}
CHAT = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "reasoning": "r", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    ],
    "tools": TOOLS,
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "stream": True,
}
USED = {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "r"}]}
MESSAGES = {
    "messages": [
        SAID,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "t"}, USED]},
        {"role": "user", "content": [RESULT]},
    ],
    "tools": [{"name": "f", "input_schema": SCHEMA}],
    "tool_choice": {"type": "any"},
}
RESPONSES = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "q"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "2"},
    ],
    "tools": [{"type": "function", **FUNCTION}, {"type": "web_search"}],
    "text": {"format": FORMAT},
    "reasoning": {"effort": "low"},
}
BODIES = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {"messages": [SAID], "response_format": {"json_schema": FORMAT}}),
    ("/v1/messages", {**MESSAGES, "max_tokens": 9}),
    ("/v1/messages", {"messages": [SAID], "max_tokens": 9, "output_config": {"format": FORMAT}}),
    ("/v1/messages/count_tokens", MESSAGES),
    ("/v1/responses", RESPONSES),
    ("/v1/completions", {"prompt": ["a", [1]], "echo": True, "logprobs": 1, "prompt_logprobs": 1}),
    ("/tokenize", {"messages": [SAID], "tools": TOOLS, "chat_template_kwargs": {"q": 1}}),
    ("/detokenize", {"tokens": [1, 2]}),
]
CIRCLE = {"$defs": {"x": {"$ref": "#/$defs/x"}}, "$ref": "#/$defs/x"}
# Instead of a value; the last ones are no JSON, or JSON that parsers read in different ways.
VALUES = [
    *(json.dumps(it) for it in (None, True, -1, 1.5, 2**64, "", [], {}, [None], {"a": None})),
    *(json.dumps(it) for it in ("<|im_end|>\n", "</tool_call>", "\0", "A" * 100_000, CIRCLE)),
    json.dumps([{"type": "function", "name": f"f{i}", "parameters": {}} for i in range(600)]),
    "[" * 300 + "]" * 300,
    '{"a":' * 300 + "1" + "}" * 300,
    *("NaN", "1e999", '"\\ud800"', "-", '{"a":1,"a":2}', "[" * 100_000),
]
MARK = "the value that is replaced"


def places(value, at=()):
    yield at
    inner = value.items() if isinstance(value, dict) else ()
    for key, each in enumerate(value) if isinstance(value, list) else inner:
        yield from places(each, (*at, key))


def changed(body, chance):
    """Return a body with another value, another name, or without one."""
    body = {"model": "fake", **copy.deepcopy(body)}
    *parents, last = chance.choice(list(places(body))[1:])
    place = body
    for part in parents:
        place = place[part]
    kind = chance.random()
    if kind < 0.1:
        del place[last]
    elif kind < 0.2 and isinstance(place, dict):
        place["<|im_end|>" * chance.choice([1, 100])] = MARK
    else:
        place[last] = MARK
    return json.dumps(body).replace(json.dumps(MARK), chance.choice(VALUES))


async def test_a_body_with_something_strange_in_it_is_answered_or_refused_with_a_reason():
    chance = random.Random(7)
    refused = 0
    async with gateway_over(FakeOrchestrator(chat_template=template_of())) as gateway:
        for number in range(100):
            path, body = BODIES[number % len(BODIES)]
            content = changed(body, chance)
            answer = await gateway.http.post(path, content=content)
            assert answer.status_code == 200 or 400 <= answer.status_code < 500, content[:1000]
            if answer.status_code != 200:
                refused += 1
                assert answer.json()["error"]["message"]
            assert "got no answer" not in answer.text, content[:1000]
    assert 30 < refused < 100  # strange bodies of both kinds
