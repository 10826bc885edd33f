"""Keeping the sessions that a long request does not use for a while."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from paceline_orchestrator.calls.session import RemoteSession

__all__ = ["renew_sessions"]

# A session's lease is 15 s; it is renewed when nothing was asked of it for so long.
_RENEW_SECONDS = 5.0


async def renew_sessions(sessions: Callable[[], Iterable[RemoteSession]]) -> None:
    """Renew the leases of idle sessions, until cancelled.

    Args:
        sessions: Says which there are now.
    """
    while True:
        await asyncio.sleep(_RENEW_SECONDS)
        # All at once, so that a server that hangs takes no other's time. It is asked again when
        # it has answered, or was given up: a session has one renewal at a time from here.
        async with asyncio.TaskGroup() as renewals:
            for session in sessions():
                renewals.create_task(
                    session.renew(idle_seconds=_RENEW_SECONDS), name="renew a session"
                )
