"""The command-line program of each language, where the orchestrator asks for a key."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support.conformance.drivers import ROOT
from support.conformance.toolchains import missing
from support.keys import SECRET

PROMPT = "def fibonacci(n):"
PROGRAMS = {
    "python": (sys.executable, "-m", "paceline_cli", "generate"),
    "typescript": ("node", "clients/typescript/dist/cli.js"),
    "go": ("clients/go/bin/paceline-generate",),
    "cpp": ("clients/cpp/build/paceline-generate",),
}


@pytest.fixture(params=PROGRAMS)
def generate(request, locked_system):
    """Run a language's program against the locked orchestrator."""
    program = PROGRAMS[request.param]
    if not (ROOT / program[-1]).exists() and request.param != "python":
        missing(f"{program[-1]} is not there: make client-{request.param}")
    where = ("--address", locked_system.orchestrators[0].address, "--max-tokens", "8")

    def run(*options):
        return subprocess.run(
            (*program, *where, *options, PROMPT),
            capture_output=True,
            check=False,
            cwd=ROOT,
            text=True,
            timeout=60,
        )

    return run


def test_a_file_has_the_key_that_is_shown(generate, words_system, tmp_path):
    (tmp_path / "own.key").write_text(f"{SECRET}\n")
    done = generate("--api-key-file", tmp_path / "own.key")
    assert done.returncode == 0, done.stderr
    with words_system.client() as client:
        assert done.stdout.rstrip("\n") == client.generate(PROMPT, max_tokens=8).text()
    assert SECRET not in done.stderr


@pytest.mark.parametrize("content", [None, "sk-another"])
def test_without_the_right_key_one_is_told_which_option_has_it(generate, tmp_path, content):
    options = ()
    if content is not None:
        (tmp_path / "own.key").write_text(content)
        options = ("--api-key-file", tmp_path / "own.key")
    done = generate(*options)
    assert (done.returncode, done.stdout) == (1, "")
    assert "--api-key-file names the file with your key" in done.stderr


@pytest.mark.parametrize(
    ("content", "words"), [(None, "own.key"), ("", "one key"), ("two words", "one key")]
)
def test_a_file_without_a_key_is_named_and_not_shown(generate, tmp_path, content, words):
    if content is not None:
        (tmp_path / "own.key").write_text(content)
    done = generate("--api-key-file", tmp_path / "own.key")
    assert done.returncode in {1, 2}
    assert words in done.stderr
    assert "two words" not in done.stderr
    assert "Traceback" not in done.stderr
