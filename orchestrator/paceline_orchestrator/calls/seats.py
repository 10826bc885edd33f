"""The seats of a request's servers, those of one role: who sits where, and who is on the way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline_orchestrator.calls.session import RemoteSession
    from paceline_orchestrator.fleet.discovery import Role

__all__ = ["Seats"]


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
