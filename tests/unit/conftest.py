"""What tests of one part by itself share."""

from __future__ import annotations

import pytest

from support.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()
