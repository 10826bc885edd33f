"""The README's examples, as printed: only the address is that of the test's own system."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.json_format import Parse

from paceline.v1 import orchestrator_service_pb2 as pb

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PRINTED_ADDRESS = "127.0.0.1:50050"


def blocks(language=""):
    found = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [block for its_language, block in found if its_language == language]


@pytest.fixture
def run(bundled):
    """Run a command of someone who reads the README; returns what it wrote."""
    address = bundled.orchestrators[0].address
    own = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{own['PATH']}"

    def call(*command):
        return subprocess.run(
            [word.replace(PRINTED_ADDRESS, address) for word in command],
            env={**own, "PATH": path, "PACELINE_ADDRESS": address},
            capture_output=True,
            check=True,
            cwd=ROOT,
            text=True,
            timeout=120,
        )

    return call


def test_the_python_example_streams_text_and_prints_how_much_of_it_was_drafted(run):
    example, _ = blocks("python")
    assert PRINTED_ADDRESS in example
    text, told = run(sys.executable, "-c", example).stdout.rsplit("\n", 2)[:2]
    assert text.strip()
    assert re.fullmatch(r"\d+ of \d+ drafted tokens accepted", told)


def test_the_example_with_two_orchestrators_prints_the_whole_text(run):
    # One of the two is not there: its requests go to the other.
    _, example = blocks("python")
    assert run(sys.executable, "-c", example).stdout.strip()


def test_the_command_generates_text_and_says_how_fast(run):
    lines = [line for block in blocks() for line in block.splitlines()]
    (command,) = (line for line in lines if line.startswith("paceline generate"))
    ran = run(*shlex.split(command, comments=True))
    assert ran.stdout.strip()
    assert "tokens/s" in ran.stderr


def test_the_call_with_grpcurl_names_what_is_there():
    (command,) = (block for block in blocks() if "grpcurl" in block)
    words = shlex.split(command)
    folder, proto = (words[words.index(flag) + 1] for flag in ("-import-path", "-proto"))
    assert (ROOT / folder / proto).is_file()
    request = Parse(words[words.index("-d") + 1], pb.GenerateRequest())
    assert request.text
    service, method = words[-1].split("/")
    described = pb.DESCRIPTOR.services_by_name[service.removeprefix("paceline.v1.")]
    assert method in described.methods_by_name
