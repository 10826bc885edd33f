"""Anthropic's own package, from PyPI, finds at the gateway what it expects."""

from __future__ import annotations

import asyncio
import re
import sys
from contextlib import asynccontextmanager
from importlib.metadata import version

import anthropic
import pytest

from paceline import errors
from support.conformance.drivers import ROOT
from support.fake_orchestrator import FakeOrchestrator, Leg
from support.gateway import TEMPLATE, gateway_over
from support.keys import SECRET, entry
from support.spoken import CALL, HELLO, THOUGHT, model

PAGE = ROOT / "docs/http.md"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"name": "weather", "description": "Tells it.", "input_schema": SCHEMA}]
USER = {"role": "user", "content": "What is the weather in Bonn?"}
ASKED = {"model": "fake", "max_tokens": 99, "messages": [USER]}


@asynccontextmanager
async def client_of(gateway, **more):
    """Make a client, which tries nothing twice."""
    settings = {"base_url": gateway.url, "api_key": "none", "max_retries": 0, **more}
    async with anthropic.AsyncAnthropic(**settings) as client:
        yield client


async def test_a_message_is_whole_or_streamed_and_says_the_same():
    said = [*THOUGHT, *HELLO]
    async with gateway_over(model(said, said)) as gateway, client_of(gateway) as client:
        whole = await client.messages.create(**ASKED, system="Be brief.")
        async with client.messages.stream(**ASKED, system="Be brief.") as stream:
            texts = [text async for text in stream.text_stream]
            streamed = await stream.get_final_message()
        (request, _) = gateway.requests
    thought, text = whole.content
    assert (thought.type, thought.thinking, text.text) == ("thinking", "it is far", "Hello")
    assert "".join(texts) == "Hello"
    for message in (whole, streamed):
        assert [it.to_dict() for it in message.content] == [it.to_dict() for it in whole.content]
        assert (message.stop_reason, message.model) == ("end_turn", "fake")
        usage = message.usage
        assert (usage.input_tokens, usage.cache_read_input_tokens) == (2, 1)
        assert usage.output_tokens == len(said)
    assert whole._request_id == request.request_id
    assert "Be brief." in request.text


async def test_a_tool_is_called_and_its_result_answered():
    async with gateway_over(model(CALL, HELLO)) as gateway, client_of(gateway) as client:
        async with client.messages.stream(**ASKED, tools=TOOLS) as stream:
            inputs = [event async for event in stream if event.type == "input_json"]
            called = await stream.get_final_message()
        call = called.content[-1]
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
        turns = [
            USER,
            {"role": "assistant", "content": called.content},
            {"role": "user", "content": [result]},
        ]
        answer = await client.messages.create(**{**ASKED, "messages": turns}, tools=TOOLS)
        prompt = gateway.requests[1].text
    assert (called.stop_reason, call.name, call.input) == ("tool_use", "weather", {"city": "Bonn"})
    assert len(inputs) == 3
    assert answer.content[0].text == "Hello"
    assert prompt.index('"city": "Bonn"') < prompt.index("sunny")


async def test_tokens_are_counted_and_models_listed():
    async with gateway_over(model()) as gateway, client_of(gateway) as client:
        counted = await client.messages.count_tokens(model="fake", messages=[USER], tools=TOOLS)
        (request,) = gateway.requests
        models = [it.id async for it in client.models.list()]
    assert counted.input_tokens == len(request.text)
    assert models == ["fake"]


@pytest.mark.parametrize(
    ("more", "key", "kind"),
    [
        ({"max_tokens": 0}, SECRET, anthropic.BadRequestError),
        ({}, "wrong", anthropic.AuthenticationError),
        ({"model": "other"}, SECRET, anthropic.NotFoundError),
        ({}, "spent", anthropic.RateLimitError),
    ],
)
async def test_what_the_client_did_wrong_is_the_class_for_it(tmp_path, more, key, kind):
    (tmp_path / "keys").write_text(entry() + entry("bob", "spent", tokens_per_minute=1))
    async with gateway_over(api_keys=tmp_path / "keys") as gateway:
        async with client_of(gateway, api_key=None, auth_token="spent") as client:
            await client.messages.create(**ASKED)
        async with client_of(gateway, api_key=key) as client:
            with pytest.raises(kind) as raised:
                await client.messages.create(**{**ASKED, **more})
    assert raised.value.body["error"]["message"] in str(raised.value)


@pytest.mark.parametrize(
    ("error", "status"),
    [(errors.InternalError("x"), 500), (errors.OverloadedError("x"), 529)],
)
async def test_what_servers_did_wrong_is_a_server_error(error, status):
    fake = FakeOrchestrator(script=[Leg(error=error, refuses=True)] * 2, chat_template=TEMPLATE)
    async with gateway_over(fake) as gateway, client_of(gateway) as client:
        with pytest.raises(anthropic.InternalServerError) as raised:
            await client.messages.create(**ASKED)
    assert raised.value.status_code == status


async def test_a_refused_request_is_sent_again_by_itself():
    full = Leg(error=errors.OverloadedError("full"), refuses=True)
    fake = FakeOrchestrator(script=[full], chat_template=TEMPLATE)
    async with gateway_over(fake) as gateway, client_of(gateway, max_retries=1) as client:
        answer = await client.messages.create(**{**ASKED, "max_tokens": 3})
        assert len(gateway.requests) == 2
    assert answer.content[0].text == "3 4 5 "


async def test_an_error_in_mid_stream_is_raised_after_the_text_before_it():
    leg = Leg(error=errors.InternalError("x"), chunks=2)
    fake = FakeOrchestrator(script=[leg], chat_template=TEMPLATE)
    events = []

    async def read(stream):
        async for event in stream:
            events.append(event)  # noqa: PERF401 - those before the error are kept

    async with gateway_over(fake) as gateway, client_of(gateway) as client:
        stream = await client.messages.create(**ASKED, stream=True)
        with pytest.raises(anthropic.APIStatusError, match="gateway got no answer"):
            await read(stream)
    deltas = [it.delta.text for it in events if it.type == "content_block_delta"]
    assert deltas == ["3 ", "4 "]


async def test_leaving_a_stream_cancels_the_work():
    fake = FakeOrchestrator(script=[Leg(hangs=True, chunks=1)], chat_template=TEMPLATE)
    async with gateway_over(fake) as gateway, client_of(gateway) as client:
        async with client.messages.stream(**ASKED) as stream:
            async for text in stream.text_stream:
                assert text == "3 "
                break
        async with asyncio.timeout(90):
            await fake.cancelled.wait()


async def test_the_pages_example_calls_a_tool_and_streams_the_answer():
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (example,) = [it for it in blocks if "import anthropic" in it]
    async with gateway_over(model(CALL, HELLO)) as gateway:
        program = example.replace("http://127.0.0.1:8000", gateway.url)
        assert program != example
        ran = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(120):
            printed, _ = await ran.communicate()
        assert (ran.returncode, printed) == (0, b"Hello\n")
        assert "The sky over Bonn is clear." in gateway.requests[1].text


def test_the_page_says_which_package_this_is():
    assert f"`anthropic` {version('anthropic')} from PyPI" in PAGE.read_text()
