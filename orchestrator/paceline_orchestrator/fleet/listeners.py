"""Listeners to changes: told soon, and once for all the changes of one turn of the event loop."""

from __future__ import annotations

import asyncio
import logging
from contextlib import contextmanager
from contextvars import Context, copy_context
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_log = logging.getLogger(__name__)


class Listeners:
    """Listeners are called in the next turn: the code that makes a change is not finished yet.

    A listener is called in its own context, so that its logs and calls bear its request's name.
    """

    def __init__(self) -> None:
        self._contexts: dict[Callable[[], None], Context] = {}
        self._is_round_due = False

    @contextmanager
    def listening(self, listener: Callable[[], None]) -> Iterator[None]:
        """Call `listener`, inside the block, in the turn after a change."""
        self._contexts[listener] = copy_context()
        try:
            yield
        finally:
            del self._contexts[listener]

    def call_soon(self) -> None:
        """Have all called in the next turn; where requests come and go, there are many changes."""
        if not self._is_round_due:
            self._is_round_due = True
            asyncio.get_running_loop().call_soon(self._call)

    def _call(self) -> None:
        self._is_round_due = False
        for listener, context in tuple(self._contexts.items()):
            if listener in self._contexts:  # still, after those before it
                try:
                    context.run(listener)
                except Exception:  # noqa: BLE001 - one request's trouble is not everybody's
                    _log.exception("a listener failed")
