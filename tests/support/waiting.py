"""Waiting until something holds, however long that takes on a busy machine."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_LOOK_AGAIN_SECONDS = 0.01


def eventually(condition: Callable[[], Any], *, what: str, within_seconds: float = 90.0) -> Any:
    """Wait until a condition holds, and return its value; an OSError counts as not yet."""
    ends = time.monotonic() + within_seconds
    while True:
        try:
            value = condition()
        except OSError:
            value = None
        if value:
            return value
        assert time.monotonic() < ends, f"not within {within_seconds:g} s: {what}"
        time.sleep(_LOOK_AGAIN_SECONDS)


async def until(condition: Callable[[], Any], *, what: str, within_seconds: float = 90.0) -> None:
    """Wait until a condition holds that the same event loop brings about."""
    ends = time.monotonic() + within_seconds
    while not condition():
        assert time.monotonic() < ends, f"not within {within_seconds:g} s: {what}"
        await asyncio.sleep(_LOOK_AGAIN_SECONDS)
