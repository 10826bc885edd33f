"""An answer goes on with the assistant's last message, wherever the template would end it."""

from __future__ import annotations

import pytest

from paceline.v1.model_service_pb2 import ChatTemplate
from support.fake_orchestrator import FakeOrchestrator, Leg
from support.gateway import TEMPLATE, gateway_over
from support.spoken import CALL, THOUGHT, model, template_of

USER = {"role": "user", "content": "Where?"}
BEGUN = {"role": "assistant", "content": "In <s> "}
CALLING = BEGUN | {
    "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    ]
}
ENDED = "{% for it in messages %}<{{ it.role }}>{{ it.content | trim }}</s>\n{% endfor %}"
WAYS = {
    "vLLM": ("/v1/chat/completions", BEGUN, {"continue_final_message": True}),
    "prefix": ("/v1/chat/completions", BEGUN | {"prefix": True}, {}),
    "partial": ("/v1/chat/completions", BEGUN | {"partial": True}, {}),
    "Anthropic": ("/v1/messages", BEGUN, {"max_tokens": 9}),
}


def ended_template(source=ENDED):
    return ChatTemplate(fingerprint=source, source=source, special_tokens=["<s>", "</s>"])


def prompt_of(request):
    return request.text or "".join(it.text for it in request.parts.parts)


@pytest.mark.parametrize("way", WAYS)
async def test_the_prompt_ends_where_the_message_does_and_the_answer_is_the_rest(way):
    path, begun, more = WAYS[way]
    said = ((5, " Bonn"), (6, ", I think."))
    fake = FakeOrchestrator([Leg(said=said)], chat_template=ended_template())
    async with gateway_over(fake) as gateway:
        told = (await gateway.post(path, messages=[USER, begun], **more)).json()
    content = told["choices"][0]["message"]["content"] if "choices" in told else None
    assert content or told["content"][0]["text"] == " Bonn, I think."
    assert prompt_of(fake.requests[0]) == "<user>Where?</s>\n<assistant>In <s> "


async def test_a_model_that_thinks_has_done_so_and_may_still_call():
    fake = model(((5, "\n in Bonn"), (904, "")), CALL, template=template_of())
    async with gateway_over(fake) as gateway:
        function = {"name": "weather", "parameters": {"type": "object"}}
        tools = [{"type": "function", "function": function}]
        asked = {"messages": [USER, BEGUN], "continue_final_message": True}
        plain = await gateway.post("/v1/chat/completions", **asked)
        calling = await gateway.post("/v1/chat/completions", **asked, tools=tools)
    assert plain.json()["choices"][0]["message"]["content"] == "\n in Bonn"
    assert calling.json()["choices"][0]["finish_reason"] == "tool_calls"


async def test_what_looks_like_a_thought_in_the_middle_is_said():
    fake = model((*THOUGHT, (5, "in Bonn"), (904, "")), template=template_of())
    asked = {"messages": [USER, BEGUN], "continue_final_message": True}
    async with gateway_over(fake) as gateway:
        told = (await gateway.post("/v1/chat/completions", **asked)).json()["choices"][0]["message"]
    assert told["content"] == "\nit is far\n\n\nin Bonn"
    assert "reasoning_content" not in told


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"add_generation_prompt": True}, "continue_final_message"),
        ({"messages": [BEGUN, USER]}, "continue_final_message"),
        ({"messages": [USER, BEGUN | {"prefix": True}, USER]}, "continue_final_message"),
        ({"messages": [USER, {"role": "assistant", "reasoning": "Hm"}]}, "continue_final_message"),
        ({"messages": [USER, CALLING]}, "continue_final_message"),
        ({"response_format": {"type": "json_object"}}, "messages"),
    ],
)
async def test_what_cannot_be_continued_is_refused_by_name(more, param):
    asked = {"messages": [USER, BEGUN], "continue_final_message": True} | more
    async with gateway_over() as gateway:
        refused = await gateway.post("/v1/chat/completions", **asked)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        assert not gateway.requests


async def test_a_template_that_leaves_out_the_message_is_not_asked_to_continue_it():
    source = TEMPLATE.source.replace("it.content", "it.content if it.role == 'user'")
    fake = FakeOrchestrator(chat_template=ended_template(source))
    asked = {"messages": [USER, BEGUN], "continue_final_message": True}
    async with gateway_over(fake) as gateway:
        refused = (await gateway.post("/v1/chat/completions", **asked)).json()["error"]
    assert refused["param"] == "messages[1]"
    assert "leaves out what is continued" in refused["message"]
