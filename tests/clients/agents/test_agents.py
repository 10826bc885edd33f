"""Agents that bring their own program do a task with a scripted model behind the gateway.

The task is to read one file and to write another. The agents reach nothing but the gateway.
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from support.agents import HOME, installed
from support.fake_orchestrator import FakeOrchestrator, Leg
from support.gateway import gateway_over
from support.spoken import template_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NUMBER = "4711"
TASK = "Read the number in note.txt, write it into answer.txt, and say it."
ANSWER = ((5, "It is"), (6, f" {NUMBER}."), (904, ""))
TITLE = ((5, "A number"), (904, ""))


@dataclass(frozen=True)
class Agent:
    """An agent.

    Attributes:
        package: What npm calls it.
        command: How it is started; the task follows.
        calls: The calls with which it reads and writes, in a folder.
        settings: Its files of settings in that folder, by the gateway's address.
        variables: What it takes from the environment, by that address.
    """

    package: str
    command: tuple[str, ...]
    calls: Callable[[Path], tuple[tuple[str, dict[str, str]], tuple[str, dict[str, str]]]]
    settings: Callable[[str], dict[str, str]] = lambda _url: {}
    variables: Callable[[str], dict[str, str]] = lambda _url: {}


def codex_settings(url):
    return {
        ".codex/config.toml": f"""
model = "fake"
model_provider = "paceline"

[model_providers.paceline]
name = "Paceline"
base_url = "{url}/v1"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
    }


def opencode_settings(url):
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {"fake": {}},
    }
    return {"opencode.json": json.dumps({"provider": {"paceline": provider}})}


AGENTS = [
    Agent(
        package="@openai/codex",
        command=("codex", "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access"),
        calls=lambda _folder: (
            ("exec_command", {"cmd": "cat note.txt"}),
            ("exec_command", {"cmd": f"echo {NUMBER} > answer.txt"}),
        ),
        settings=codex_settings,
        variables=lambda _url: {"OPENAI_API_KEY": "none"},
    ),
    Agent(
        package="@anthropic-ai/claude-code",
        command=("claude", "--allowedTools=Read,Write", "--print"),
        calls=lambda folder: (
            ("Read", {"file_path": f"{folder}/note.txt"}),
            ("Write", {"file_path": f"{folder}/answer.txt", "content": f"{NUMBER}\n"}),
        ),
        variables=lambda url: {
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_AUTH_TOKEN": "none",
            "ANTHROPIC_MODEL": "fake",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "fake",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    ),
    Agent(
        package="opencode-ai",
        command=("opencode", "run", "--model", "paceline/fake"),
        calls=lambda folder: (
            ("read", {"filePath": f"{folder}/note.txt"}),
            ("write", {"filePath": f"{folder}/answer.txt", "content": f"{NUMBER}\n"}),
        ),
        settings=opencode_settings,
    ),
]


def said(name, arguments):
    call = json.dumps({"name": name, "arguments": arguments})
    return ((900, ""), (7, f"\n{call}\n"), (901, ""), (904, ""))


def next_turn(request, *, read, write):
    """Say what follows in the task, from what the prompt has of it; a title needs no tools."""
    prompt = str(request)
    if "<tools>" not in prompt:
        return Leg(said=TITLE)
    if NUMBER not in prompt:
        return Leg(said=said(*read))
    return Leg(said=ANSWER if prompt.count(NUMBER) > 1 else said(*write))


@pytest.mark.parametrize("agent", AGENTS, ids=lambda it: it.package)
async def test_an_agent_reads_a_file_writes_another_and_answers(agent, tmp_path):
    installed(HOME / "node_modules" / agent.package)
    (tmp_path / "note.txt").write_text(f"The number is {NUMBER}.\n")
    read, write = agent.calls(tmp_path)
    fake = FakeOrchestrator(
        chat_template=template_of(), speaks=lambda it: next_turn(it, read=read, write=write)
    )
    async with gateway_over(fake) as gateway:
        for name, content in agent.settings(gateway.url).items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(content)
        nowhere = dict.fromkeys(("HTTPS_PROXY", "HTTP_PROXY"), "http://127.0.0.1:9")
        process = await asyncio.create_subprocess_exec(
            HOME / "node_modules/.bin" / agent.command[0],
            *agent.command[1:],
            TASK,
            cwd=tmp_path,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(tmp_path),
                **nowhere,
                "NO_PROXY": "127.0.0.1",
                **agent.variables(gateway.url),
            },
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            told, log = await asyncio.wait_for(process.communicate(), 100)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert process.returncode == 0, log.decode()
    assert told.decode().strip().endswith(f"It is {NUMBER}.")
    assert (tmp_path / "answer.txt").read_text() == f"{NUMBER}\n"
