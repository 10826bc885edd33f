"""/v1/messages: Anthropic's interface over plain HTTP."""

from __future__ import annotations

import asyncio
import json

import pytest

from paceline import errors
from paceline_gateway.bodies.json_body import parse
from paceline_gateway.bodies.message_schemas import MessagesBody
from paceline_gateway.http.connection import IGNORED_HEADER
from support.fake_orchestrator import PROMPT_LENGTH, FakeOrchestrator, Leg
from support.gateway import TEMPLATE, gateway_over
from support.keys import SECRET, entry
from support.spoken import CALL, HELLO, THOUGHT, model, template_of

USER = [{"role": "user", "content": "What is the weather in Bonn?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"name": "weather", "description": "Tells it.", "input_schema": SCHEMA}]
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
ASKED = {"messages": USER, "max_tokens": 100}


async def ask(gateway, **body):
    answer = await gateway.post("/v1/messages", **{**ASKED, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def events_of(gateway, **body):
    """Return the events of a stream; each is named in its data, too."""
    answer = await gateway.post("/v1/messages", **{**ASKED, "stream": True, **body})
    events = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def put_together(events):
    """Build the message of a stream, as clients do."""
    message = {}
    inputs = {}
    for event in events:
        match event:
            case {"type": "message_start", "message": dict() as message}:
                pass
            case {"type": "content_block_start", "index": index, "content_block": block}:
                assert index == len(message["content"])
                message["content"].append(dict(block))
            case {"type": "content_block_delta", "index": index, "delta": delta}:
                assert index == len(message["content"]) - 1
                block = message["content"][index]
                kind = delta["type"].removesuffix("_delta")
                if kind == "input_json":
                    inputs[index] = inputs.get(index, "") + delta["partial_json"]
                else:
                    block[kind] += delta[kind]
            case {"type": "message_delta", "delta": delta, "usage": usage}:
                message |= {**delta, "usage": usage}
    for index, text in inputs.items():
        message["content"][index]["input"] = json.loads(text)
    return message


async def test_an_answer_is_whole_or_streamed_and_says_the_same():
    async with gateway_over(model([*THOUGHT, *HELLO], [*THOUGHT, *HELLO])) as gateway:
        whole = await ask(gateway)
        events = await events_of(gateway)
    assert whole["content"] == [
        {"type": "thinking", "thinking": "it is far", "signature": ""},
        {"type": "text", "text": "Hello"},
    ]
    assert whole["usage"] == {
        "input_tokens": PROMPT_LENGTH - 1,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 1,
        "output_tokens": len(THOUGHT) + len(HELLO),
        "output_tokens_details": {"thinking_tokens": 5},
    }
    assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", "fake")
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("end_turn", None)
    streamed = put_together(events)
    assert whole | {"id": ""} == streamed | {"id": ""}
    assert streamed["id"].startswith("msg_")


async def test_events_come_in_anthropics_order():
    async with gateway_over(model([*THOUGHT, *CALL])) as gateway:
        events = await events_of(gateway, tools=TOOLS)
    told = [
        it["content_block"]["type"]
        if it["type"] == "content_block_start"
        else it["delta"]["type"]
        if it["type"] == "content_block_delta"
        else it["type"]
        for it in events
    ]
    in_turn = [it for index, it in enumerate(told) if index == 0 or it != told[index - 1]]
    assert in_turn == [
        "message_start",
        "ping",
        *("thinking", "thinking_delta", "content_block_stop"),
        *("text", "text_delta", "content_block_stop"),
        *("tool_use", "input_json_delta", "content_block_stop"),
        "message_delta",
        "message_stop",
    ]
    assert told.count("input_json_delta") == 3


async def test_a_call_goes_to_the_client_and_its_result_comes_back():
    async with gateway_over(model(CALL, HELLO)) as gateway:
        called = await ask(gateway, tools=TOOLS)
        result = {
            "type": "tool_result",
            "tool_use_id": called["content"][1]["id"],
            "content": [{"type": "text", "text": "no such city"}],
            "is_error": True,
        }
        turns = [
            *USER,
            {"role": "assistant", "content": called["content"]},
            {"role": "user", "content": [result, {"type": "text", "text": "Try again."}]},
        ]
        answer = await ask(gateway, tools=TOOLS, messages=turns)
        first, second = gateway.requests
    assert called["stop_reason"] == "tool_use"
    assert called["content"][0] == {"type": "text", "text": "I look."}
    call = called["content"][1]
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Bonn"})
    assert answer["content"] == [{"type": "text", "text": "Hello"}]
    assert "Tells it." in first.text
    assert not first.sampling.HasField("grammar")
    prompt = second.text
    places = [prompt.index(it) for it in ('"city": "Bonn"', "Error: no such city", "Try again.")]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("choice", "has_grammar", "has_tools"),
    [
        ({"type": "auto"}, False, True),
        ({"type": "none"}, False, False),
        ({"type": "any"}, True, True),
        ({"type": "tool", "name": "weather", "disable_parallel_tool_use": True}, True, True),
    ],
)
async def test_the_choice_of_tools_counts(choice, has_grammar, has_tools):
    async with gateway_over(model(CALL)) as gateway:
        await ask(gateway, tools=TOOLS, tool_choice=choice)
        (request,) = gateway.requests
    assert request.sampling.HasField("grammar") == has_grammar
    assert ("Tells it." in request.text) == has_tools


async def test_only_one_call_is_told_if_only_one_may_be():
    async with gateway_over(model([*CALL[:-1], *CALL])) as gateway:
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        answer = await ask(gateway, tools=TOOLS, tool_choice=choice)
    assert [it["type"] for it in answer["content"]].count("tool_use") == 1


async def test_why_an_answer_ended_is_told():
    fake = model(CALL, CALL, HELLO, [*CALL[:6], CALL[-1]])
    fake.script[2].stop_string = "END"
    async with gateway_over(fake) as gateway:
        cut = await ask(gateway, tools=TOOLS, max_tokens=6)
        streamed = put_together(await events_of(gateway, max_tokens=1))
        stopped = await ask(gateway, stop_sequences=["END", "x"])
        (*_, request) = gateway.requests
        ended = await ask(gateway, tools=TOOLS)
    assert ended["stop_reason"] == "end_turn"  # within a call, which is not to be run
    assert (cut["stop_reason"], streamed["stop_reason"]) == ("max_tokens", "max_tokens")
    assert cut["content"][1]["input"] == {}
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "END")
    assert list(request.stop_strings) == ["END", "x"]


async def test_sampling_thinking_and_a_format_reach_the_servers():
    template = template_of()
    template.source += "{% if thinking %}<think>{% endif %}"
    body = {
        "system": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        "metadata": {"user_id": "u"},
        "anything": 1,
    }
    async with gateway_over(model(HELLO, template=template)) as gateway:
        answer = await gateway.post("/v1/messages", **ASKED, **body)
        (request,) = gateway.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 7)
    assert sampling.HasField("grammar")
    assert "Be brief." in request.text
    assert request.text.endswith("<think>")
    assert request.max_tokens == 100
    assert "{0,1024}" in sampling.grammar.lark
    assert answer.headers[IGNORED_HEADER] == "anything"
    assert answer.headers["request-id"] == answer.headers["x-request-id"]


async def test_a_budget_of_thinking_is_named_where_nothing_constrains_the_answer():
    thinking = {"type": "enabled", "budget_tokens": 1024}
    async with gateway_over(model(HELLO)) as gateway:
        answer = await gateway.post("/v1/messages", **ASKED, thinking=thinking)
        counted = await gateway.post(
            "/v1/messages/count_tokens",
            **{it: value for it, value in ASKED.items() if it != "max_tokens"},
            thinking=thinking,
        )
        assert not gateway.requests[0].sampling.HasField("grammar")
    for each in (answer, counted):
        assert "thinking.budget_tokens" in each.headers[IGNORED_HEADER].split(", ")


async def test_what_makes_no_difference_with_this_model_is_named():
    fake = FakeOrchestrator(chat_template=TEMPLATE)
    body = {"thinking": {"type": "enabled"}, "output_config": {"effort": "low"}}
    tools = [{"type": "web_search_20250305", "name": "web_search"}]
    async with gateway_over(fake) as gateway:
        answer = await gateway.post("/v1/messages", **ASKED, **body, tools=tools)
        unasked = await gateway.post("/v1/messages", **ASKED, thinking={"type": "disabled"})
    assert answer.headers[IGNORED_HEADER] == "tools[0], thinking, output_config.effort"
    assert IGNORED_HEADER not in unasked.headers
    async with gateway_over(FakeOrchestrator(chat_template=TEMPLATE), strict=True) as gateway:
        answer = await gateway.post("/v1/messages", **ASKED, **body)
    assert answer.json()["error"]["message"].startswith("thinking: is not supported")


def test_turns_become_messages():
    turns = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b", "cache_control": {}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "c"},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"x": "é"}},
                {"type": "tool_use", "id": "2", "name": "g", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": "r"},
                {"type": "tool_result", "tool_use_id": "2"},
                {"type": "text", "text": "d"},
                {"type": "text", "text": "e"},
            ],
        },
    ]
    body = parse(
        MessagesBody, json.dumps({"model": "m", "max_tokens": 1, "messages": turns}).encode()
    )
    told = [(it.role, it.content, it.tool_call_id) for it in body.conversation.messages]
    assert told == [
        ("user", "a\n\nb", ""),
        ("assistant", "c", ""),
        ("tool", "r", "1"),
        ("tool", "", "2"),
        ("user", ("d", "e"), ""),
    ]
    answer = body.conversation.messages[1]
    assert answer.reasoning == "t"
    calls = [(it.id, it.name, it.argument_object) for it in answer.tool_calls]
    assert calls == [("1", "f", {"x": "é"}), ("2", "g", {})]


def said(role, *blocks):
    return {"messages": [*USER, {"role": role, "content": [*blocks]}]}


WRONG = [
    ({"max_tokens": None}, "max_tokens: is needed"),
    ({"max_tokens": 0}, "max_tokens: "),
    ({"messages": []}, "messages: "),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content: must have blocks"),
    ({"messages": None}, "messages: is needed"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role: "),
    (said("user", IMAGE), 'messages[1].content[0]: is a block of the kind "image"'),
    (said("user", {"type": "document"}), "messages[1].content[0]: is a block of the kind"),
    (
        said("user", {"type": "tool_result", "tool_use_id": "1", "content": [IMAGE]}),
        'messages[1].content[0].content[0]: is a block of the kind "image"',
    ),
    (said("user", {"type": "tool_use", "id": "1"}), "messages[1].content[0]: needs the field"),
    (
        said("user", {"type": "tool_use", "id": "1", "name": "f", "input": {}}),
        "messages[1].content: has a block of the kind tool_use, of another role",
    ),
    (said("assistant"), "messages: must not end with a message of the assistant without text"),
    (
        said("assistant", {"type": "tool_use", "id": "1", "name": "f", "input": {}}),
        "messages: must not end with a message of the assistant without text",
    ),
    (
        said("assistant", {"type": "text", "text": "I"})
        | {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
        "messages: to continue the last message is not supported beside a format",
    ),
    ({"tool_choice": {"type": "any"}}, "tool_choice: needs tools"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice: needs a name"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema: is needed"),
    ({"tools": TOOLS * 2}, "tools: has two tools"),
    ({"tools": TOOLS}, "tools: the model's chat template"),
    ({"system": [IMAGE]}, "system[0]: is a block of the kind"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type: must be one of"),
    ({"output_config": {"format": {"type": "text"}}}, "output_config.format: must be"),
    ({"mcp_servers": [{}]}, "mcp_servers: is not supported"),
    ({"container": "c"}, "container: is not supported"),
    ({"context_management": {"edits": [{"type": "x"}]}}, "context_management: is not"),
    ({"frequency_penalty": 1}, "frequency_penalty: is not supported"),
]


async def test_what_is_wrong_is_named():
    async with gateway_over(tool_parser="hermes") as gateway:
        for more, words in WRONG:
            answer = await gateway.post("/v1/messages", **{**ASKED, **more})
            told = answer.json()
            assert answer.status_code == 400, told
            assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
            assert told["error"]["message"].startswith(words), told
            assert told["request_id"] == answer.headers["request-id"]


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (errors.InvalidFieldError.of("stop_strings", "no"), 400, "invalid_request_error"),
        (errors.InternalError("secret"), 500, "api_error"),
        (errors.OverloadedError("full"), 529, "overloaded_error"),
        (errors.NoTargetError("none"), 529, "overloaded_error"),
        (errors.DeadlineError("late"), 504, "timeout_error"),
    ],
)
async def test_errors_of_servers_have_anthropics_form(error, status, kind):
    leg = Leg(error=error, refuses=True)
    fake = FakeOrchestrator(script=[leg] * 4, chat_template=TEMPLATE)
    async with gateway_over(fake) as gateway:
        answer = await gateway.post("/v1/messages", **ASKED, stream=True)
    told = answer.json()
    assert (answer.status_code, told["type"], told["error"]["type"]) == (status, "error", kind)
    assert ("retry-after" in answer.headers) == (status == 529)
    if status == 400:
        assert told["error"]["message"] == "stop_sequences: no"


async def test_an_error_in_mid_stream_is_an_event():
    leg = Leg(error=errors.InternalError("secret"), chunks=1)
    async with gateway_over(FakeOrchestrator(script=[leg], chat_template=TEMPLATE)) as gateway:
        (*_, before, last) = await events_of(gateway)
    assert before["delta"] == {"type": "text_delta", "text": "3 "}
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")


async def test_errors_before_a_handler_have_that_form_too(tmp_path):
    (tmp_path / "keys").write_text(entry() + entry("bob", "spent", tokens_per_minute=1))
    async with gateway_over(api_keys=tmp_path / "keys") as gateway:

        async def post(path="/v1/messages", **headers):
            body = {"model": "fake", **ASKED}
            return await gateway.http.post(path, json=body, headers=headers)

        by_key = await post(**{"x-api-key": SECRET, "anthropic-version": "2023-06-01"})
        by_token = await post(authorization=f"Bearer {SECRET}", **{"anthropic-beta": "a,b"})
        by_both = [
            await post(authorization=f"{scheme}{SECRET}", **{"x-api-key": SECRET})
            for scheme in ("Bearer ", "bearer ", "BEARER   ")
        ]
        refused = [
            await post(),
            await post(**{"x-api-key": "wrong"}),
            await post(authorization=f"Bearer {SECRET}", **{"x-api-key": "another"}),
            await post(authorization="Bearer another", **{"x-api-key": SECRET}),
            await post(authorization=f"Basic {SECRET}", **{"x-api-key": SECRET}),
        ]
        spent = [await post(**{"x-api-key": "spent"}) for _ in range(2)][1]
        unknown = await post("/v1/messages/batches")
        other = await gateway.http.post(
            "/v1/messages", json={**ASKED, "model": "x"}, headers={"x-api-key": SECRET}
        )
        large = await gateway.http.post(
            "/v1/messages",
            content=b" " * (3 << 20) + b"{}",
            headers={"x-api-key": SECRET, "content-type": "application/json"},
        )
    assert [it.status_code for it in (by_key, by_token, *by_both)] == [200] * 5
    told = [
        (it.status_code, it.json()["error"]["type"])
        for it in (*refused, spent, unknown, other, large)
    ]
    assert told == [
        *[(401, "authentication_error")] * 5,
        (429, "rate_limit_error"),
        (404, "not_found_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
    ]


async def test_leaving_a_stream_cancels_the_work():
    fake = FakeOrchestrator(script=[Leg(hangs=True, chunks=1)], chat_template=TEMPLATE)
    async with gateway_over(fake) as gateway:
        body = {"model": "fake", **ASKED, "stream": True}
        async with gateway.http.stream("POST", "/v1/messages", json=body) as answer:
            async for line in answer.aiter_lines():
                if "text_delta" in line:
                    break
        async with asyncio.timeout(90):
            await fake.cancelled.wait()


async def test_the_tokens_of_a_conversation_are_counted_as_it_is_written():
    async with gateway_over(model(HELLO)) as gateway:
        body = {"messages": USER, "system": "Be brief.", "tools": TOOLS}
        counted = await gateway.post("/v1/messages/count_tokens", **body)
        await ask(gateway, **body)
        asked, answered = gateway.requests
        refused = await gateway.post("/v1/messages/count_tokens", messages=[])
    assert counted.json() == {"input_tokens": len(answered.text.encode())}
    assert (asked.add_special_tokens, asked.parse_special_tokens) == (False, True)
    assert refused.json()["error"]["type"] == "invalid_request_error"


async def test_an_answer_has_the_room_that_the_context_has():
    # The fake's context is 100 tokens, and a letter is a token.
    full = errors.ContextLengthExceededError.of("max_tokens", "must be in [1, 78] with this prompt")
    long = errors.ContextLengthExceededError.of("prompt", "must be less than 100 tokens")
    legs = [Leg(error=full, refuses=True), Leg(), Leg(error=long, refuses=True)]
    async with gateway_over(FakeOrchestrator(script=legs, chat_template=TEMPLATE)) as gateway:
        hello = [{"role": "user", "content": "hello"}]
        answer = await ask(gateway, messages=hello, max_tokens=32_000)
        first, _, second = gateway.requests
        refused = await gateway.post("/v1/messages", **ASKED)
    assert answer["stop_reason"] == "model_context_window_exceeded"
    assert (first.max_tokens, second.max_tokens) == (32_000, 100 - len(first.text))
    assert answer["usage"]["output_tokens"] == second.max_tokens
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("messages: ")


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"stop": ["x"]}, "stop"),  # of OpenAI's: here it is stop_sequences
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_a_field_that_does_not_belong_here_is_refused_by_the_name_it_came_with(
    more, name, path
):
    asked = ASKED if path == "/v1/messages" else {"messages": USER}
    async with gateway_over() as gateway:
        answer = await gateway.post(path, **asked, **more)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == f"{name}: is not supported"


@pytest.mark.parametrize("system", ["", [], [{"type": "text", "text": ""}]])
async def test_an_empty_system_prompt_is_none(system):
    async with gateway_over() as gateway:
        await ask(gateway, system=system)
        (request,) = gateway.requests
    assert "<system>" not in request.text
