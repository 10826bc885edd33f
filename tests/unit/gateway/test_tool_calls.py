"""Calls and reasoning over HTTP: the answers and streams of chat, and what is refused."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path

import pytest

from paceline.errors import InvalidFieldError
from paceline_gateway.http.connection import IGNORED_HEADER
from support.fake_orchestrator import FakeOrchestrator, Leg
from support.gateway import TEMPLATE, gateway_over
from support.spoken import CALL, HELLO, THOUGHT, model, template_of

PAGE = Path(__file__).parents[3] / "docs/http.md"
USER = [{"role": "user", "content": "What is the weather in Bonn?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]


async def ask(gateway, **body):
    answer = await gateway.post("/v1/chat/completions", **{"messages": USER, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def refusal_of(gateway, **body):
    answer = await gateway.post("/v1/chat/completions", **{"messages": USER, **body})
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


async def events_of(gateway, **body):
    """Return a stream's deltas and its reason."""
    stream = await gateway.client.chat.completions.create(
        model="fake", messages=USER, stream=True, **body
    )
    deltas, reason = [], None
    async for event in stream:
        for choice in event.choices:
            deltas.append(choice.delta.model_dump(exclude_unset=True))
            reason = choice.finish_reason or reason
    return deltas, reason


async def test_an_answer_has_its_content_and_its_calls():
    async with gateway_over(model(CALL)) as gateway:
        answer = await ask(gateway, tools=TOOLS)
        (request,) = gateway.requests
    (choice,) = answer["choices"]
    message = choice["message"]
    (call,) = message["tool_calls"]
    assert (message["content"], choice["finish_reason"]) == ("I look.", "tool_calls")
    assert call["id"].startswith("call_")
    assert (call["type"], call["function"]["name"]) == ("function", "weather")
    assert json.loads(call["function"]["arguments"]) == {"city": "Bonn"}
    assert "<tools>" in request.text
    assert not request.sampling.HasField("grammar")


async def test_a_stream_tells_the_name_first_and_then_the_arguments_as_they_come():
    async with gateway_over(model(CALL)) as gateway:
        deltas, reason = await events_of(gateway, tools=TOOLS)
    assert reason == "tool_calls"
    assert "".join(it.get("content") or "" for it in deltas) == "I look."
    calls = [call for it in deltas for call in it.get("tool_calls") or ()]
    assert all(it["index"] == 0 for it in calls)
    assert [it["id"] for it in calls if "id" in it] == [calls[0]["id"]]
    assert calls[0]["function"]["name"] == "weather"
    pieces = [it["function"]["arguments"] for it in calls]
    assert json.loads("".join(pieces)) == {"city": "Bonn"}
    assert len(list(filter(None, pieces))) == 3


async def test_two_steps_call_a_tool_and_answer_with_its_result():
    async with gateway_over(model(CALL, HELLO)) as gateway:
        called = (await ask(gateway, tools=TOOLS))["choices"][0]["message"]
        result = {
            "role": "tool",
            "tool_call_id": called["tool_calls"][0]["id"],
            "content": "sunny",
        }
        answer = await ask(gateway, tools=TOOLS, messages=[*USER, called, result])
        prompt = gateway.requests[1].text
    assert answer["choices"][0]["message"]["content"] == "Hello"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>' in prompt
    assert "<tool_response>\nsunny\n</tool_response>" in prompt


async def test_the_pages_example_calls_a_tool_and_prints_the_answer():
    _, example, *_ = re.findall(
        r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    async with gateway_over(model(CALL, HELLO)) as gateway:
        program = example.replace("http://127.0.0.1:8000", gateway.url)
        assert program != example
        ran = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(120):
            printed, _ = await ran.communicate()
        assert (ran.returncode, printed) == (0, b"Hello\n")
        assert '{"city": "Bonn", "sky": "clear"}' in gateway.requests[1].text


async def test_a_call_that_max_tokens_cuts_is_told_as_far_as_it_came():
    async with gateway_over(model(CALL)) as gateway:
        (choice,) = (await ask(gateway, tools=TOOLS, max_tokens=6))["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == ("weather", '{"city": "Bo')
    assert choice["finish_reason"] == "length"


async def test_a_call_that_is_cut_is_no_reason_to_run_it():
    cut = [*CALL[:6], CALL[-1]]
    fake = model(cut, cut, cut, [*CALL[2:4], CALL[-1]])
    fake.script[0].stop_string = "nn"
    async with gateway_over(fake) as gateway:
        (stopped,) = (await ask(gateway, tools=TOOLS, stop="nn"))["choices"]
        (ended,) = (await ask(gateway, tools=TOOLS))["choices"]
        _, streamed = await events_of(gateway, tools=TOOLS)
        (begun,) = (await ask(gateway, tools=TOOLS, tool_choice="required"))["choices"]
    assert [it["finish_reason"] for it in (stopped, ended, begun)] == ["stop"] * 3
    assert streamed == "stop"
    (call,) = ended["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"city": "Bo'
    assert not begun["message"]["content"]  # no mark of a call that was demanded


async def test_each_choice_is_read_for_itself():
    async with gateway_over(model(CALL, HELLO)) as gateway:
        answer = await ask(gateway, tools=TOOLS, n=2)
    reasons = {it["finish_reason"] for it in answer["choices"]}
    assert reasons == {"tool_calls", "stop"}


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_apart_under_both_names_and_is_counted(stream):
    fake = model([*THOUGHT, *CALL])
    async with gateway_over(fake) as gateway:
        if stream:
            deltas, reason = await events_of(gateway, tools=TOOLS)
            thought = "".join(it.get("reasoning_content") or "" for it in deltas)
            assert thought == "".join(it.get("reasoning") or "" for it in deltas)
            assert (thought, reason) == ("it is far", "tool_calls")
            return
        answer = await ask(gateway, tools=TOOLS)
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"] == message["reasoning"] == "it is far"
    assert message["content"] == "I look."
    usage = answer["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 5}
    assert usage["completion_tokens"] == len(THOUGHT) + len(CALL)


async def test_reasoning_is_counted_beside_what_was_drafted_from_a_prediction():
    leg = Leg(said=(*THOUGHT, *HELLO), predicted=(9, 4))
    async with gateway_over(FakeOrchestrator(script=[leg], chat_template=template_of())) as gateway:
        answer = await ask(gateway, prediction={"type": "content", "content": "Hello"})
    assert answer["usage"]["completion_tokens_details"] == {
        "reasoning_tokens": 5,
        "accepted_prediction_tokens": 4,
        "rejected_prediction_tokens": 5,
    }


async def test_an_answer_that_is_cut_while_it_thinks_has_no_content():
    async with gateway_over(model(THOUGHT)) as gateway:
        (choice,) = (await ask(gateway, max_tokens=3))["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "length")
    assert choice["message"]["reasoning_content"] == "it is"


async def test_without_tools_marks_stay_out_of_the_text():
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        async with gateway_over(model(CALL)) as gateway:
            (choice,) = (await ask(gateway, **more))["choices"]
        assert "tool_calls" not in choice["message"]
        assert choice["message"]["content"].startswith('I look.\n\n{"name"')


@pytest.mark.parametrize("choice", ["required", TOOLS[0]])
async def test_a_demanded_call_is_a_grammar_with_the_marks_as_tokens(choice):
    async with gateway_over(model(CALL)) as gateway:
        await ask(gateway, tools=TOOLS, tool_choice=choice)
        (request,) = gateway.requests
    lark = request.sampling.grammar.lark
    assert "<[900]>" in lark
    assert "<[901]>" in lark
    assert '"required":["city"]' in lark
    assert "thought: THOUGHT <[903]>" in lark


async def test_what_servers_refuse_of_a_grammar_is_a_fault_of_the_tools():
    words = "at 1(2): no such thing 1 | start: calls 2 | calls: call"
    error = InvalidFieldError.of("sampling.grammar", words)
    fake = FakeOrchestrator(
        script=[Leg(error=error, refuses=True)] * 4, chat_template=template_of()
    )
    async with gateway_over(fake) as gateway:
        told = await refusal_of(gateway, tools=TOOLS, tool_choice="required")
        assert told["param"] == "tools"
        assert told["message"] == "tools: cannot be enforced: no such thing"
        schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
        told = await refusal_of(gateway, response_format=schema)
        assert told["param"] == "response_format"
        # The gateway made a grammar of the schema, as the model may think first.
        assert told["message"] == "response_format: cannot be enforced: no such thing"
        told = await refusal_of(gateway, structured_outputs={"json": SCHEMA})
        assert told["message"] == "structured_outputs: cannot be enforced: no such thing"


async def test_a_refusal_names_the_parameter_that_the_request_has():
    error = InvalidFieldError.of("max_tokens", "is too many")
    grammar = InvalidFieldError.of("sampling.grammar", "is none")
    scored = InvalidFieldError.of("prompt_logprobs", "needs a shorter prompt")
    refusals = (error, error, grammar, scored, scored)
    legs = [Leg(error=it, refuses=True) for it in refusals]
    fake = FakeOrchestrator(script=legs, chat_template=template_of())
    async with gateway_over(fake) as gateway:
        assert (await refusal_of(gateway, max_tokens=9))["param"] == "max_tokens"
        told = await refusal_of(gateway, max_completion_tokens=9)
        assert told["param"] == "max_completion_tokens"
        assert told["message"] == "max_completion_tokens: is too many"
        body = {"prompt": "a", "structured_outputs": {"regex": "("}}
        told = (await gateway.post("/v1/completions", **body)).json()["error"]
        assert (told["param"], told["message"]) == (
            "structured_outputs",
            "structured_outputs: is none",
        )
        scoring = {"echo": {"echo": True, "logprobs": 1}, "prompt_logprobs": {"prompt_logprobs": 1}}
        for name, asked in scoring.items():
            told = (await gateway.post("/v1/completions", prompt="a", **asked)).json()["error"]
            assert (told["param"], told["message"]) == (name, f"{name}: needs a shorter prompt")


async def test_log_probabilities_come_with_calls():
    async with gateway_over(model(CALL)) as gateway:
        whole = await ask(gateway, tools=TOOLS, logprobs=True)
    assert len(whole["choices"][0]["logprobs"]["content"]) == len(CALL)
    async with gateway_over(model(CALL)) as gateway:
        stream = await gateway.client.chat.completions.create(
            model="fake", messages=USER, tools=TOOLS, logprobs=True, stream=True
        )
        told = [it async for it in stream if it.choices[0].logprobs]
    assert len(told) == len(CALL)


@pytest.mark.parametrize(
    ("settings", "template", "why"),
    [
        ({"tool_parser": "none"}, template_of(), "--tool-parser of the gateway"),
        ({}, template_of("parts"), "--tool-parser of the gateway"),
        # of a server that does not tell ids yet
        ({}, template_of(ids={}), "--tool-parser of the gateway"),
        # A parser would not help: the first refusal says so.
        ({}, TEMPLATE, "leaves out tools"),
        ({"tool_parser": "hermes"}, TEMPLATE, "leaves out tools"),
    ],
)
async def test_tools_whose_calls_could_not_be_read_or_written_are_refused(settings, template, why):
    async with gateway_over(model(CALL, template=template), **settings) as gateway:
        told = await refusal_of(gateway, tools=TOOLS)
        assert (told["param"], told["code"]) == ("tools", "unsupported_parameter")
        assert why in told["message"]
        assert gateway.requests == []


async def test_settings_choose_how_calls_and_reasoning_are_read():
    said = ((5, '[TOOL_CALLS]weather{"city": "Bonn"}'),)
    fake = model(said, template=template_of("parts"))
    async with gateway_over(fake, tool_parser="mistral") as gateway:
        (choice,) = (await ask(gateway, tools=TOOLS))["choices"]
    assert len(choice["message"]["tool_calls"][0]["id"]) == 9
    spoken = ((5, "<think>a</think>b"),)
    plain = template_of(special=(), ids={})
    async with gateway_over(model(spoken, template=plain), reasoning_parser="none") as gateway:
        (choice,) = (await ask(gateway))["choices"]
    assert choice["message"]["content"] == "<think>a</think>b"
    assert "reasoning" not in choice["message"]


async def test_a_budget_of_reasoning_is_in_the_grammar_also_where_nothing_else_is():
    async with gateway_over(model(HELLO, HELLO, HELLO, HELLO)) as gateway:
        for more in ({}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "required"}):
            answer = await gateway.post(
                "/v1/chat/completions", messages=USER, thinking_token_budget=77, **more
            )
            assert answer.status_code == 200, answer.text
            assert IGNORED_HEADER not in answer.headers
        response = await gateway.post("/v1/responses", input="hi", thinking_token_budget=77)
        assert IGNORED_HEADER not in response.headers
        assert ["{0,77}" in it.sampling.grammar.lark for it in gateway.requests] == [True] * 4


async def test_a_budget_of_reasoning_is_named_for_a_model_that_does_not_mark_it():
    fake = FakeOrchestrator(chat_template=TEMPLATE)
    for path, said in (("chat/completions", {"messages": USER}), ("responses", {"input": "hi"})):
        async with gateway_over(fake) as gateway:
            answer = await gateway.post(f"/v1/{path}", thinking_token_budget=77, **said)
            assert answer.headers[IGNORED_HEADER] == "thinking_token_budget"
            assert not gateway.requests[-1].sampling.HasField("grammar")
            wrong = await gateway.post(f"/v1/{path}", thinking_token_budget=-1, **said)
            assert wrong.status_code == 400
            assert "thinking_token_budget" in wrong.text


async def test_a_budget_that_servers_cannot_enforce_is_refused_by_its_name():
    error = InvalidFieldError.of("sampling.grammar", "no")
    fake = FakeOrchestrator(script=[Leg(error=error, refuses=True)], chat_template=template_of())
    async with gateway_over(fake) as gateway:
        told = await refusal_of(gateway, thinking_token_budget=77)
    assert told["param"] == "thinking_token_budget"


async def test_names_that_the_template_does_not_know_are_named_or_refused():
    asked = {
        "messages": USER,
        "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": True, "unheard": 1},
    }
    async with gateway_over(model(HELLO, HELLO)) as gateway:
        answer = await gateway.post("/v1/chat/completions", **asked)
        assert answer.headers[IGNORED_HEADER] == "chat_template_kwargs.unheard, reasoning_effort"
        none = await gateway.post("/v1/chat/completions", messages=USER, reasoning_effort="none")
        assert IGNORED_HEADER not in none.headers
        assert gateway.requests[1].text.endswith("<think>\n\n</think>\n\n")
    async with gateway_over(model(), strict=True) as gateway:
        told = await refusal_of(gateway, **asked)
        assert told["param"] == "chat_template_kwargs.unheard"


async def test_tools_of_unknown_kinds_are_named_in_the_header():
    tools = [{"type": "web_search_preview"}, *TOOLS]
    async with gateway_over(model(CALL)) as gateway:
        answer = await gateway.post("/v1/chat/completions", messages=USER, tools=tools)
        assert answer.headers[IGNORED_HEADER] == "tools[0]"
        assert answer.json()["choices"][0]["finish_reason"] == "tool_calls"
