"""Log probabilities, in the forms that OpenAI's clients read: whole and streamed."""

from __future__ import annotations

import asyncio
import json
import math
import re

import pytest

from paceline import Chunk, TokenLogprob, TokenOrigin
from paceline_gateway.http.connection import Connection
from paceline_gateway.openai.forms import ChatForm, CompletionForm
from support.fake_orchestrator import FakeOrchestrator, Leg
from support.gateway import TEMPLATE, gateway_over

# Token p has -p, and the next ones by number are ever less likely (support.fake_orchestrator).
TOLD = [
    ("token_id:3", -3.0, [("token_id:4", -4.0), ("token_id:5", -5.0)]),
    ("token_id:4", -4.0, [("token_id:5", -5.0), ("token_id:6", -6.0)]),
]
CHAT = [{"role": "user", "content": "say"}]


def told_by(content):
    return [
        (it.token, it.logprob, [(other.token, other.logprob) for other in it.top_logprobs])
        for it in content
    ]


async def test_chat_tells_what_else_was_likely():
    async with gateway_over() as gateway:
        asked = {"model": "fake", "messages": CHAT, "max_tokens": 2, "logprobs": True}
        create = gateway.client.chat.completions.create
        whole = await create(**asked, top_logprobs=2)
        assert told_by(whole.choices[0].logprobs.content) == TOLD
        streamed = []
        async for chunk in await create(**asked, top_logprobs=2, stream=True):
            for choice in chunk.choices:
                streamed += told_by(choice.logprobs.content) if choice.logprobs else []
        assert streamed == TOLD
        alone = await create(**asked)
        assert told_by(alone.choices[0].logprobs.content) == [(*it[:2], []) for it in TOLD]
        assert [request.top_logprobs for request in gateway.requests] == [2, 2, 0]


async def test_completions_tell_what_else_was_likely_and_the_chosen_token_among_it():
    async with gateway_over() as gateway:
        create = gateway.client.completions.create
        asked = {"model": "fake", "prompt": "say", "max_tokens": 2}
        told = (await create(**asked, logprobs=2)).choices[0].logprobs
        assert told.tokens == [token for token, _, _ in TOLD]
        assert told.token_logprobs == [logprob for _, logprob, _ in TOLD]
        assert told.text_offset == [0, len("3 ")]
        assert told.top_logprobs == [{name: own, **dict(more)} for name, own, more in TOLD]
        streamed = []
        async for chunk in await create(**asked, logprobs=2, stream=True):
            for choice in chunk.choices:
                streamed += choice.logprobs.top_logprobs if choice.logprobs else []
        assert streamed == told.top_logprobs
        alone = (await create(**asked, logprobs=0)).choices[0].logprobs
        assert (alone.token_logprobs, alone.top_logprobs) == (told.token_logprobs, None)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("form", [ChatForm(), CompletionForm()], ids=["chat", "completion"])
def test_a_log_probability_that_json_cannot_say_is_the_one_that_openai_says_then(form, value):
    chunk = Chunk(
        text="a",
        token_ids=(3,),
        logprobs=(value,),
        origins=(TokenOrigin.TARGET,),
        top_logprobs=((TokenLogprob(4, value),),),
        position=0,
    )
    written = json.dumps(form.part(chunk, offset=0, logprobs=True))
    assert written.count("-9999.0") >= 2
    assert not {"NaN", "Infinity"}.intersection(re.findall(r"\w+", written))


async def test_no_event_has_a_number_that_json_does_not_know():
    sent = []

    async def send(message):
        sent.append(message)

    connection = Connection(
        {"type": "http"}, None, send, request_id="r", stall_seconds=1, has_cut=asyncio.Event()
    )
    await connection.event({"a": [math.nan, 1.5, {"b": -math.inf}]})
    assert sent[0]["body"] == b'data: {"a": [null, 1.5, {"b": null}]}\n\n'


async def test_places_in_a_text_are_counted_in_characters_whatever_bytes_they_take():
    legs = [Leg(word="\u00fc\U0001f44b{} ", chunk_tokens=2) for _ in range(2)]
    async with gateway_over(FakeOrchestrator(script=legs)) as gateway:
        create = gateway.client.completions.create
        asked = {"model": "fake", "prompt": "say", "max_tokens": 5, "logprobs": 0}
        whole = (await create(**asked)).choices[0]
        assert whole.text == "".join(f"\u00fc\U0001f44b{it} " for it in range(3, 8))
        assert whole.logprobs.text_offset == [0, 4, 8, 12, 16]
        texts, offsets = "", []
        async for chunk in await create(**asked, stream=True):
            for choice in chunk.choices:
                texts += choice.text
                offsets += choice.logprobs.text_offset if choice.logprobs else []
        assert (texts, offsets) == (whole.text, whole.logprobs.text_offset)


async def test_every_door_gives_the_text_that_the_orchestrator_gave():
    text = "".join(f"\u00fc\U0001f44b{it} " for it in range(3, 6))
    asked = {"model": "fake", "stream": True}
    script = [Leg(word="\u00fc\U0001f44b{} ") for _ in range(4)]
    fake = FakeOrchestrator(script=script, chat_template=TEMPLATE)
    async with gateway_over(fake) as gateway:
        chat = await gateway.client.chat.completions.create(
            **asked, messages=CHAT, max_completion_tokens=3
        )
        assert "".join([it.choices[0].delta.content or "" async for it in chat]) == text
        stream = await gateway.client.responses.create(**asked, input="say", max_output_tokens=3)
        events = [event async for event in stream]
        assert "".join(it.delta for it in events if it.type.endswith("text.delta")) == text
        assert events[-1].response.output_text == text
        live = await gateway.post("/paceline/generate", prompt="say", max_tokens=3)
        told = [json.loads(it[6:]) for it in live.text.split("\n") if it.startswith("data: ")]
        assert "".join(it["text"] for it in told if "text" in it) == text
        whole = await gateway.post("/v1/completions", prompt="say", max_tokens=3)
        assert whole.json()["choices"][0]["text"] == text
