"""Packages that are built on the interfaces find at the gateway what they expect."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path

import pytest

from support.agents import HOME, NODE, PYTHON, installed
from support.fake_orchestrator import Leg
from support.gateway import gateway_over
from support.spoken import CALL, model

DRIVERS = Path(__file__).parent / "drivers"
TEXT = ((5, "The sky"), (6, " is"), (7, " clear."), (904, ""))
OBJECT = ((5, '{"city": '), (6, '"Bo'), (7, 'nn"}'), (904, ""))

PACKAGES = {
    # instructor gives what it asks for the name of its type, and reads objects alone.
    "instructor": ("chat",),
    "langchain-openai": ("chat", "responses"),
    "litellm": ("chat", "messages"),
    "llm": ("chat",),
    "openai-agents": ("chat", "responses"),
    "pydantic-ai": ("chat", "responses"),
    "ai": ("chat",),
    "@anthropic-ai/sdk": ("messages",),
}
OF_NPM = {"ai", "@anthropic-ai/sdk"}
ERRORS = {
    "instructor": "InstructorError",
    "langchain-openai": "NotFoundError",
    "litellm": "NotFoundError",
    "llm": "NotFoundError",
    "openai-agents": "NotFoundError",
    "pydantic-ai": "ModelHTTPError",
    "ai": "APICallError",
    "@anthropic-ai/sdk": "NotFoundError",
}


def call_of(name):
    return ((900, ""), (7, f'{{"name": "{name}", "arguments": {{"city": "Bonn"}}}}'), (901, ""))


class Driver:
    """A process that does what it is asked with one package."""

    def __init__(self, package, folder):
        program = [NODE, DRIVERS / "packages.mjs"] if package in OF_NPM else None
        self._process = subprocess.Popen(
            [*(program or [PYTHON, DRIVERS / "packages.py"]), package],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=HOME,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(folder),
                "LLM_USER_PATH": str(folder),
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            },
            text=True,
        )

    async def ask(self, **asked):
        def line():
            print(json.dumps(asked), file=self._process.stdin, flush=True)
            return self._process.stdout.readline()

        return json.loads(await asyncio.wait_for(asyncio.to_thread(line), 60))

    def close(self):
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def drivers(tmp_path_factory):
    """The packages' drivers, each from its first use on."""
    found = {}

    def driver_of(package):
        installed(HOME / "node_modules" / package if package in OF_NPM else PYTHON)
        if package not in found:
            found[package] = Driver(package, tmp_path_factory.mktemp("home"))
        return found[package]

    yield driver_of
    for driver in found.values():
        driver.close()


@pytest.fixture(
    params=[(name, it) for name, interfaces in PACKAGES.items() for it in interfaces],
    ids=lambda it: " over ".join(it),
)
def package(request):
    return request.param


@pytest.fixture
def ask(package, drivers):
    name, interface = package

    async def asking(gateway, what, **more):
        asked = {"what": what, "interface": interface, "url": gateway.url, "model": "fake"}
        return await drivers(name).ask(**asked | more)

    return asking


async def test_a_call_is_run_and_its_result_is_answered(ask, package):
    is_loop = package[0] != "instructor"
    fake = model(CALL, TEXT) if is_loop else model(call_of("Place"))
    async with gateway_over(fake) as gateway:
        answer = await ask(gateway, "call")
    assert answer["called"] == ["Bonn"], answer
    if is_loop:
        assert answer["told"].endswith("The sky is clear.")
        assert "<tool_response>\nclear" in str(fake.requests[1]).replace("\\n", "\n")


async def test_a_structured_answer_is_a_grammar_here_and_an_object_there(ask, package):
    is_tool = package == ("litellm", "messages")  # which demands a call of a tool of its own
    fake = model(call_of("json_tool_call") if is_tool else OBJECT)
    async with gateway_over(fake) as gateway:
        answer = await ask(gateway, "structured")
    assert answer["told"] == {"city": "Bonn"}
    assert "city" in fake.requests[0].sampling.grammar.lark


async def test_a_stream_arrives_piece_by_piece(ask, package):
    is_text = package[0] != "instructor"
    async with gateway_over(model(TEXT if is_text else OBJECT)) as gateway:
        told = (await ask(gateway, "stream", most=None))["told"]
    assert told == (["The sky", " is", " clear."] if is_text else ["Bo", "Bonn"])


async def test_who_leaves_a_stream_cancels_the_work(ask, package):
    is_text = package[0] != "instructor"
    fake = model()
    fake.script = [Leg(said=TEXT if is_text else OBJECT, chunks=2, hangs=True)]
    async with gateway_over(fake) as gateway:
        told = (await ask(gateway, "stream", most=1))["told"]
        await asyncio.wait_for(fake.cancelled.wait(), 30)
    assert told == (["The sky"] if is_text else ["Bo"])


async def test_an_error_has_the_packages_own_class_and_our_words(ask, package):
    async with gateway_over(model()) as gateway:
        told = await ask(gateway, "stream", most=None, model="nobody")
    assert ERRORS[package[0]] in str(told["error"])
    assert "there is no model 'nobody' here" in told["message"].replace("\\", "")
