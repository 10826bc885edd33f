"""/v1/responses as OpenAI's own client sees it."""

from __future__ import annotations

import json

import openai
import pytest

from paceline import errors
from support.fake_orchestrator import PROMPT_LENGTH, FakeOrchestrator, Leg
from support.gateway import TEMPLATE, gateway_over

ASKED = {"model": "fake", "input": "hello", "max_output_tokens": 3}


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
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"background": True}, "background"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].role"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"text": {"format": {"type": "grammar"}}}, "text"),
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
