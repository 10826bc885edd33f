"""The chart's tests need tools of their own, which `make chart-test` installs."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.system import simulated_system

if find_spec("helm_python") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def system():
    """A small system of real processes, whose models only wait."""
    with simulated_system().running() as running:
        yield running


@pytest.fixture(scope="session")
def checkov():
    return downloaded("CHECKOV")


@pytest.fixture(scope="session")
def helm3():
    return downloaded("HELM3")


@pytest.fixture(scope="session")
def promtool():
    return downloaded("PROMTOOL")


def downloaded(variable):
    """Return the tool that `make chart-test` names; only OFFLINE excuses that it is not there."""
    tool = Path(os.environ.get(variable, "nothing")).absolute()
    if not tool.exists():
        why = f"{variable} names no tool: run make chart-test"
        if os.environ.get("OFFLINE"):
            pytest.skip(f"OFFLINE, and {why}")
        pytest.fail(f"{why}, with OFFLINE=1 where nothing can be downloaded", pytrace=False)
    return tool
