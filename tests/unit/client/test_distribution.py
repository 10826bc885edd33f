"""The client is a distribution of its own: what it needs, what is in it, what its page says."""

from __future__ import annotations

import ast
import asyncio
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
HOME = ROOT / "clients" / "python"
PRINTED_ADDRESS = "127.0.0.1:50050"
# Where the names that are not Python's own come from; a module is in google.protobuf or google.rpc.
DISTRIBUTIONS = {
    "google.protobuf": "protobuf",
    "google.rpc": "googleapis-common-protos",
    "grpc": "grpcio",
}


def configuration(folder):
    return tomllib.loads((folder / "pyproject.toml").read_text())


def imported_names():
    """Yield the full name of every module that the client's files import."""
    for source in (HOME / "paceline").rglob("*.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{source}: an import that says less than it means"
                if node.module == "google":
                    yield from (f"google.{alias.name}" for alias in node.names)
                else:
                    yield node.module


def distribution_of(module):
    depth = 2 if module.startswith("google.") else 1
    return DISTRIBUTIONS[".".join(module.split(".")[:depth])]


def test_the_client_asks_for_what_it_imports_and_for_nothing_else():
    found = {name for name in imported_names() if name.split(".")[0] != "paceline"}
    others = {name for name in found if name.split(".")[0] not in sys.stdlib_module_names}
    needed = {distribution_of(name) for name in others}
    asked = [Requirement(it).name for it in configuration(HOME)["project"]["dependencies"]]
    assert sorted(needed) == asked


def test_the_servers_need_the_client_of_their_own_version():
    servers, client = configuration(ROOT)["project"], configuration(HOME)["project"]
    assert servers["version"] == client["version"]
    assert servers["dependencies"] == [f"paceline-client=={client['version']}"]
    assert servers["requires-python"] == client["requires-python"]


def test_every_package_is_in_one_of_the_two():
    ours = configuration(ROOT)["tool"]["hatch"]["build"]
    packed = ours["targets"]["wheel"]["packages"]
    packed += [
        f"clients/python/{it}"
        for it in configuration(HOME)["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    ]
    there = [
        each.parent.relative_to(ROOT).as_posix()
        for folder in ours["dev-mode-dirs"]
        for each in (ROOT / folder).glob("*/__init__.py")
    ]
    assert sorted(packed) == sorted(there)


def test_the_client_comes_with_the_licence_and_with_its_types():
    assert (HOME / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert (HOME / "paceline" / "py.typed").exists()


def examples():
    page = (HOME / "README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [block for block in blocks if PRINTED_ADDRESS in block]


def test_its_page_has_examples_for_both_clients():
    assert len(examples()) >= 2
    assert any("AsyncClient" in block for block in examples())


@pytest.mark.parametrize("example", examples(), ids=range(len(examples())))
async def test_an_example_of_its_page_prints_the_text(example, fake, capsys):
    own = example.replace(PRINTED_ADDRESS, fake.address)
    await asyncio.to_thread(exec, compile(own, "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("3 4 5 ")
