"""The servers that work on one request: who sits where, and who takes over.

A decoding method names servers by index. Behind an index is a seat; in a seat is a session at some
server, and after that server is lost, at another one, or at none.

The target in the first seat taken is the request's home. At the others it is a guest: where another
request is at home it begins nothing. So speculation that runs ahead uses targets that would idle,
and every request has the target that plain decoding would have. As requests come and go, DSI
shrinks and grows with the targets that are nobody's home.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from paceline.errors import (
    CacheExhaustedError,
    DeadlineError,
    InvalidFieldError,
    OverloadedError,
    PacelineError,
    TokenizerMismatchError,
)
from paceline_orchestrator.discovery import Role
from paceline_orchestrator.protocol.messages import CapacityChanged
from paceline_orchestrator.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.v1.session_pb2 import SessionSpec
    from paceline_orchestrator.deadline import Deadline
    from paceline_orchestrator.growth import Growth
    from paceline_orchestrator.keeper import SessionKeeper
    from paceline_orchestrator.pool import ServerPool
    from paceline_orchestrator.server import ModelServer
    from paceline_orchestrator.wire import ModelFacts

__all__ = ["Crew"]

# A server without room for a session is asked again after so long, if it did not say when.
_REFUSAL_SECONDS = 1.0


class Crew:
    """The seats of one request, filled at once: every session is being opened from here on.

    Args:
        pool: Where servers come from.
        model: The target model that the request is pinned to.
        make_spec: What a session at a server of a role is opened for, by the model's fingerprint.
        target_count: Seats for targets.
        drafter_count: Seats for drafters.
        keeper: Opens and closes sessions.
        deadline: The request's.
        note_fallback: Told of everything that did not go as planned, by its kind.
        growth: How many more targets it takes if they come while it runs; None takes no more.

    Attributes:
        targets: By seat, the sessions at targets.
        drafters: By seat, the sessions at drafters.
        lookahead: Draft tokens in a verification since targets came; None as long as planned.
    """

    def __init__(
        self,
        pool: ServerPool,
        model: ModelFacts,
        *,
        make_spec: Callable[[str], SessionSpec],
        target_count: int,
        drafter_count: int,
        keeper: SessionKeeper,
        deadline: Deadline,
        note_fallback: Callable[[str], None],
        growth: Growth | None = None,
    ) -> None:
        self._pool = pool
        self._model = model
        self._make_spec = make_spec
        self._keeper = keeper
        self._deadline = deadline
        self._note_fallback = note_fallback
        self._growth = growth
        self._since = time.monotonic()
        self._given_up: set[int] = set()  # targets' seats whose last call may still be answered
        self._has_grown = False
        self.lookahead: int | None = None
        self._barred_until: dict[ModelServer, float] = {}
        self.targets: list[Session | None] = [None] * target_count
        self.drafters: list[Session | None] = [None] * drafter_count
        self._home: ModelServer | None = None
        self._known = CapacityChanged((), ())
        self.fill()
        if drafter_count and not self.capacity.drafters:
            note_fallback("no_drafter")

    @property
    def capacity(self) -> CapacityChanged:
        """The seats that the method can give work to."""
        taken = _taken(self.targets)
        usable = tuple(index for index in taken if self._is_usable(index))
        return CapacityChanged(
            targets=usable,
            drafters=_taken(self.drafters),
            leaving=tuple(sorted(self._given_up.union(taken).difference(usable))),
            lookahead=self.lookahead,
        )

    @property
    def sessions(self) -> list[Session]:
        """All sessions in use."""
        return [it for it in (*self.targets, *self.drafters) if it is not None]

    @property
    def is_idle(self) -> bool:
        """Whether this orchestrator uses the targets for nothing else."""
        return all(it.server.session_count == 1 for it in self.targets if it is not None)

    def fill(self) -> bool:
        """Seat servers that are ready; tell whether the capacity has changed.

        In this order: sessions move away from servers that are about to end; empty seats are
        filled; targets that came after the request are used, too.
        """
        for seats, role in ((self.targets, Role.TARGET), (self.drafters, Role.DRAFTER)):
            servers = self._unseated(seats, role)
            self._move(seats, servers)
            for index, session in enumerate(seats):
                if session is None and servers:
                    self._seat(seats, index, servers.pop(0))
            if role is Role.TARGET:
                self._spread(servers)
        self._settle()
        before, self._known = self._known, self.capacity
        return before != self._known

    def vacate(self, session: Session, error: PacelineError) -> float | None:
        """Take a session out of its seat after a call of it failed.

        The caller is to pass on the capacity that is left.

        Returns:
            After how many seconds the same server may be seated again, if that is known.
        """
        server = session.server
        seats = self.targets if server.role is Role.TARGET else self.drafters
        if session not in seats:
            return None
        seats[seats.index(session)] = None
        session.close()
        pause = None
        if isinstance(error, CacheExhaustedError | OverloadedError):
            pause = error.retry_after_seconds or _REFUSAL_SECONDS
            self._barred_until[server] = time.monotonic() + pause
            self._note_fallback("session_refused")
        elif isinstance(error, InvalidFieldError):
            self._barred_until[server] = float("inf")  # too small a model for this request
            self._note_fallback(f"{server.role}_lost")
        else:
            self._pool.report_failure(server, error)
            is_late = isinstance(error, DeadlineError)
            self._note_fallback("deadline" if is_late else f"{server.role}_lost")
        if server.role is Role.DRAFTER and not _taken(self.drafters):
            self._note_fallback("no_drafter")
        self._known = self.capacity
        return pause

    def close(self) -> None:
        """End all sessions, behind the caller's back."""
        for session in self.sessions:
            session.close()
        self.targets = [None] * len(self.targets)
        self.drafters = [None] * len(self.drafters)
        self._settle()

    def _settle(self) -> None:
        """Be at home at the target in the first seat taken."""
        home = next((it.server for it in self.targets if it is not None), None)
        if home is not self._home:
            origin, self._home = self._home, home
            self._pool.move_home(origin, home)

    def _is_usable(self, index: int) -> bool:
        """Whether a target is the request's home, or nobody's."""
        session = self.targets[index]
        assert session is not None
        return session.server is self._home or not session.server.home_count

    def _move(self, seats: list[Session | None], servers: list[ModelServer]) -> None:
        """Replace sessions at servers that are about to end; each finishes its call.

        Where there is no other server the request does with its other seats, if it has some.
        """
        for index, session in enumerate(seats):
            if session is None or not session.server.leaving:
                continue
            if servers:
                self._seat(seats, index, servers.pop(0))
            elif any(other is not None and not other.server.leaving for other in seats):
                seats[index] = None
                if seats is self.targets:
                    self._given_up.add(index)
            else:
                continue
            session.retire()

    def _spread(self, servers: list[ModelServer]) -> None:
        """Use targets that came later: as a home that is less crowded, and to run further ahead."""
        newer = [server for server in servers if server.ready_since > self._since]
        home = next(iter(_taken(self.targets)), None)
        if newer and home is not None and (session := self.targets[home]) is not None:
            crowd = session.server.home_count - newer[0].home_count
            if session.server is self._home and crowd > 1:
                self._seat(self.targets, home, newer.pop(0))
                session.retire()
        self._grow([server for server in newer if not server.home_count])

    def _grow(self, servers: list[ModelServer]) -> None:
        """Take more targets, as far as Equation 1 says, and shorter blocks to go with them."""
        target_ns, drafter_ns = _step_ns(self.targets), _step_ns(self.drafters)
        if self._growth is None or not (target_ns and drafter_ns):
            return
        limit = self._growth.target_limit(target_ns, drafter_ns)
        for server in servers[: max(0, limit - len(self.targets))]:
            self.targets.append(None)
            self._seat(self.targets, len(self.targets) - 1, server)
            self._has_grown = True
        if self._has_grown:
            self.lookahead = self._growth.lookahead_with(
                len(_taken(self.targets)), target_ns=target_ns, drafter_ns=drafter_ns
            )

    def _seat(self, seats: list[Session | None], index: int, server: ModelServer) -> None:
        assert server.facts is not None, "a server that is ready has said what it is"
        if seats is self.targets:
            self._given_up.discard(index)
        seats[index] = Session(
            server,
            self._make_spec(server.facts.fingerprint),
            keeper=self._keeper,
            deadline=self._deadline,
            note_repair=self._note_fallback,
        )

    def _unseated(self, seats: list[Session | None], role: Role) -> list[ModelServer]:
        """Return the servers that can be seated, the least loaded first."""
        seated = {session.server for session in seats if session is not None}
        now = time.monotonic()
        return [
            server
            for server in self._candidates(role)
            if server not in seated and now >= self._barred_until.get(server, 0.0)
        ]

    def _candidates(self, role: Role) -> list[ModelServer]:
        if role is Role.TARGET:
            return self._pool.targets(self._model)
        try:
            return self._pool.drafters(self._model)
        except TokenizerMismatchError:
            return []


def _step_ns(seats: list[Session | None]) -> int:
    """Return a decoding step of the first server seated; 0 while it is not known."""
    return next((it.server.latency.step_ns for it in seats if it is not None), 0)


def _taken(seats: list[Session | None]) -> tuple[int, ...]:
    return tuple(index for index, session in enumerate(seats) if session is not None)
