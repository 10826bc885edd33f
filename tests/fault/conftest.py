"""A simulated system of real processes for each module; tests mend what they break."""

from __future__ import annotations

import pytest

from support.streams import plain
from support.system import simulated_system
from support.tiny_models import tiny_pair

__all__ = ["tiny_pair"]


@pytest.fixture(scope="module")
def system():
    with simulated_system(drafter_count=2, target_count=3).running() as system:
        yield system


@pytest.fixture
def whole(system):
    """The system, with every server in use before and after the test."""
    system.mend()
    yield system
    system.mend()


@pytest.fixture(scope="module")
def text(system):
    """The tokens that every test is to get."""
    with system.client() as client:
        return plain(client, max_tokens=400)
