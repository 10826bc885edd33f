"""Every `paceline ...` line that people are shown is one that the command line understands."""

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from paceline_cli import serve
from paceline_cli.known_settings import settings_classes
from paceline_gateway.settings import GatewaySettings
from paceline_model_server.settings import ModelServerSettings
from paceline_orchestrator.settings import OrchestratorSettings
from paceline_serving.command_line import parse
from paceline_serving.settings import Settings

ROOT = Path(__file__).parents[3]
PAGES = (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
COMMANDS = (
    "check-pair",
    "demo",
    "generate",
    "health",
    "info",
    "plan",
    "simulate",
    "top",
    "train",
    "up",
)
ROLES = {
    "drafter": ModelServerSettings,
    "gateway": GatewaySettings,
    "orchestrator": OrchestratorSettings,
    "target": ModelServerSettings,
}


def module_of(command):
    return import_module(f"paceline_cli.{command.replace('-', '_')}")


def settings_of(command):
    """Its last settings class: those before are parts of it."""
    module = module_of(command).__name__
    return [cls for cls in settings_classes() if cls.__module__ == module][-1]


def shown_lines():
    pages = "\n".join(page.read_text() for page in PAGES)
    blocks = re.findall(r"^```\w*\n(.*?)^```$", pages, re.MULTILINE | re.DOTALL)
    texts = [*blocks, serve._HELP, *(module_of(command)._EXAMPLES for command in COMMANDS)]
    for line in "\n".join(texts).replace("\\\n", "").splitlines():
        # What follows two spaces is a remark.
        yield from re.findall(r"(?:^ *|[|&] )(paceline .*?)(?=  +[a-z]|$| [|&])", line)


@pytest.mark.parametrize("line", sorted(set(shown_lines())))
def test_a_line_that_is_shown_is_understood(line):
    _, command, *arguments = shlex.split(line, comments=True)
    if "--help" in arguments:
        return
    cls = ROLES[arguments.pop(0)] if command == "serve" else settings_of(command)
    assert isinstance(parse(cls, arguments, program=line, environment={}), Settings)


def test_lines_are_found():
    assert len(set(shown_lines())) > 20
