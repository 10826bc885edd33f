"""Whom a request waits for before its method begins: servers whose sessions open about together."""

from __future__ import annotations

import asyncio

__all__ = ["Assembly"]

# Who opens its session so much later than the first target joins a method that has begun.
_ASSEMBLY_SECONDS = 0.05


class Assembly:
    """Ends when everyone is there, or a little after the first target."""

    def __init__(self) -> None:
        self._has_ended = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def note(self, *, has_target: bool, is_whole: bool) -> None:
        """Take notice of who is there by now."""
        if is_whole:
            self.end()
        elif has_target and self._timer is None and not self._has_ended.is_set():
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_ASSEMBLY_SECONDS, self._has_ended.set)

    async def ended(self) -> None:
        """Wait until there is no reason to wait for more."""
        await self._has_ended.wait()

    def end(self) -> None:
        """Wait for nobody any more."""
        self._has_ended.set()
        if self._timer is not None:
            self._timer.cancel()
