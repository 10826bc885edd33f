"""What a request puts up with: a while without any target, or with none that has room."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from paceline.errors import NoTargetError, OverloadedError, PacelineError
from paceline_orchestrator.fleet import shortage

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from paceline_orchestrator.fleet.server import ModelServer

__all__ = ["Endurance"]


class Endurance:
    """Gives a request up when targets, or room at them, have been missing for too long.

    A session may open, and its first call be refused, again and again: a verdict alone shows that
    there is room. A target that has not refused yet may be at work on a long prompt.

    Args:
        give_up: Told why, once or more often.
    """

    def __init__(self, give_up: Callable[[PacelineError], None]) -> None:
        self._tell = give_up
        self._timer: asyncio.TimerHandle | None = None
        self._refusal: PacelineError | None = None
        self._refused_at: float | None = None  # the first time since the last verdict
        self._refusing: set[ModelServer] = set()  # since then

    def note_targets(self, *, has_targets: bool) -> None:
        """Give up in a while if there are none, unless some come."""
        if has_targets:
            self.close()
        elif self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(shortage.WAIT_SECONDS, self._give_up)

    def note_verdict(self) -> None:
        """Take notice that a target has room."""
        self._refused_at = None
        self._refusing.clear()

    def note_refusal(
        self, server: ModelServer, error: PacelineError, *, targets: Collection[ModelServer]
    ) -> None:
        """Take notice that a target has no room, while the request's targets are these."""
        self._refusing.add(server)
        now = asyncio.get_running_loop().time()
        self._refusal = error
        if self._refused_at is None:
            self._refused_at = now
        elif now - self._refused_at >= shortage.WAIT_SECONDS and self._refusing.issuperset(targets):
            self._give_up()

    def close(self) -> None:
        """Wait for nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        if self._refusal is not None and self._refused_at is not None:
            self._tell(
                OverloadedError(
                    f"no target has room for this request: {self._refusal.message}",
                    retry_after_seconds=self._refusal.retry_after_seconds or shortage.RETRY_SECONDS,
                )
            )
        else:
            self._tell(
                NoTargetError(
                    "no target is left for this request", retry_after_seconds=shortage.RETRY_SECONDS
                )
            )
