"""Counts the running requests of a process, and ends them when the process ends."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from paceline.errors import DrainingError

if TYPE_CHECKING:
    from collections.abc import Iterator


class Admission:
    """Counts requests; at the end refuses new ones, waits for the others, and cuts the last ones.

    Args:
        closed_message: The message of the DrainingError that refuses or cuts a request.

    Attributes:
        present_count: Number of running requests.
        has_cut: Set after `cut` was called.
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
        """Refuse all further requests."""
        self._is_closed = True

    async def idle(self) -> None:
        """Return when no request is running."""
        await self._idle.wait()

    def cut(self) -> None:
        """Cancel the awaits inside `cuttable`; their requests get a DrainingError."""
        self.has_cut.set()
        while self._cuttable:
            self._cuttable.pop().cancel()

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a request while it runs.

        Raises:
            DrainingError: The process refuses further requests.
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
        """Let `cut` end the awaits of this task inside the block.

        Cancellation:
            A task that is cancelled otherwise, also during a `cut`, stays cancelled.

        Raises:
            DrainingError: The request was cut.
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
