"""The seats of a request's servers: how many there are, who sits where, and where it is at home."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline_orchestrator.decoding.session import RemoteSession
    from paceline_orchestrator.fleet.discovery import Role
    from paceline_orchestrator.fleet.pool import ServerPool
    from paceline_orchestrator.fleet.server import ModelServer
    from paceline_orchestrator.planning.growth import Growth

__all__ = ["Home", "Seats", "Staff"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Staff:
    """Servers that a method has work for, if there are as many.

    Attributes:
        target_count: Targets at most.
        drafter_count: Drafters at most.
        growth: How many more targets it takes if they come while it runs; None takes no more.
        drafts: Whether it has work for a drafter, be it the text itself.
    """

    target_count: int
    drafter_count: int
    growth: Growth | None
    drafts: bool


@dataclass(eq=False, slots=True)
class Seats:
    """The seats of one role.

    Attributes:
        sessions: By seat, the open session; None where nobody sits.
        arriving: By seat, the session that is being opened for it.
        closed: The seats that nobody is to take.
    """

    role: Role
    sessions: list[RemoteSession | None]
    arriving: dict[int, RemoteSession] = field(default_factory=dict)
    closed: set[int] = field(default_factory=set)

    @property
    def count(self) -> int:
        """How many seats can be taken."""
        return len(self.sessions) - len(self.closed)

    @property
    def taken(self) -> tuple[int, ...]:
        """The seats with an open session."""
        return tuple(index for index, session in enumerate(self.sessions) if session is not None)

    @property
    def everyone(self) -> list[RemoteSession]:
        """All sessions, by seat; one that is to replace another before that."""
        coming = [(index, 0, it) for index, it in self.arriving.items()]
        seated = [(index, 1, it) for index, it in enumerate(self.sessions) if it is not None]
        return [session for _, _, session in sorted((*seated, *coming), key=lambda it: it[:2])]

    @property
    def empty(self) -> list[int]:
        """The seats that nobody has or is about to have, and somebody could."""
        return [
            index
            for index, session in enumerate(self.sessions)
            if session is None and index not in self.arriving and index not in self.closed
        ]

    @property
    def step_ns(self) -> int:
        """A decoding step of the first server seated; 0 while it is not known."""
        return next((it.server.latency.step_ns for it in self.everyone), 0)

    def dismiss(self, session: RemoteSession) -> bool:
        """Take a session out; whether it was here."""
        if session in self.sessions:
            self.sessions[self.sessions.index(session)] = None
            return True
        for index, arriving in self.arriving.items():
            if arriving is session:
                del self.arriving[index]
                return True
        return False

    def resize(self, count: int) -> list[RemoteSession]:
        """Have so many seats that can be taken; who has one too many is taken out, and returned.

        A seat keeps its index. Those go first that nobody has, then those that somebody is about
        to have, and of the others the last. They come back behind the first one taken, if they can.
        """
        open_seats = [it for it in range(len(self.sessions)) if it not in self.closed]
        missing = count - len(open_seats)
        if missing > 0:
            first = min(self.taken, default=0)
            again = sorted(self.closed, key=lambda it: (it < first, it))
            self.closed.difference_update(again[:missing])
            self.sessions += [None] * (count - self.count)
            return []
        taken = set(self.taken)
        kept = sorted(open_seats, key=lambda it: (it not in taken, it not in self.arriving, it))
        self.closed.update(kept[count:])
        leaving = [it for index, it in self.arriving.items() if index in self.closed]
        leaving += [it for index in kept[count:] if (it := self.sessions[index]) is not None]
        for session in leaving:
            self.dismiss(session)
        return leaving

    def clear(self) -> None:
        """Take everyone out."""
        self.sessions = [None] * len(self.sessions)
        self.arriving.clear()


class Home:
    """A request's home: the target in the first of its seats that is taken.

    At its other targets it is a guest: where another request is at home it begins nothing. So
    speculation that runs ahead uses targets that would idle, and every request has the target that
    plain decoding would have. As requests come and go, DSI shrinks and grows with the targets that
    are nobody's home.

    Args:
        pool: Told of each move; it knows how many are at home at a server.
        targets: The request's seats at targets.
    """

    def __init__(self, pool: ServerPool, targets: Seats) -> None:
        self._pool = pool
        self._targets = targets
        self._server: ModelServer | None = None

    def settle(self) -> None:
        """Move to the target that has the first seat taken, or is about to have it."""
        home = next((it.server for it in self._targets.everyone), None)
        if home is not self._server:
            origin, self._server = self._server, home
            self._pool.move_home(origin, home)

    def lets_work(self, index: int) -> bool:
        """Whether the target in a seat is home, or is to be replaced by it, or is nobody's."""
        session = self._targets.sessions[index]
        assert session is not None
        is_home = session.server is self._server or index in self._targets.arriving
        return is_home or not session.server.home_count

    def crowded_seat(self, other: ModelServer) -> int | None:
        """Return the seat that is home, if by far fewer are at home at another server."""
        seat = next(iter(self._targets.taken), None)
        if seat is None or seat in self._targets.arriving:
            return None
        session = self._targets.sessions[seat]
        if session is None or session.server is not self._server:
            return None
        return seat if session.server.home_count - other.home_count > 1 else None
