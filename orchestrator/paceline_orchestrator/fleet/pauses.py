"""Pauses: servers that get no work for a while, though their health says that they are well."""

from __future__ import annotations

import asyncio
import itertools
import time
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.errors import ConnectionLostError, PacelineError
from paceline_orchestrator.fleet.bad_answers import BadAnswerError
from paceline_orchestrator.fleet.server import REMOVED, SILENT
from paceline_orchestrator.fleet.silence import SilenceError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from paceline_orchestrator.fleet.server import ModelServer

_T = TypeVar("_T")

_CONNECTION_LOST = "CONNECTION_LOST"
# A server whose calls failed is tried again after 0.5, 1, 2 … 10 s, if it is healthy by then.
_FIRST_PAUSE_SECONDS = 0.5
_LAST_PAUSE_SECONDS = 10.0
# Between two probes of a silent server. One that hangs costs the patience of a cold call, so a
# server is back within some five seconds of being well: a probe that hangs, a pause, one that
# does not.
_PROBE_PAUSES_SECONDS = (0.5, 1.0)


def status_of(error: PacelineError) -> str:
    """Say in one line why a server that failed so gets no work; empty: there is no word for it."""
    if isinstance(error, BadAnswerError):
        return f"BAD_ANSWER: {error.message}"
    return error.reason


def pause_after(failure_count: int) -> float:
    """Return for how many seconds a server that failed so often in a row is left alone."""
    doublings = min(failure_count - 1, 20)
    return min(_FIRST_PAUSE_SECONDS * 2.0**doublings, _LAST_PAUSE_SECONDS)


class Probed(Enum):
    """What came of asking a server for a token."""

    TOKEN = auto()
    NO_ROOM = auto()
    NOTHING = auto()


class Pauses:
    """Takes servers out after failures, and lets them come back: after a time, or when they answer.

    One that was silent is well by all that can be seen, so it has to compute a token before it gets
    work.

    Incidents count, not calls: when a connection breaks, all the calls on it fail, and that is one
    failure. So a failure is ignored while its server pauses, and so is that of a call which was on
    its way when the last failure was counted.

    Args:
        tasks: Probes run here.
        answers: Asks a server for a token, and tells what came of it.
        tell: Told of each server whose pause has begun or ended.
    """

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        *,
        answers: Callable[[ModelServer], Awaitable[Probed]],
        tell: Callable[[ModelServer], None],
    ) -> None:
        self._tasks = tasks
        self._answers = answers
        self._tell = tell
        self._probes: dict[ModelServer, asyncio.Task[None]] = {}
        self._examinations: dict[ModelServer, asyncio.Task[bool]] = {}

    def after_failure(self, server: ModelServer, error: PacelineError, *, asked_at: float) -> None:
        """Take a server out after a call to it failed: for a while, or until it answers again.

        Args:
            server: Where it failed.
            error: What with.
            asked_at: When the call was made, on the monotonic clock.
        """
        if isinstance(error, SilenceError):
            self._take_out(server, SILENT)
            self.probe(server)
            return
        if server.pause_status or asked_at < server.failed_at:
            return
        server.failure_count += 1
        server.failed_at = time.monotonic()
        if isinstance(error, ConnectionLostError) and server.failure_count == 1:
            return  # a single call can be refused; of a broken connection health tells at once
        pause = pause_after(server.failure_count)
        self._take_out(server, status_of(error) or _CONNECTION_LOST)
        asyncio.get_running_loop().call_later(pause, self._resume, server, server.pause_count)

    def after_reconnection(self, server: ModelServer) -> None:
        """Let a server work that can be reached again, if it paused because it could not be."""
        if server.pause_status == _CONNECTION_LOST:
            server.pause_status = None

    def examine(self, server: ModelServer, error: PacelineError) -> asyncio.Task[bool]:
        """Ask a server for a token after a failure that may be a request's own fault.

        Without the token it is out for a while, as after any failure. One that has no room for the
        question works for others. It is asked by one at a time, however many requests fail there.

        Returns:
            Whether it works for others.
        """
        if server not in self._examinations:
            self._begin(self._examinations, server, self._examine(server, error), verb="examine")
        return self._examinations[server]

    def probe(self, server: ModelServer) -> None:
        """Ask a server for a token; without one it is out until it answers.

        That it has no room for the question is an answer of one that was not silent before.
        """
        running = self._probes.get(server)
        if server.health_status != REMOVED and (running is None or running.done()):
            self._begin(self._probes, server, self._probe(server), verb="probe")

    def forget(self, server: ModelServer) -> None:
        """Ask a server nothing more."""
        for tasks in (self._probes, self._examinations):
            if server in tasks:
                tasks[server].cancel()

    def close(self) -> None:
        """Ask nobody anything more."""
        for task in (*self._probes.values(), *self._examinations.values()):
            task.cancel()

    def _begin(
        self,
        running: dict[ModelServer, asyncio.Task[_T]],
        server: ModelServer,
        work: Coroutine[Any, Any, _T],
        *,
        verb: str,
    ) -> None:
        """Run a task for a server, and keep it in a dictionary until it ends."""
        task = self._tasks.create_task(work, name=f"pool: {verb} {server.name}")
        running[server] = task

        def forget(_: object) -> None:
            if running.get(server) is task:
                del running[server]

        # Not at the task's own end: one that is cancelled at once never begins.
        task.add_done_callback(forget)

    def _take_out(self, server: ModelServer, status: str) -> None:
        server.pause_status = status
        server.pause_count += 1
        self._tell(server)

    def _resume(self, server: ModelServer, pause_count: int) -> None:
        if server.pause_count == pause_count:
            server.pause_status = None
            self._tell(server)

    async def _examine(self, server: ModelServer, error: PacelineError) -> bool:
        asked_at = time.monotonic()
        is_well = await self._answers(server) is not Probed.NOTHING
        if not is_well:
            self.after_failure(server, error, asked_at=asked_at)
        return is_well

    async def _probe(self, server: ModelServer) -> None:
        first, later = _PROBE_PAUSES_SECONDS
        for pause_seconds in itertools.chain((0.0, first), itertools.repeat(later)):
            probed = await self._answers(server)
            if probed is Probed.TOKEN:
                break
            if probed is Probed.NO_ROOM and server.pause_status != SILENT:
                return  # it answers; only one that was silent has to compute first
            self._take_out(server, SILENT)
            await asyncio.sleep(pause_seconds)
        if server.pause_status == SILENT:
            server.pause_status = None
            self._tell(server)
