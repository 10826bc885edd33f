"""The servers of one request over time: when they are assigned, replaced, and given up.

`AssignedServers` has the slots, and decides which server takes which. `RequestServers` decides when
it is asked: servers come and go, calls fail, sessions open, methods change. After each of these it
tells the driver which slots can be given work now; the request's own text may be one more drafter.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.errors import (
    CacheExhaustedError,
    InvalidFieldError,
    OverloadedError,
    PacelineError,
    UnsupportedError,
)
from paceline_orchestrator.decoding.candidates import is_refusal
from paceline_orchestrator.fleet import shortage
from paceline_orchestrator.fleet.discovery import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from paceline_orchestrator.decoding.assigned_servers import AssignedServers
    from paceline_orchestrator.decoding.session import RemoteSession
    from paceline_orchestrator.decoding.slots import ServerNeeds
    from paceline_orchestrator.decoding.text_drafter import TextDrafter
    from paceline_orchestrator.fleet.pool import ServerPool
    from paceline_orchestrator.fleet.server import ModelServer
    from paceline_protocol.messages import CapacityChanged

# A server that opens its session later than this after the first target joins a running method.
_BARRIER_SECONDS = 0.05
# A session's lease is 15 s; it is renewed when nothing was asked of it for so long.
_RENEW_SECONDS = 5.0
# Fields of OpenSession that an orchestrator hands on as the client sent them.
_CLIENTS_FIELDS = "spec.sampling."


class RequestServers:
    """Owns a request's assigned servers and its text drafter, and tells which can be given work.

    Args:
        assigned: The servers and their sessions: nothing else changes them from here on.
        pool: Says when servers are back.
        text: The request's text as a drafter, if it is one.

    Attributes:
        assigned: The servers and their sessions, for questions only.
        text: The text as a drafter, or None.
    """

    def __init__(
        self,
        assigned: AssignedServers,
        *,
        pool: ServerPool,
        text: TextDrafter | None,
    ) -> None:
        self.assigned = assigned
        self._pool = pool
        self.text = text
        self._changed: Callable[[CapacityChanged], None] = lambda _: None
        self._given_up: Callable[[PacelineError], None] = lambda _: None
        self._barrier = StartBarrier()
        self._shortages = ShortageTimer(self._give_up, find_reason=lambda: assigned.shortage)
        self._timers: list[asyncio.TimerHandle] = []
        self._tasks: asyncio.TaskGroup | None = None  # while at work
        self._reading: asyncio.Task[None] | None = None
        assigned.when_opened(self._session_opened)

    def when_changed(self, changed: Callable[[CapacityChanged], None]) -> None:
        """Have it called with the slots that can be given work, whenever they have changed."""
        self._changed = changed

    def when_given_up(self, given_up: Callable[[PacelineError], None]) -> None:
        """Have it called, once or more often, when targets have been missing for too long."""
        self._given_up = given_up

    @contextmanager
    def at_work(self, tasks: asyncio.TaskGroup) -> Iterator[None]:
        """Renew leases and fill empty slots inside the block."""
        self._tasks = tasks
        renewing = tasks.create_task(
            renew_sessions(lambda: self.assigned.sessions), name="renew sessions"
        )
        try:
            with self._pool.listening(self._refill):
                yield
        finally:
            self._tasks = None
            renewing.cancel()
            if self._reading is not None:
                self._reading.cancel()

    async def until_ready(self) -> CapacityChanged:
        """Wait until the method can begin, and return the slots that can be given work."""
        if verdict := self.assigned.verdict:  # what it had lost before it was resumed
            self._give_up(verdict)
        self._tell()
        await self._barrier.ended()
        return self.capacity

    def stop_waiting(self) -> None:
        """Let `until_ready` return at once."""
        self._barrier.end()

    def close(self) -> None:
        """End all sessions, behind the caller's back, and leave the text's room to others."""
        for timer in self._timers:
            timer.cancel()
        self._barrier.end()
        self._shortages.close()
        self.assigned.close()
        if self.text is not None:
            self.text.close()

    def note_verdict(self) -> None:
        """Take notice that a target has room."""
        self._shortages.note_verdict()

    def note_final(self, length: int) -> None:
        """Take notice of how many tokens are final."""
        if self.assigned.note_final(length):
            self._refill()

    def lose(self, session: RemoteSession, error: PacelineError, *, reach: int) -> None:
        """Do without a session that failed, or could not be opened, and find another server.

        Args:
            session: The session.
            error: What failed.
            reach: How long the text is with all tokens that the call was about.
        """
        is_target = session.server.role is Role.TARGET
        if is_target and isinstance(error, CacheExhaustedError | OverloadedError):
            self._shortages.note_refusal(
                session.server, error, targets=self.assigned.target_servers
            )
        pause = self.assigned.vacate(session, error, reach=reach)
        self._tell()
        self._refill()
        if is_target and is_refusal(error):
            self._note_refusal(error)
        if pause is not None:
            self._timers.append(asyncio.get_running_loop().call_later(pause, self._refill))

    def outgrow(self, sessions: Sequence[RemoteSession]) -> None:
        """Release drafters whose context the text has outgrown; others may take their slots."""
        for session in sessions:
            self.assigned.outgrow(session)
        if sessions:
            self.assigned.fill()
            self._tell()

    def widen(self, needs: ServerNeeds) -> None:
        """Look for the further servers that another method has work for."""
        self.assigned.widen(needs)
        self._tell()

    def resize(self, needs: ServerNeeds) -> None:
        """Release servers that the present method does not need. Their calls must be withdrawn."""
        if self.text is not None:
            self.text.drafts = needs.drafts
        self.assigned.resize(needs)
        self._tell()

    def _session_opened(self, session: RemoteSession, error: PacelineError | None) -> None:
        """Use a session that has opened, or replace one that could not be opened."""
        if error is not None:
            self.lose(session, error, reach=0)  # it was about no token
            return
        self.assigned.fill()  # its server may be about to end already
        self._tell()

    def _note_refusal(self, error: PacelineError) -> None:
        """Give up at once if no target can do it; otherwise the others do it."""
        if self.assigned.is_refused:
            words = f"every target refuses this request: {error.message}"
            self._give_up(_as_the_clients(error) or UnsupportedError(words))

    def _give_up(self, error: PacelineError) -> None:
        self._given_up(error)

    @property
    def capacity(self) -> CapacityChanged:
        """The slots that can be given work now."""
        capacity = self.assigned.capacity
        return capacity if self.text is None else self.text.join(capacity)

    def _refill(self) -> None:
        """Find servers that are ready for empty slots, unless it is the request that fails."""
        if verdict := self.assigned.verdict:
            self._give_up(verdict)
        elif self.assigned.fill():
            self._tell()

    def _tell(self) -> None:
        """Tell which slots can be given work; end the barrier if there is no reason to wait."""
        self._have_text_read()
        capacity = self.capacity
        if self.assigned.slot_count:
            self._shortages.note_targets(has_targets=bool(capacity.targets))
        self._changed(capacity)
        has_target = bool(capacity.targets)
        is_whole = (has_target and self.assigned.has_opened_all) or not self.assigned.slot_count
        self._barrier.update(has_target=has_target, is_whole=is_whole)

    def _have_text_read(self) -> None:
        """Have the text read its prompt, the first time that it is wanted as a drafter."""
        text, tasks = self.text, self._tasks
        if (
            text is None
            or tasks is None
            or self._reading is not None
            or not self.assigned.slot_count
        ):
            return
        if text.is_wanted(self.assigned.capacity) and self.assigned.has_opened_all:
            self._reading = tasks.create_task(self._read_prompt(text), name="read the prompt")

    async def _read_prompt(self, text: TextDrafter) -> None:
        await text.read_prompt()
        self._tell()


class StartBarrier:
    """Holds a method back until all sessions are open, or until a little after the first target."""

    def __init__(self) -> None:
        self._has_ended = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def update(self, *, has_target: bool, is_whole: bool) -> None:
        """End now if the servers are complete; end soon once there is a target."""
        if is_whole:
            self.end()
        elif has_target and self._timer is None and not self._has_ended.is_set():
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_BARRIER_SECONDS, self._has_ended.set)

    async def ended(self) -> None:
        """Wait for the end."""
        await self._has_ended.wait()

    def end(self) -> None:
        """End now, whichever sessions are open."""
        self._has_ended.set()
        if self._timer is not None:
            self._timer.cancel()


class ShortageTimer:
    """Gives a request up when targets, or room at them, have been missing for too long.

    A session may open, and its first call be refused, again and again: a verdict alone shows that
    there is room. A target that has not refused yet may be at work on a long prompt.

    Args:
        give_up: Told why, once or more often.
        find_reason: Says what became of targets that are missing.
    """

    def __init__(
        self,
        give_up: Callable[[PacelineError], None],
        *,
        find_reason: Callable[[], PacelineError],
    ) -> None:
        self._tell = give_up
        self._find_reason = find_reason
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
            self._tell(self._find_reason())


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


def _as_the_clients(error: PacelineError) -> InvalidFieldError | None:
    """Return a refusal of fields that are the client's own, by the client's names; else None.

    Only a model server can say whether a grammar can be enforced.
    """
    own = [it for it in error.violations if it.field.startswith(_CLIENTS_FIELDS)]
    if not own or len(own) < len(error.violations):
        return None
    violations = tuple(replace(it, field=it.field.removeprefix("spec.")) for it in own)
    text = "; ".join(f"{it.field}: {it.description}" for it in violations)
    return InvalidFieldError(text, violations=violations)
