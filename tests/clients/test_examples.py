"""Each language's ten lines are printed in its README as they are, and run as printed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

import pytest

from support.conformance.drivers import LANGUAGES, ROOT
from support.conformance.toolchains import needs_toolchain

PRINTED_ADDRESS = "127.0.0.1:50050"
PROMPT, TOKENS = "def fibonacci(n):", 64
EXAMPLES = {
    "typescript": "clients/typescript/examples/quickstart.ts",
    "go": "clients/go/examples/quickstart.go",
    "cpp": "clients/cpp/examples/quickstart.cpp",
    "ruby": "clients/ruby/examples/quickstart.rb",
}
GOCODE = "/usr/share/gocode"


def test_every_client_has_an_example():
    tested = {language.name for language in LANGUAGES if not language.name.startswith("python")}
    assert tested <= EXAMPLES.keys()


@pytest.mark.parametrize("language", EXAMPLES)
def test_the_readme_prints_the_example_as_it_is(language):
    printed = (ROOT / f"clients/{language}/README.md").read_text()
    blocks = re.findall(r"^```\w+\n(.*?)^```$", printed, re.MULTILINE | re.DOTALL)
    assert (ROOT / EXAMPLES[language]).read_text() in blocks


@pytest.mark.parametrize("language", EXAMPLES)
def test_the_example_streams_the_models_text_and_prints_the_acceptance_rate(
    language, words_system, tmp_path
):
    needs_toolchain(language)
    example = (ROOT / EXAMPLES[language]).read_text()
    assert PRINTED_ADDRESS in example
    own = example.replace(PRINTED_ADDRESS, words_system.orchestrators[0].address)
    text, rate = RUN[language](own, tmp_path).rsplit("\n", 2)[:2]
    with words_system.client() as client:
        assert text == client.generate(PROMPT, max_tokens=TOKENS).text()
    assert re.fullmatch(r"acceptance \d+%", rate)


def run_typescript(example, tmp_path):
    # Inside the package, which finds itself by its name; types are checked where it is built.
    printed = ROOT / "clients/typescript/build/printed.mjs"
    printed.parent.mkdir(exist_ok=True)
    printed.write_text(example)
    return output("node", printed)


def run_go(example, tmp_path):
    (tmp_path / "printed.go").write_text(example)
    command = ("go", "run", tmp_path / "printed.go")
    if not os.path.isdir(GOCODE):  # noqa: PTH112
        return output(*command, cwd=ROOT / "clients/go")
    place = tmp_path / "src/github.com/paceline/paceline/clients"
    place.mkdir(parents=True)
    (place / "go").symlink_to(ROOT / "clients/go")
    return output(*command, GO111MODULE="off", GOFLAGS="", GOPATH=f"{tmp_path}:{GOCODE}")


def run_cpp(example, tmp_path):
    source, program = tmp_path / "printed.cpp", tmp_path / "printed"
    source.write_text(example)
    libraries = output("pkg-config", "--libs", "grpc++", "protobuf").split()
    client = ROOT / "clients/cpp"
    own = (f"-I{client}/include", source, client / "build/libpaceline.a")
    output("g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", *own, *libraries, "-o", program)
    return output(program)


def run_ruby(example, tmp_path):
    (tmp_path / "printed.rb").write_text(example)
    output("make", "-C", ROOT / "clients/ruby", "stubs")
    return output("ruby", "-I", ROOT / "clients/ruby/build/stubs", tmp_path / "printed.rb")


RUN = {"typescript": run_typescript, "go": run_go, "cpp": run_cpp, "ruby": run_ruby}


def output(*command, cwd=ROOT, **environment):
    """Run a program and return what it printed; it has to succeed."""
    assert shutil.which(command[0]), command[0]
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
