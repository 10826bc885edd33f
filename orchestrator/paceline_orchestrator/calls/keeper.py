"""Opening and closing sessions, apart from the requests they are for."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from paceline.errors import DeadlineError, PacelineError
from paceline.v1 import drafter_service_pb2 as drafter_pb
from paceline.v1 import target_service_pb2 as target_pb
from paceline_orchestrator.fleet.discovery import Role
from paceline_orchestrator.fleet.silence import SilenceError
from paceline_orchestrator.fleet.wire import answer

if TYPE_CHECKING:
    from paceline.v1.session_service_pb2 import SessionGrant, SessionSpec
    from paceline_orchestrator.fleet.server import ModelServer

__all__ = ["Opening", "SessionKeeper"]

# Opening takes no forward: a server that takes longer hangs, and another one may be free.
_OPENING_SECONDS = 2.0
_RENEWING_SECONDS = 1.0
_TIMEOUT_SECONDS = 5.0
_CONCURRENT_CLOSINGS = 64


@dataclass(frozen=True, slots=True)
class Opening:
    """What came of opening a session: a handle, or an error."""

    session_id: str = ""
    error: PacelineError | None = None


class SessionKeeper:
    """Opens and closes sessions in tasks of its own. Use it as an asynchronous context manager.

    So a client that leaves does not wait, and a session whose opening was under way is closed too:
    releases equal openings. What a server cannot be told it finds out by the lease.
    """

    def __init__(self) -> None:
        self._tasks = asyncio.TaskGroup()
        self._closings = asyncio.Semaphore(_CONCURRENT_CLOSINGS)

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Wait for the last closings."""
        await self._tasks.__aexit__(None, None, None)

    def open(self, server: ModelServer, spec: SessionSpec) -> asyncio.Task[Opening]:
        """Begin to open a session; the task itself never fails."""
        return self._tasks.create_task(_open(server, spec), name=f"open a session at {server.name}")

    def close(self, server: ModelServer, opening: asyncio.Task[Opening]) -> None:
        """Begin to close a session, also if it is still being opened."""
        self._tasks.create_task(
            self._close(server, opening), name=f"close a session at {server.name}"
        )

    async def renew(self, server: ModelServer, session_id: str) -> int:
        """Give a session another lease.

        Returns:
            The sequence of its call that the server has in sight; 0 if it has none.

        Raises:
            PacelineError: The session is lost, or the server does not answer.
        """
        if server.role is Role.DRAFTER:
            renewal = drafter_pb.DrafterServiceRenewSessionRequest(session_id=session_id)
            draft_call = server.drafter.RenewSession(renewal, timeout=_RENEWING_SECONDS)
            return (await answer(draft_call)).live_sequence
        request = target_pb.TargetServiceRenewSessionRequest(session_id=session_id)
        target_call = server.target.RenewSession(request, timeout=_RENEWING_SECONDS)
        return (await answer(target_call)).live_sequence

    async def _close(self, server: ModelServer, opening: asyncio.Task[Opening]) -> None:
        session_id = (await opening).session_id
        if not session_id:
            return
        async with self._closings:
            with suppress(PacelineError):
                if server.role is Role.DRAFTER:
                    closing = drafter_pb.DrafterServiceCloseSessionRequest(session_id=session_id)
                    await answer(server.drafter.CloseSession(closing, timeout=_TIMEOUT_SECONDS))
                else:
                    request = target_pb.TargetServiceCloseSessionRequest(session_id=session_id)
                    await answer(server.target.CloseSession(request, timeout=_TIMEOUT_SECONDS))


async def _open(server: ModelServer, spec: SessionSpec) -> Opening:
    grant: SessionGrant
    try:
        if server.role is Role.DRAFTER:
            opening = drafter_pb.DrafterServiceOpenSessionRequest(spec=spec)
            drafter_call = server.drafter.OpenSession(opening, timeout=_OPENING_SECONDS)
            grant = (await answer(drafter_call)).grant
        else:
            request = target_pb.TargetServiceOpenSessionRequest(spec=spec)
            target_call = server.target.OpenSession(request, timeout=_OPENING_SECONDS)
            grant = (await answer(target_call)).grant
    except DeadlineError:
        return Opening(error=SilenceError(f"{server.name} opens no session"))
    except PacelineError as error:
        return Opening(error=error)
    return Opening(session_id=grant.session_id)
