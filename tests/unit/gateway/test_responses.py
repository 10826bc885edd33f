"""/v1/responses as OpenAI's own client sees it."""

from __future__ import annotations

import json

import openai
import pytest

from paceline import errors
from paceline_gateway.http.connection import IGNORED_HEADER
from support.fake_orchestrator import PROMPT_LENGTH, FakeOrchestrator, Leg
from support.gateway import TEMPLATE, gateway_over
from support.spoken import CALL, HELLO, THOUGHT, model

ASKED = {"model": "fake", "input": "hello", "max_output_tokens": 3}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "name": "weather", "description": "Tells it.", "parameters": SCHEMA}


async def test_a_response_is_whole_or_streamed_and_says_the_same():
    async with gateway_over() as gateway:
        whole = await gateway.client.responses.create(**ASKED)
        stream = await gateway.client.responses.create(**ASKED, stream=True)
        events = [event async for event in stream]
    assert whole.output_text == "3 4 5 "
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    counts = (whole.usage.input_tokens, whole.usage.output_tokens, whole.usage.total_tokens)
    assert counts == (PROMPT_LENGTH, 3, PROMPT_LENGTH + 3)
    assert whole.usage.input_tokens_details.cached_tokens == 1
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text == events[-1].response.output_text
    assert [event.type for event in events if not event.type.endswith("delta")] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == [*range(len(events))]


async def test_instructions_and_turns_are_written_by_the_models_template():
    turns = [
        {"role": "user", "content": "a"},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "b", "annotations": []}],
        },
        {"role": "user", "content": [{"type": "input_text", "text": "c"}]},
    ]
    async with gateway_over() as gateway:
        await gateway.client.responses.create(model="fake", input=turns, instructions="be brief")
        (request,) = gateway.requests
    assert request.text == "<s><system>be brief<user>a<assistant>b<user>c<assistant>"
    assert request.parse_special_tokens


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"background": True}, "background"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0]"),
        ({"input": [{"type": "computer_call"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"max_tokens": 3}, "max_tokens"),  # of chat: here it is max_output_tokens
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
async def test_what_is_not_supported_is_refused_by_its_name(more, param):
    async with gateway_over() as gateway:
        response = await gateway.post("/v1/responses", **{**ASKED, **more})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_an_error_in_mid_stream_reaches_the_client():
    leg = Leg(error=errors.InternalError("secret"), chunks=1)
    fake = FakeOrchestrator(script=[leg], chat_template=TEMPLATE)
    async with gateway_over(fake) as gateway:
        stream = await gateway.client.responses.create(**ASKED, stream=True)
        with pytest.raises(openai.APIError, match="gateway got no answer"):
            [event async for event in stream]


async def test_an_error_in_mid_stream_is_the_next_event_in_this_interfaces_form():
    leg = Leg(error=errors.InternalError("secret"), chunks=1)
    async with gateway_over(FakeOrchestrator(script=[leg], chat_template=TEMPLATE)) as gateway:
        answer = await gateway.post("/v1/responses", input="hello", stream=True)
    *before, (name, last) = [it.split("\n") for it in answer.text.strip().split("\n\n")]
    told = json.loads(last.removeprefix("data: "))
    assert name == "event: error"
    assert told.pop("error")["message"] == told["message"]
    assert told == {
        "type": "error",
        "code": "internal",
        "message": told["message"],
        "param": None,
        "sequence_number": len(before),
    }


async def test_an_answer_that_thinks_and_calls_has_an_item_for_each():
    asked = {"model": "fake", "input": "hi", "tools": [TOOL]}
    async with gateway_over(model([*THOUGHT, *CALL], [*THOUGHT, *CALL])) as gateway:
        whole = await gateway.client.responses.create(**asked)
        stream = await gateway.client.responses.create(**asked, stream=True)
        events = [event async for event in stream]
        requests = gateway.requests
    thought, message, call = whole.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "it is far")
    assert (message.type, message.content[0].text) == ("message", "I look.")
    assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
    assert json.loads(call.arguments) == {"city": "Bonn"}
    assert whole.usage.output_tokens_details.reasoning_tokens == 5
    assert (whole.status, whole.tool_choice, whole.parallel_tool_calls) == (
        "completed",
        "auto",
        True,
    )
    assert whole.tools[0].name == "weather"
    assert "Tells it." in requests[0].text
    told = [event.type.removeprefix("response.") for event in events]
    in_turn = [it for index, it in enumerate(told) if index == 0 or it != told[index - 1]]
    assert in_turn == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    last = events[-1].response
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == last.output
    assert len({item.id for item in done}) == 3
    pieces = [it.delta for it in events if it.type == "response.function_call_arguments.delta"]
    assert len(pieces) == 3
    assert json.loads("".join(pieces)) == {"city": "Bonn"}
    assert [it.output_index for it in events if hasattr(it, "output_index")][-1] == 2


async def test_the_items_of_an_answer_come_back_as_one_message():
    async with gateway_over(model([*THOUGHT, *CALL], HELLO, HELLO)) as gateway:
        client = gateway.client.responses
        called = await client.create(model="fake", input="hi", tools=[TOOL])
        call_id = called.output[-1].call_id
        result = {"type": "function_call_output", "call_id": call_id, "output": "sunny"}
        items = [{"role": "user", "content": "hi"}, *called.output, result]
        answer = await client.create(model="fake", input=items, tools=[TOOL])
        prompt = gateway.requests[1].text
        forced = {"type": "function", "name": "weather"}
        await client.create(model="fake", input="hi", tools=[TOOL], tool_choice=forced)
        grammar = gateway.requests[2].sampling.HasField("grammar")
    assert answer.output_text == "Hello"
    assert prompt.count("<|im_start|>assistant") == 2
    assert prompt.index("I look.") < prompt.index('"city": "Bonn"') < prompt.index("sunny")
    assert grammar


async def test_what_agents_send_and_makes_no_difference_is_named():
    more = {
        "tools": [{"type": "web_search"}, TOOL, {"type": "custom", "name": "apply_patch"}],
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "low", "summary": "auto"},
        "store": False,
        "prompt_cache_key": "k",
        "text": {"verbosity": "low"},
        "max_tool_calls": 3,
    }
    async with gateway_over(model(HELLO)) as gateway:
        answer = await gateway.post("/v1/responses", **ASKED, **more)
        strict = await gateway.post("/v1/responses", **ASKED, store=True)
    assert answer.headers[IGNORED_HEADER].split(", ") == [
        "text.verbosity",
        "tools[0]",
        "tools[2]",
        "max_tool_calls",
        "reasoning.effort",
        "reasoning.summary",
        "include.reasoning.encrypted_content",
    ]
    assert [it["name"] for it in answer.json()["tools"]] == ["weather"]
    assert "nothing is stored here" in strict.json()["error"]["message"]


async def test_what_was_cut_is_incomplete():
    async with gateway_over(model(CALL, [*CALL[:6], CALL[-1]])) as gateway:
        answer = await gateway.client.responses.create(
            model="fake", input="hi", tools=[TOOL], max_output_tokens=6
        )
        ended = await gateway.client.responses.create(model="fake", input="hi", tools=[TOOL])
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [it.status for it in answer.output] == ["completed", "incomplete"]
    # The model itself ended within a call, which is not to be run.
    assert [it.status for it in ended.output] == ["completed", "incomplete"]


async def test_what_servers_refuse_has_this_interfaces_names():
    for field, param in (("max_tokens", "max_output_tokens"), ("sampling.grammar", "text.format")):
        leg = Leg(error=errors.InvalidFieldError.of(field, "is wrong"), refuses=True)
        fake = FakeOrchestrator(script=[leg], chat_template=TEMPLATE)
        async with gateway_over(fake) as gateway:
            answer = await gateway.post("/v1/responses", **ASKED)
        told = answer.json()["error"]
        assert (told["param"], told["message"]) == (param, f"{param}: is wrong")
