"""Every `paceline ...` line that people are shown is one that the command line understands."""

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from paceline_cli import serve
from paceline_cli.__main__ import _MODULES
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
    name = command.replace("-", "_")
    return import_module(_MODULES.get(command, f"paceline_cli.{name}"))


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


def test_a_body_that_is_shown_is_sent_as_json():
    pages = "\n".join(page.read_text() for page in PAGES).replace("\\\n", "")
    shown = re.findall(r"^ *(curl .*/v1/.* -d .*)$", pages, re.MULTILINE)
    assert shown
    assert [line for line in shown if "-H 'content-type: application/json'" not in line] == []


def test_lines_are_found():
    assert len(set(shown_lines())) > 20


# A flag and its default, as pages have them: "`--queue-limit-bytes` together (64 MiB)".
DEFAULT = re.compile(r"`--([a-z-]+)`[^`\n;|]{0,60}?\(([\d.]+(?: [KMG]iB)?(?::\d+)?)(?=[;)])")
BYTES = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def told_defaults():
    """Return flags and what they are by default, with the roles that it is told of."""
    found = []
    for page in PAGES:
        roles = ["gateway"] if page.name == "http.md" else ROLES
        for flag, told in DEFAULT.findall(page.read_text()):
            found.append(pytest.param(flag, told, roles, id=f"{page.name} --{flag} {told}"))
    return found


@pytest.mark.parametrize(("flag", "told", "roles"), told_defaults())
def test_a_default_that_a_page_tells_is_the_settings_own(flag, told, roles):
    name = flag.replace("-", "_")
    fields = [ROLES[role].model_fields.get(name) for role in roles]
    defaults = [field.default for field in fields if field is not None]
    number, _, unit = told.partition(" ")
    is_number = number.replace(".", "", 1).isdigit()
    assert (float(number) * BYTES.get(unit, 1) if is_number else told) in defaults


def test_the_pages_tell_defaults_at_all():
    assert len(told_defaults()) >= 11
