"""The requests that are here: let in until the process ends, counted, and cut at its end."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from paceline.errors import DrainingError

if TYPE_CHECKING:
    from collections.abc import Iterator


class Admission:
    """Counts requests; at the end it refuses new ones, waits for the others, and cuts what is left.

    Args:
        closed_message: What a request is told that is refused or cut.

    Attributes:
        present_count: Requests that are here.
        has_cut: Set once `cut` was called.
    """

    def __init__(self, closed_message: str) -> None:
        self._closed_message = closed_message
        self._is_closed = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._cuttable: set[asyncio.Task[Any]] = set()
        self.present_count = 0
        self.has_cut = asyncio.Event()

    def close(self) -> None:
        """Let no more requests in."""
        self._is_closed = True

    async def idle(self) -> None:
        """Return once no request is here."""
        await self._idle.wait()

    def cut(self) -> None:
        """Cancel what is awaited in `cuttable`; its requests hear DrainingError."""
        self.has_cut.set()
        while self._cuttable:
            self._cuttable.pop().cancel()

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a request for as long as it is here.

        Raises:
            DrainingError: No more are let in.
        """
        if self._is_closed:
            raise DrainingError(self._closed_message)
        self.present_count += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.present_count -= 1
            if not self.present_count:
                self._idle.set()

    @contextmanager
    def cuttable(self) -> Iterator[None]:
        """Let `cut` end what this task awaits in here.

        Cancellation:
            A task that somebody else cancels, with `cut` or without, stays cancelled.

        Raises:
            DrainingError: It was cut.
        """
        task = asyncio.current_task()
        assert task is not None
        self._cuttable.add(task)
        try:
            yield
        except asyncio.CancelledError:
            is_cut = task not in self._cuttable
            if not is_cut or task.uncancel():
                raise
            raise DrainingError(self._closed_message) from None
        finally:
            self._cuttable.discard(task)
