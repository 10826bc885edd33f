"""The chart's tests need tools of their own, which `make chart-test` installs."""

from importlib.util import find_spec

import pytest

from support.system import simulated_system

if find_spec("helm_python") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def system():
    """A small system of real processes, whose models only wait."""
    with simulated_system().running() as running:
        yield running
