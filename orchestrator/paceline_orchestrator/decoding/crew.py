"""The servers that work on one request: who sits where, and who takes over.

A decoding method names servers by index. Behind an index is a seat; in a seat is an open session at
some server, and after that server is lost, at another one, or at none. Who is to take a seat opens
a session first: until then it is empty, or its former occupant works on.

At one of its targets the request is at home, and at the others a guest: see `Home`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from paceline_orchestrator.decoding.candidates import Candidates
from paceline_orchestrator.decoding.seats import Home, Seats
from paceline_orchestrator.decoding.session import RemoteSession
from paceline_orchestrator.decoding.statistics import Fallback
from paceline_orchestrator.fleet.discovery import Role
from paceline_protocol.messages import CapacityChanged
from paceline_protocol.task import VerificationRule

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.errors import PacelineError
    from paceline_orchestrator.decoding.deadline import Deadline
    from paceline_orchestrator.decoding.exchange import SessionSpec
    from paceline_orchestrator.decoding.keeper import SessionKeeper
    from paceline_orchestrator.decoding.seats import Staff
    from paceline_orchestrator.fleet.familiarity import FamiliarText
    from paceline_orchestrator.fleet.pool import ServerPool
    from paceline_orchestrator.fleet.server import ModelServer
    from paceline_orchestrator.fleet.wire import ModelFacts

__all__ = ["Crew"]


class Crew:
    """The seats of one request: for all of them sessions are being opened from here on.

    Args:
        pool: Where servers come from.
        model: The target model that the request is pinned to.
        make_spec: What a session at a server is opened for, by what the server said of its model.
        staff: Whom there is work for: so many seats there are at first.
        keeper: Opens and closes sessions.
        note_fallback: Told of everything that did not go as planned, by its kind.
        rule: How draft tokens are judged; see Candidates.
        self_drafting: Whether targets that draft for themselves are taken first.
        text: Who has had it is taken first among equals.
        suits: Whether a server's context is long enough, for a role; see Candidates.

    Attributes:
        lookahead: Draft tokens in a verification since targets came; None as long as planned.
    """

    def __init__(
        self,
        pool: ServerPool,
        model: ModelFacts,
        *,
        make_spec: Callable[[ModelFacts], SessionSpec],
        staff: Staff,
        keeper: SessionKeeper,
        deadline: Deadline,
        note_fallback: Callable[[Fallback], None],
        rule: VerificationRule = VerificationRule.EXACT,
        self_drafting: bool = False,
        text: FamiliarText | None = None,
        suits: Callable[[ModelFacts, Role], bool] = lambda *_: True,
    ) -> None:
        self._candidates = Candidates(
            pool, model, rule=rule, self_drafting=self_drafting, text=text, suits=suits
        )
        self._make_spec = make_spec
        self._keeper = keeper
        self._deadline = deadline
        self._note_fallback = note_fallback
        self._arrived: Callable[[RemoteSession, PacelineError | None], None] = lambda *_: None
        self._growth = staff.growth
        self._since = time.monotonic()
        self._given_up: set[int] = set()  # targets' seats whose last call may still be answered
        self._has_grown = False
        self._has_outgrown_some = False
        self.lookahead: int | None = None
        self._targets = Seats(Role.TARGET, [None] * staff.target_count)
        self._drafters = Seats(Role.DRAFTER, [None] * staff.drafter_count)
        self._home = Home(pool, self._targets)
        self._known = CapacityChanged((), ())
        self.fill()
        if staff.drafter_count and not self._drafters.everyone:
            note_fallback(Fallback.NO_DRAFTER)

    @property
    def capacity(self) -> CapacityChanged:
        """The seats that the method can give work to."""
        taken = self._targets.taken
        usable = tuple(index for index in taken if self._home.lets_work(index))
        return CapacityChanged(
            targets=usable,
            drafters=self._drafters.taken,
            leaving=tuple(sorted(self._given_up.union(taken).difference(usable))),
            lookahead=self.lookahead,
        )

    @property
    def sessions(self) -> list[RemoteSession]:
        """All sessions, those that are being opened, too."""
        return [*self._targets.everyone, *self._drafters.everyone]

    @property
    def target_count(self) -> int:
        """How many targets work on it, or are about to."""
        return len(self._targets.everyone)

    @property
    def target_servers(self) -> list[ModelServer]:
        """Where its sessions at targets are, those that are being opened, too."""
        return [session.server for session in self._targets.everyone]

    @property
    def seat_count(self) -> int:
        """How many targets could work on it: 0 if there is nothing to do."""
        return len(self._targets.sessions)

    @property
    def is_refused(self) -> bool:
        """Whether no target works on it, because each says that it cannot."""
        return not self._targets.everyone and self._candidates.all_refuse

    @property
    def is_assembled(self) -> bool:
        """Whether no session is being opened."""
        return not (self._targets.arriving or self._drafters.arriving)

    @property
    def has_outgrown_drafters(self) -> bool:
        """Whether the text is too long for those that drafted, and no other drafter is there."""
        return self._has_outgrown_some and not self._drafters.everyone

    @property
    def is_idle(self) -> bool:
        """Whether this orchestrator uses the targets for nothing else."""
        return all(it.server.session_count == 1 for it in self._targets.everyone)

    def when_arrived(self, arrived: Callable[[RemoteSession, PacelineError | None], None]) -> None:
        """Have it called for each session that has taken its seat, or could not be opened, and why.

        That happens in a later turn of the loop. One that could not be opened is to be vacated.
        """
        self._arrived = arrived

    def target(self, index: int) -> RemoteSession | None:
        """Return the open session in a target's seat."""
        return self._targets.sessions[index]

    def drafter(self, index: int) -> RemoteSession | None:
        """Return the open session in a drafter's seat."""
        return self._drafters.sessions[index]

    def fill(self) -> bool:
        """Seat servers that are ready; tell whether the capacity has changed.

        In this order: sessions move away from servers that are about to end; empty seats are
        filled; targets that came after the request are used, too.

        Cost: where there is nothing to do, no server is looked at.
        """
        for seats in (self._targets, self._drafters):
            if not self._wants_servers(seats):
                continue
            servers = self._unseated(seats)
            self._move(seats, servers)
            for index in seats.empty[: len(servers)]:
                self._invite(seats, index, servers.pop(0))
            if seats is self._targets:
                self._spread(servers)
        self._home.settle()
        before, self._known = self._known, self.capacity
        return before != self._known

    def vacate(self, session: RemoteSession, error: PacelineError) -> float | None:
        """Take a session out of its seat after a call of it failed.

        The caller is to pass on the capacity that is left.

        Returns:
            After how many seconds the same server may be seated again, if that is known.
        """
        if not self._seats_of(session).dismiss(session):
            return None
        session.close()
        fallback, pause_seconds = self._candidates.blame(
            session.server, error, asked_at=session.asked_at
        )
        self._note_fallback(fallback)
        if session.server.role is Role.DRAFTER and not self._drafters.everyone:
            self._note_fallback(Fallback.NO_DRAFTER)
        self._known = self.capacity
        return pause_seconds

    def outgrow(self, session: RemoteSession) -> None:
        """Do without a drafter from here on whose context the text has outgrown.

        That is no failure of anybody. The caller is to pass on the capacity that is left.
        """
        if self._seats_of(session).dismiss(session):
            session.retire()
            self._has_outgrown_some = True

    def widen(self, staff: Staff) -> None:
        """Have at least as many seats from here on."""
        self._targets.resize(max(staff.target_count, self._targets.count))
        self._drafters.resize(max(staff.drafter_count, self._drafters.count))
        self.fill()

    def resize(self, staff: Staff) -> None:
        """Have exactly so many seats from here on: sessions beyond that go, the home last.

        Calls of those who go must have been withdrawn. The caller is to pass on the capacity.
        """
        self._growth, self._has_grown, self.lookahead = staff.growth, False, None
        leaving = self._drafters.resize(staff.drafter_count)
        leaving += self._targets.resize(staff.target_count)
        for session in leaving:
            session.close()
        self._given_up.difference_update(self._targets.closed)
        self.fill()

    def close(self) -> None:
        """End all sessions, behind the caller's back."""
        for session in self.sessions:
            session.close()
        self._targets.clear()
        self._drafters.clear()
        self._home.settle()

    def _wants_servers(self, seats: Seats) -> bool:
        """Whether a seat is empty or to be left, or newer targets may be of use."""
        is_newer = seats is self._targets and self._candidates.have_come_since(self._since)
        return is_newer or bool(seats.empty) or any(it.server.leaving for it in seats.everyone)

    def _move(self, seats: Seats, servers: list[ModelServer]) -> None:
        """Replace sessions at servers that are about to end; each finishes its call.

        Where there is no other server the request does with its other seats, if it has some.
        """
        for index in seats.taken:
            session = seats.sessions[index]
            if session is None or not session.server.leaving or index in seats.arriving:
                continue
            if servers:
                self._invite(seats, index, servers.pop(0))
            elif any(it and not it.server.leaving for it in seats.sessions):
                seats.dismiss(session)
                if seats is self._targets:
                    self._given_up.add(index)
                session.retire()

    def _spread(self, servers: list[ModelServer]) -> None:
        """Use targets that came later: as a home that is less crowded, and to run further ahead."""
        newer = [server for server in servers if server.ready_since > self._since]
        home = self._home.crowded_seat(newer[0]) if newer else None
        if home is not None:
            self._invite(self._targets, home, newer.pop(0))
        self._grow([server for server in newer if not server.home_count])

    def _grow(self, servers: list[ModelServer]) -> None:
        """Take more targets, as far as Equation 1 says, and shorter blocks to go with them."""
        seats = self._targets
        target_ns, drafter_ns = seats.step_ns, self._drafters.step_ns
        if self._growth is None or not (target_ns and drafter_ns):
            return
        limit = self._growth.target_limit(target_ns, drafter_ns)
        for server in servers[: max(0, limit - seats.count)]:
            seats.sessions.append(None)
            self._invite(seats, len(seats.sessions) - 1, server)
            self._has_grown = True
        if self._has_grown:
            self.lookahead = self._growth.lookahead_with(
                self.target_count, target_ns=target_ns, drafter_ns=drafter_ns
            )

    def _invite(self, seats: Seats, index: int, server: ModelServer) -> None:
        """Open a session for a seat."""
        assert server.facts is not None, "a server that is ready has said what it is"
        self._candidates.note_invited(server)
        session = RemoteSession(
            server,
            self._make_spec(server.facts),
            keeper=self._keeper,
            deadline=self._deadline,
            note_repair=self._note_fallback,
            tolerance=self._candidates.tolerance,
        )
        seats.arriving[index] = session
        session.when_opened(self._take_in)

    def _take_in(self, session: RemoteSession, error: PacelineError | None) -> None:
        """Let a session that has opened take its seat; who had it finishes its call."""
        seats = self._seats_of(session)
        index = next((index for index, it in seats.arriving.items() if it is session), None)
        if index is None:
            return  # everyone has gone meanwhile
        if error is None:
            former = seats.sessions[index]
            seats.sessions[index] = seats.arriving.pop(index)
            self._candidates.note_seated(session.server)
            if seats is self._targets:
                self._given_up.discard(index)
            if former is not None:
                former.retire()
            self._home.settle()
            self._known = self.capacity
        self._arrived(session, error)

    def _seats_of(self, session: RemoteSession) -> Seats:
        return self._targets if session.server.role is Role.TARGET else self._drafters

    def _unseated(self, seats: Seats) -> list[ModelServer]:
        seated = {session.server for session in seats.everyone}
        return self._candidates.not_among(seated, role=seats.role)
