"""Who can be given work on a request (its crew, and its text), and what happens to the others.

The crew has the seats, and knows who may sit there. Here is when it is asked: servers come and go,
calls fail, sessions open, methods change. Whatever happens, the method hears who is there now.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING

from paceline.errors import CacheExhaustedError, OverloadedError, UnsupportedError
from paceline_orchestrator.calls.assembly import Assembly
from paceline_orchestrator.calls.candidates import is_refusal
from paceline_orchestrator.calls.endurance import Endurance
from paceline_orchestrator.calls.renewals import renew_sessions
from paceline_orchestrator.fleet.discovery import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from paceline.errors import PacelineError
    from paceline_orchestrator.calls.crew import Crew
    from paceline_orchestrator.calls.session import RemoteSession
    from paceline_orchestrator.calls.staff import Staff
    from paceline_orchestrator.calls.text_drafter import TextDrafter
    from paceline_orchestrator.fleet.pool import ServerPool
    from paceline_protocol.messages import CapacityChanged

__all__ = ["Workforce"]


class Workforce:
    """Keeps a request's seats filled, and tells who there is.

    Args:
        crew: The servers; its sessions are closed in the end.
        pool: Says when servers are back.
        text: The request's text as a drafter, if it is one.
        changed: Told who can be given work, at least whenever that has changed.
        give_up: Told why, once or more often, when targets have been missing for too long.
    """

    def __init__(
        self,
        crew: Crew,
        *,
        pool: ServerPool,
        text: TextDrafter | None,
        changed: Callable[[CapacityChanged], None],
        give_up: Callable[[PacelineError], None],
    ) -> None:
        self._crew = crew
        self._pool = pool
        self._text = text
        self._changed = changed
        self._assembly = Assembly()
        self._give_up = give_up
        self._endurance = Endurance(give_up)
        self._timers: list[asyncio.TimerHandle] = []
        self._tasks: asyncio.TaskGroup | None = None  # while at work
        self._reading: asyncio.Task[None] | None = None

    @contextmanager
    def at_work(self, tasks: asyncio.TaskGroup) -> Iterator[None]:
        """Keep sessions alive and seats filled meanwhile."""
        self._tasks = tasks
        renewing = tasks.create_task(
            renew_sessions(lambda: self._crew.sessions), name="renew sessions"
        )
        try:
            with self._pool.listening(self._refill):
                yield
        finally:
            self._tasks = None
            renewing.cancel()
            if self._reading is not None:
                self._reading.cancel()

    async def assembled(self) -> CapacityChanged:
        """Wait until there is no reason to wait for more, and return who is there."""
        self._tell()
        await self._assembly.ended()
        return self._capacity

    def stop_waiting(self) -> None:
        """Let `assembled` wait for nobody any more."""
        self._assembly.end()

    def close(self) -> None:
        """End all sessions, behind the caller's back."""
        for timer in self._timers:
            timer.cancel()
        self._assembly.end()
        self._endurance.close()
        self._crew.close()

    def take_arrival(self, session: RemoteSession, error: PacelineError | None) -> None:
        """Take notice of a session of the crew that has opened, or could not be opened."""
        if error is not None:
            self.lose(session, error)
            return
        self._crew.fill()  # who has just come may have to leave already
        self._tell()

    def note_verdict(self) -> None:
        """Take notice that a target has room."""
        self._endurance.note_verdict()

    def lose(self, session: RemoteSession, error: PacelineError) -> None:
        """Do without a session that failed, or could not be opened, and find another server."""
        is_target = session.server.role is Role.TARGET
        if is_target and isinstance(error, CacheExhaustedError | OverloadedError):
            self._endurance.note_refusal(session.server, error, targets=self._crew.target_servers)
        pause = self._crew.vacate(session, error)
        self._tell()
        self._refill()
        if is_target and is_refusal(error):
            self._note_refusal(error)
        if pause is not None:
            self._timers.append(asyncio.get_running_loop().call_later(pause, self._refill))

    def outgrow(self, sessions: Sequence[RemoteSession]) -> None:
        """Do without drafters whose context the text has outgrown; others may take their seats."""
        for session in sessions:
            self._crew.outgrow(session)
        if sessions:
            self._crew.fill()
            self._tell()

    def _note_refusal(self, error: PacelineError) -> None:
        """Give up at once what no target can do; else the others do it."""
        if self._crew.is_refused:
            words = f"every target refuses this request: {error.message}"
            self._give_up(UnsupportedError(words))

    def widen(self, staff: Staff) -> None:
        """Look for the further servers that another method has work for."""
        self._crew.widen(staff)
        self._tell()

    def resize(self, staff: Staff) -> None:
        """Let go whom the present method has no work for. Their calls must have been withdrawn."""
        if self._text is not None:
            self._text.drafts = staff.drafts
        self._crew.resize(staff)
        self._tell()

    @property
    def _capacity(self) -> CapacityChanged:
        capacity = self._crew.capacity
        return capacity if self._text is None else self._text.join(capacity)

    def _refill(self) -> None:
        """Find servers that are ready for empty seats."""
        if self._crew.fill():
            self._tell()

    def _tell(self) -> None:
        """Tell who is there; and end the assembly, if there is no reason to wait for more."""
        self._have_text_read()
        capacity = self._capacity
        if self._crew.seat_count:
            self._endurance.note_targets(has_targets=bool(capacity.targets))
        self._changed(capacity)
        has_target = bool(capacity.targets)
        is_whole = (has_target and self._crew.is_assembled) or not self._crew.seat_count
        self._assembly.note(has_target=has_target, is_whole=is_whole)

    def _have_text_read(self) -> None:
        """Have the text read its prompt, the first time that it is wanted as a drafter."""
        text, tasks = self._text, self._tasks
        if text is None or tasks is None or self._reading is not None or not self._crew.seat_count:
            return
        if text.is_wanted(self._crew.capacity) and self._crew.is_assembled:
            self._reading = tasks.create_task(self._read_prompt(text), name="read the prompt")

    async def _read_prompt(self, text: TextDrafter) -> None:
        await text.read_prompt()
        self._tell()
