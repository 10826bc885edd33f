"""The servers that are assigned to one request: which is in which slot, and which replaces it.

A decoding method names servers by index. Behind an index is a slot; in a slot is an open session at
some server, and after that server is lost, at another one, or at none. A server opens its session
before it takes a slot: until then the slot is empty, or its former server works on.

One of a request's targets is its primary target, the others are secondary: see `PrimaryTarget`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from paceline_orchestrator.decoding.session import RemoteSession
from paceline_orchestrator.decoding.slots import PrimaryTarget, Slots
from paceline_orchestrator.decoding.statistics import Fallback
from paceline_orchestrator.fleet.discovery import Role
from paceline_protocol.messages import CapacityChanged

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.errors import PacelineError
    from paceline_orchestrator.decoding.candidates import Candidates
    from paceline_orchestrator.decoding.deadline import Deadline
    from paceline_orchestrator.decoding.exchange import SessionSpec
    from paceline_orchestrator.decoding.session_opener import SessionOpener
    from paceline_orchestrator.decoding.slots import ServerNeeds
    from paceline_orchestrator.fleet.pool import ServerPool
    from paceline_orchestrator.fleet.server import ModelServer
    from paceline_orchestrator.fleet.wire import ModelFacts


class AssignedServers:
    """The slots of one request: for all of them sessions are being opened from here on.

    Args:
        candidates: The servers that the request may use.
        pool: Told which server is its primary target.
        make_spec: What a session at a server is opened for, by what the server said of its model.
        needs: How many servers there is work for: so many slots there are at first.
        opener: Opens and closes sessions.
        note_fallback: Told of everything that did not go as planned, by its kind.

    Attributes:
        lookahead: Draft tokens in a verification since targets came; None as long as planned.
    """

    def __init__(
        self,
        candidates: Candidates,
        *,
        pool: ServerPool,
        make_spec: Callable[[ModelFacts], SessionSpec],
        needs: ServerNeeds,
        opener: SessionOpener,
        deadline: Deadline,
        note_fallback: Callable[[Fallback], None],
    ) -> None:
        self._candidates = candidates
        self._make_spec = make_spec
        self._opener = opener
        self._deadline = deadline
        self._note_fallback = note_fallback
        self._opened: Callable[[RemoteSession, PacelineError | None], None] = lambda *_: None
        self._growth = needs.growth
        self._since = time.monotonic()
        self._given_up: set[int] = set()  # targets' slots whose last call may still be answered
        self._has_grown = False
        self._has_outgrown_some = False
        self.lookahead: int | None = None
        self._targets = Slots(Role.TARGET, [None] * needs.target_count)
        self._drafters = Slots(Role.DRAFTER, [None] * needs.drafter_count)
        self._primary = PrimaryTarget(pool, self._targets)
        self._known = CapacityChanged((), ())
        self.fill()
        if needs.drafter_count and not self._drafters.all_sessions:
            note_fallback(Fallback.NO_DRAFTER)

    @property
    def capacity(self) -> CapacityChanged:
        """The slots that the method can give work to."""
        taken = self._targets.taken
        usable = tuple(index for index in taken if self._primary.may_use(index))
        return CapacityChanged(
            targets=usable,
            drafters=self._drafters.taken,
            leaving=tuple(sorted(self._given_up.union(taken).difference(usable))),
            lookahead=self.lookahead,
        )

    @property
    def sessions(self) -> list[RemoteSession]:
        """All sessions, those that are being opened, too."""
        return [*self._targets.all_sessions, *self._drafters.all_sessions]

    @property
    def target_count(self) -> int:
        """How many targets work on it, or are about to."""
        return len(self._targets.all_sessions)

    @property
    def target_servers(self) -> list[ModelServer]:
        """Where its sessions at targets are, those that are being opened, too."""
        return [session.server for session in self._targets.all_sessions]

    @property
    def slot_count(self) -> int:
        """How many targets could work on it: 0 if there is nothing to do."""
        return len(self._targets.sessions)

    @property
    def is_refused(self) -> bool:
        """Whether no target works on it, because each says that it cannot."""
        return not self._targets.all_sessions and self._candidates.all_refuse

    @property
    def verdict(self) -> PacelineError | None:
        """What the request ends with, if targets fail for its own fault; None: not known."""
        return self._candidates.verdict(self.target_servers)

    @property
    def shortage(self) -> PacelineError:
        """What the request ends with, if no target is left for it."""
        return self._candidates.shortage

    @property
    def has_opened_all(self) -> bool:
        """Whether no session is being opened."""
        return not (self._targets.opening or self._drafters.opening)

    @property
    def has_outgrown_drafters(self) -> bool:
        """Whether the text is too long for those that drafted, and no other drafter is there."""
        return self._has_outgrown_some and not self._drafters.all_sessions

    @property
    def is_idle(self) -> bool:
        """Whether this orchestrator uses the targets for nothing else."""
        return all(it.server.session_count == 1 for it in self._targets.all_sessions)

    def when_opened(self, opened: Callable[[RemoteSession, PacelineError | None], None]) -> None:
        """Have it called with each session that has taken its slot, or has failed to open.

        That happens in a later turn of the loop. The slot of one that failed is to be vacated.
        """
        self._opened = opened

    def target(self, index: int) -> RemoteSession | None:
        """Return the open session in a target's slot."""
        return self._targets.sessions[index]

    def drafter(self, index: int) -> RemoteSession | None:
        """Return the open session in a drafter's slot."""
        return self._drafters.sessions[index]

    def fill(self) -> bool:
        """Assign servers that are ready; tell whether the capacity has changed.

        In this order: sessions move away from servers that are about to end; empty slots are
        filled; targets that came after the request are used, too.

        Cost: where there is nothing to do, no server is looked at.
        """
        for slots in (self._targets, self._drafters):
            if not self._wants_servers(slots):
                continue
            servers = self._unassigned(slots)
            self._move(slots, servers)
            for index in slots.empty[: len(servers)]:
                self._open(slots, index, servers.pop(0))
            if slots is self._targets:
                self._spread(servers)
        self._primary.relocate()
        before, self._known = self._known, self.capacity
        return before != self._known

    def note_final(self, length: int) -> bool:
        """Take notice of how many tokens are final; tell whether more servers may be assigned."""
        if self._candidates.doubts.has_any:
            self._candidates.doubts.note_final(length, targets=self.target_servers)
        return self._candidates.crashes.note_final(length)

    def vacate(self, session: RemoteSession, error: PacelineError, *, reach: int) -> float | None:
        """Take a session out of its slot after a call of it failed, which reached so far.

        The caller is to pass on the capacity that is left.

        Returns:
            After how many seconds the same server may be assigned again, if that is known.
        """
        if not self._slots_of(session).remove(session):
            return None
        session.close()
        fallback, pause_seconds = self._candidates.blame(
            session.server,
            error,
            asked_at=session.asked_at,
            reach=reach,
            was_open=bool(session.handle),
        )
        self._note_fallback(fallback)
        if session.server.role is Role.DRAFTER and not self._drafters.all_sessions:
            self._note_fallback(Fallback.NO_DRAFTER)
        self._known = self.capacity
        return pause_seconds

    def outgrow(self, session: RemoteSession) -> None:
        """Release a drafter whose context the text has outgrown.

        No server is to blame. The caller is to pass on the capacity that is left.
        """
        if self._slots_of(session).remove(session):
            session.retire()
            self._has_outgrown_some = True

    def widen(self, needs: ServerNeeds) -> None:
        """Have at least as many slots from here on."""
        self._targets.resize(max(needs.target_count, self._targets.count))
        self._drafters.resize(max(needs.drafter_count, self._drafters.count))
        self.fill()

    def resize(self, needs: ServerNeeds) -> None:
        """Have exactly so many slots from here on: other sessions go, the primary target's last.

        Calls of sessions that go must have been withdrawn. The caller is to pass on the capacity.
        """
        self._growth, self._has_grown, self.lookahead = needs.growth, False, None
        leaving = self._drafters.resize(needs.drafter_count)
        leaving += self._targets.resize(needs.target_count)
        for session in leaving:
            session.close()
        self._given_up.difference_update(self._targets.closed)
        self.fill()

    def close(self) -> None:
        """End all sessions, behind the caller's back."""
        self._candidates.crashes.close()
        for session in self._drafters.all_sessions:
            if session.has_streamed:
                self._candidates.note_drafted(session.server)
        for session in self.sessions:
            session.close()
        self._targets.clear()
        self._drafters.clear()
        self._primary.relocate()

    def _wants_servers(self, slots: Slots) -> bool:
        """Whether a slot is empty or to be left, or newer targets may be of use."""
        is_newer = slots is self._targets and self._candidates.have_come_since(self._since)
        return is_newer or bool(slots.empty) or any(it.server.leaving for it in slots.all_sessions)

    def _move(self, slots: Slots, servers: list[ModelServer]) -> None:
        """Replace sessions at servers that are about to end; each finishes its call.

        Where there is no other server the request does with its other slots, if it has some.
        """
        for index in slots.taken:
            session = slots.sessions[index]
            if session is None or not session.server.leaving or index in slots.opening:
                continue
            if servers:
                self._open(slots, index, servers.pop(0))
            elif any(it and not it.server.leaving for it in slots.sessions):
                slots.remove(session)
                if slots is self._targets:
                    self._given_up.add(index)
                session.retire()

    def _spread(self, servers: list[ModelServer]) -> None:
        """Use targets that came later: as a less crowded primary, and to run further ahead."""
        newer = [server for server in servers if server.ready_since > self._since]
        crowded = self._primary.crowded_slot(newer[0]) if newer else None
        if crowded is not None:
            self._open(self._targets, crowded, newer.pop(0))
        self._grow([server for server in newer if not server.primary_count])

    def _grow(self, servers: list[ModelServer]) -> None:
        """Take more targets, as far as Equation 1 says, and shorter blocks to go with them."""
        slots = self._targets
        target_ns, drafter_ns = slots.step_ns, self._drafters.step_ns
        if self._growth is None or not (target_ns and drafter_ns):
            return
        limit = self._growth.target_limit(target_ns, drafter_ns)
        for server in servers[: max(0, limit - slots.count)]:
            slots.sessions.append(None)
            self._open(slots, len(slots.sessions) - 1, server)
            self._has_grown = True
        if self._has_grown:
            self.lookahead = self._growth.lookahead_with(
                self.target_count, target_ns=target_ns, drafter_ns=drafter_ns
            )

    def _open(self, slots: Slots, index: int, server: ModelServer) -> None:
        """Open a session for a slot."""
        assert server.facts is not None, "a server that is ready has said what it is"
        self._candidates.note_opening(server)
        session = RemoteSession(
            server,
            self._make_spec(server.facts),
            opener=self._opener,
            deadline=self._deadline,
            note_repair=self._note_fallback,
            model=self._candidates.model,
            tolerance=self._candidates.tolerance,
        )
        slots.opening[index] = session
        session.when_opened(self._assign)

    def _assign(self, session: RemoteSession, error: PacelineError | None) -> None:
        """Let a session that has opened take its slot; the former one finishes its call."""
        slots = self._slots_of(session)
        index = next((index for index, it in slots.opening.items() if it is session), None)
        if index is None:
            return  # it was removed meanwhile
        if error is None:
            former = slots.sessions[index]
            slots.sessions[index] = slots.opening.pop(index)
            self._candidates.note_assigned(session.server)
            if slots is self._targets:
                self._given_up.discard(index)
            if former is not None:
                former.retire()
            self._primary.relocate()
            self._known = self.capacity
        self._opened(session, error)

    def _slots_of(self, session: RemoteSession) -> Slots:
        return self._targets if session.server.role is Role.TARGET else self._drafters

    def _unassigned(self, slots: Slots) -> list[ModelServer]:
        assigned = {session.server for session in slots.all_sessions}
        return self._candidates.not_among(assigned, role=slots.role)
