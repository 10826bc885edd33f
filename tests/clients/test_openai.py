"""OpenAI's own packages, from PyPI and from npm, find at the gateway what they expect."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from functools import reduce
from importlib.metadata import version

import openai
import pytest

from paceline import errors
from paceline.v1.model_service_pb2 import ChatTemplate
from support.conformance.drivers import ROOT
from support.conformance.toolchains import missing
from support.fake_orchestrator import PROMPT_LENGTH, FakeOrchestrator, Leg
from support.gateway import TEMPLATE, gateway_over
from support.keys import SECRET, entry
from support.processes import GatewayProcess, running
from support.spoken import CALL, THOUGHT, model
from support.spoken import HELLO as SAYS_HELLO

DRIVER = ROOT / "tests/clients/drivers/openai_driver.mjs"
PACKAGE = ROOT / "clients/typescript/node_modules/openai/package.json"
PAGE = ROOT / "docs/http.md"
TEXT = "3 4 5 "
HELLO = [{"role": "user", "content": "hello"}]
BODIES = {
    "completions": {"model": "fake", "prompt": "p", "max_tokens": 3},
    "chat.completions": {"model": "fake", "messages": HELLO, "max_completion_tokens": 3},
    "responses": {"model": "fake", "input": "hello", "max_output_tokens": 3},
}


async def from_pypi(asked):
    """Do what the other driver does, with the package for Python."""
    client = openai.AsyncOpenAI(
        base_url=f"{asked['url']}/v1",
        api_key=asked["key"],
        max_retries=asked["retries"],
        timeout=asked["seconds"],
    )
    async with client:
        try:
            return await answered(client, asked)
        except openai.APIError as error:
            return {"error": facts(error)}


async def answered(client, asked):
    if asked["what"] == "models":
        return {"whole": [plain(it) for it in (await client.models.list()).data]}
    body = dict(asked["body"])
    extra = {"paceline": body.pop("paceline")} if "paceline" in body else None
    resource = reduce(getattr, asked["what"].split("."), client)
    response = await resource.create(**body, extra_body=extra)
    if not body.get("stream"):
        return {"whole": plain(response), "request_id": response._request_id}
    events = []
    try:
        async for event in response:
            events.append(plain(event))
            if len(events) == asked["leave_after"]:
                await response.close()
                break
    except openai.APIError as error:
        return {"events": events, "error": facts(error)}
    return {"events": events}


def plain(answer):
    return answer.model_dump(mode="json", exclude_unset=True)


def facts(error):
    status = getattr(error, "status_code", None)
    return {
        "class": type(error).__name__,
        "status": status,
        "code": error.code,
        "param": error.param,
        "message": error.message,
    }


async def from_npm(asked):
    """Ask the driver for Node."""
    process = await asyncio.create_subprocess_exec(
        "node",
        DRIVER,
        json.dumps(asked),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return json.loads(out)


@pytest.fixture(params=[from_pypi, from_npm], ids=["pypi", "npm"])
def ask(request):
    """Ask a gateway with one of the packages."""
    if request.param is from_npm and not PACKAGE.exists():
        missing("npm's openai is not there: make client-typescript")

    async def asking(gateway, what, *, key="-", retries=0, leave_after=None, seconds=60, **more):
        asked = {
            "url": gateway.url,
            "key": key,
            "retries": retries,
            "what": what,
            "body": {**BODIES.get(what, {}), **more},
            "leave_after": leave_after,
            "seconds": seconds,
        }
        return await request.param(asked)

    return asking


@pytest.mark.parametrize("what", ["completions", "chat.completions"])
async def test_a_whole_answer_has_its_text_its_end_and_its_usage(ask, what):
    async with gateway_over() as gateway:
        told = (await ask(gateway, what))["whole"]
    (choice,) = told["choices"]
    text = choice["text"] if what == "completions" else choice["message"]["content"]
    assert (text, choice["finish_reason"], choice["index"]) == (TEXT, "length", 0)
    assert told["usage"] == {
        "prompt_tokens": PROMPT_LENGTH,
        "completion_tokens": 3,
        "total_tokens": PROMPT_LENGTH + 3,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert told["system_fingerprint"] == "model-a"


@pytest.mark.parametrize("what", ["completions", "chat.completions"])
@pytest.mark.parametrize("counted", [False, True])
async def test_streamed_deltas_add_up_and_usage_comes_last_if_it_is_wanted(ask, what, counted):
    more = {"stream_options": {"include_usage": True}} if counted else {}
    async with gateway_over() as gateway:
        events = (await ask(gateway, what, stream=True, **more))["events"]
    last = events.pop() if counted else None
    choices = [event["choices"][0] for event in events]
    pieces = [it.get("text", it.get("delta", {}).get("content", "")) for it in choices]
    assert "".join(pieces) == TEXT
    assert len(list(filter(None, pieces))) == 3
    assert [it["finish_reason"] for it in choices] == [None] * (len(choices) - 1) + ["length"]
    assert len({event["id"] for event in events}) == 1
    if what == "chat.completions":
        assert choices[0]["delta"]["role"] == "assistant"
    if last is not None:
        assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 3)
    assert not any(event.get("usage") for event in events)


async def test_a_response_comes_whole_or_in_its_named_events(ask):
    async with gateway_over() as gateway:
        whole = (await ask(gateway, "responses"))["whole"]
        events = (await ask(gateway, "responses", stream=True))["events"]
    assert whole["output"][0]["content"][0]["text"] == TEXT
    deltas = [it["delta"] for it in events if it["type"] == "response.output_text.delta"]
    assert "".join(deltas) == TEXT
    assert [it["sequence_number"] for it in events] == [*range(len(events))]
    assert (events[0]["type"], events[-1]["type"]) == ("response.created", "response.incomplete")
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == TEXT


SAID = '<think>Hm.</think>I look.<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}'
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_and_reasoning_arrive_whole_or_as_deltas_that_add_up(ask, stream):
    said = tuple((5 + at, SAID[at : at + 3]) for at in range(0, len(SAID), 3))
    source = f"{TEMPLATE.source}{{{{ tools | tojson if tools }}}}{{# <tool_call> </think> #}}"
    template = ChatTemplate(fingerprint="t-2", source=source, named_tokens=TEMPLATE.named_tokens)
    async with gateway_over(FakeOrchestrator([Leg(said=said)], chat_template=template)) as gateway:
        more = {"tools": TOOLS, "max_completion_tokens": 99, "stream": stream}
        told = await ask(gateway, "chat.completions", **more)
    if stream:
        choices = [event["choices"][0] for event in told["events"]]
        messages = [it["delta"] for it in choices]
        calls = [call for it in messages for call in it.get("tool_calls", [])]
    else:
        choices = told["whole"]["choices"]
        messages = [it["message"] for it in choices]
        calls = messages[0]["tool_calls"]
    for name, expected in (("content", "I look."), ("reasoning_content", "Hm.")):
        assert "".join(it.get(name) or "" for it in messages) == expected
    assert choices[-1]["finish_reason"] == "tool_calls"
    assert [it["function"]["name"] for it in calls if "id" in it] == ["weather"]
    arguments = "".join(it["function"]["arguments"] for it in calls)
    assert json.loads(arguments) == {"city": "Bonn"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_has_items_for_reasoning_and_calls(ask, stream):
    asked = {"tools": [{"type": "function", **TOOLS[0]["function"], "strict": False}]}
    async with gateway_over(model([*THOUGHT, *CALL])) as gateway:
        told = await ask(gateway, "responses", max_output_tokens=99, stream=stream, **asked)
    whole = told["events"][-1]["response"] if stream else told["whole"]
    thought, message, call = whole["output"]
    assert [it["content"][0]["text"] for it in (thought, message)] == ["it is far", "I look."]
    assert (call["name"], json.loads(call["arguments"])) == ("weather", {"city": "Bonn"})
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] == 5
    if stream:
        done = [it for it in told["events"] if it["type"] == "response.output_item.done"]
        assert [it["item"] for it in done] == whole["output"]
        deltas = [
            it["delta"]
            for it in told["events"]
            if it["type"] == "response.function_call_arguments.delta"
        ]
        assert "".join(deltas) == call["arguments"]


async def test_several_choices_log_probabilities_and_the_extension_arrive(ask):
    more = {"n": 2, "logprobs": 2, "paceline": {"strategy": "speculative"}}
    async with gateway_over() as gateway:
        told = (await ask(gateway, "completions", **more))["whole"]
    assert [it["index"] for it in told["choices"]] == [0, 1]
    assert told["choices"][1]["logprobs"]["token_logprobs"] == [-3, -4, -5]
    assert [it["seed"] for it in told["paceline"]["choices"]]


async def test_models_are_listed(ask):
    async with gateway_over() as gateway:
        (model,) = (await ask(gateway, "models"))["whole"]
    assert (model["id"], model["object"]) == ("fake", "model")


@pytest.mark.parametrize(
    ("more", "name", "status", "code"),
    [
        ({"best_of": 2}, "BadRequestError", 400, "unsupported_parameter"),
        ({"key": "wrong"}, "AuthenticationError", 401, "invalid_api_key"),
        ({"model": "other"}, "NotFoundError", 404, "model_not_found"),
        ({"key": "spent"}, "RateLimitError", 429, "rate_limit_exceeded"),
    ],
)
async def test_what_the_client_did_wrong_is_the_class_for_it(
    ask, tmp_path, more, name, status, code
):
    (tmp_path / "keys").write_text(entry() + entry("bob", "spent", tokens_per_minute=1))
    async with gateway_over(api_keys=tmp_path / "keys") as gateway:
        await gateway.client.with_options(api_key="spent").completions.create(
            **BODIES["completions"]
        )
        told = (await ask(gateway, "completions", **{"key": SECRET, **more}))["error"]
    assert (told["class"], told["status"], told["code"]) == (name, status, code)
    assert told["param"] == {400: "best_of", 404: "model"}.get(status)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.InternalError("x"), 500),
        (errors.UnauthenticatedError("x"), 502),
        (errors.OverloadedError("x"), 429),
        (errors.NoTargetError("x"), 503),
        (errors.DeadlineError("x"), 504),
    ],
)
async def test_what_servers_did_wrong_is_the_class_for_it(ask, error, status, streamed):
    # A gateway asks once more where nobody serves.
    fake = FakeOrchestrator(script=[Leg(error=error, refuses=True)] * 2)
    async with gateway_over(fake) as gateway:
        told = (await ask(gateway, "completions", stream=streamed))["error"]
    name = "RateLimitError" if status == 429 else "InternalServerError"
    assert (told["class"], told["status"]) == (name, status)


async def test_an_error_in_mid_stream_is_raised_after_the_text_before_it(ask):
    fake = FakeOrchestrator(script=[Leg(error=errors.InternalError("x"), chunks=2)])
    async with gateway_over(fake) as gateway:
        told = await ask(gateway, "completions", stream=True)
    assert [it["choices"][0]["text"] for it in told["events"]] == ["3 ", "4 "]
    assert "gateway got no answer" in told["error"]["message"]


async def test_an_error_in_the_middle_of_a_response_is_raised_too(ask):
    fake = FakeOrchestrator(
        script=[Leg(error=errors.InternalError("x"), chunks=2)], chat_template=TEMPLATE
    )
    async with gateway_over(fake) as gateway:
        told = await ask(gateway, "responses", stream=True)
    deltas = [it["delta"] for it in told["events"] if it["type"] == "response.output_text.delta"]
    assert deltas == ["3 ", "4 "]
    assert "gateway got no answer" in told["error"]["message"]
    assert told["error"]["code"] == "internal"


async def test_a_refused_request_is_sent_again_by_itself(ask):
    full = Leg(error=errors.OverloadedError("full"), refuses=True)
    async with gateway_over(FakeOrchestrator(script=[full])) as gateway:
        told = (await ask(gateway, "completions", retries=1))["whole"]
        assert len(gateway.requests) == 2
    assert told["choices"][0]["text"] == TEXT


async def test_leaving_a_stream_cancels_the_work(ask):
    fake = FakeOrchestrator(script=[Leg(hangs=True, chunks=2)])
    async with gateway_over(fake) as gateway:
        told = await ask(gateway, "completions", stream=True, leave_after=1)
        assert told["events"][0]["choices"][0]["text"] == "3 "
        async with asyncio.timeout(90):
            await fake.cancelled.wait()


async def test_a_client_whose_time_is_over_leaves(ask):
    fake = FakeOrchestrator(script=[Leg(hangs=True)])
    async with gateway_over(fake) as gateway:
        told = (await ask(gateway, "completions", seconds=0.5))["error"]
        assert told["class"] in {"APITimeoutError", "APIConnectionTimeoutError"}
        async with asyncio.timeout(90):
            await fake.cancelled.wait()


async def test_the_requests_id_is_told(ask):
    async with gateway_over() as gateway:
        told = await ask(gateway, "completions")
        (request,) = gateway.requests
    assert told["request_id"] == request.request_id


def test_the_pages_node_example_streams_text(words_system):
    if not PACKAGE.exists():
        missing("npm's openai is not there: make client-typescript")
    (example,) = re.findall(r"^```js\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    addresses = ",".join(it.address for it in words_system.orchestrators)
    with words_system.client() as client:
        model = client.info().model_name
        expected = client.generate("def fibonacci(n):", max_tokens=64).text()
    gateway = GatewayProcess(f"--orchestrators={addresses}")
    with running(gateway):
        program = example.replace("http://127.0.0.1:8000", gateway.url)
        assert program != example
        # Inside the package, whose node_modules it finds.
        printed = ROOT / "clients/typescript/build/openai.mjs"
        printed.write_text(program.replace("python-target", model))
        ran = subprocess.run(("node", printed), capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == expected


async def test_the_pages_example_of_responses_calls_a_tool():
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (example,) = [it for it in blocks if "client.responses.create" in it]
    async with gateway_over(model(CALL, SAYS_HELLO)) as gateway:
        program = example.replace("http://127.0.0.1:8000", gateway.url)
        ran = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(120):
            printed, _ = await ran.communicate()
        assert (ran.returncode, printed) == (0, b"Hello\n")
        assert '"sky": "clear"' in gateway.requests[1].text


def test_the_page_says_which_packages_these_are():
    if not PACKAGE.exists():
        missing("npm's openai is not there: make client-typescript")
    page, npm = PAGE.read_text(), json.loads(PACKAGE.read_text())["version"]
    assert f"`openai` {version('openai')} from PyPI and {npm} from npm" in page
