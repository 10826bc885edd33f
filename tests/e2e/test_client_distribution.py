"""The client's wheel in an environment with nothing else: it imports, and brings what it needs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What the three that it asks for bring is in it: grpcio asks for typing_extensions.
NEEDED = {
    *("googleapis-common-protos", "grpcio", "paceline-client", "protobuf", "typing_extensions"),
}
IMPORT_ALL = """
import importlib, json, pkgutil, sys
from importlib.metadata import distributions
import paceline
for each in pkgutil.walk_packages(paceline.__path__, "paceline."):
    importlib.import_module(each.name)
for name in paceline.__all__:
    getattr(paceline, name)
print(json.dumps({
    "home": paceline.__file__,
    "installed": sorted(it.name for it in distributions()),
    "servers": sorted(it for it in sys.modules if it.startswith("paceline_")),
}))
"""


def pip(*words):
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *words], cwd=ROOT, check=True)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Make an environment without pip, and install the client's wheel there; return its Python."""
    folder = tmp_path_factory.mktemp("client")
    pip("wheel", "--no-deps", "--wheel-dir", str(folder), "./clients/python")
    (wheel,) = folder.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    pip("--python", str(python), "install", "-c", "constraints.txt", str(wheel))
    return python


@pytest.mark.long
def test_the_clients_wheel_imports_with_nothing_but_what_it_asks_for(environment):
    ran = subprocess.run(
        [environment, "-I", "-c", IMPORT_ALL], capture_output=True, check=True, text=True
    )
    told = json.loads(ran.stdout)
    assert Path(told["home"]).is_relative_to(environment.parents[1])
    assert set(told["installed"]) == NEEDED
    assert told["servers"] == []
