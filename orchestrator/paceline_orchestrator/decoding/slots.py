"""The slots of a request's servers: how many it needs, what is in each, which is the primary."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline_orchestrator.decoding.session import RemoteSession
    from paceline_orchestrator.fleet.discovery import Role
    from paceline_orchestrator.fleet.pool import ServerPool
    from paceline_orchestrator.fleet.server import ModelServer
    from paceline_orchestrator.planning.target_scaling import TargetScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerNeeds:
    """Servers that a method has work for, if there are as many.

    Attributes:
        target_count: Targets at most.
        drafter_count: Drafters at most.
        growth: How many more targets it takes if they come while it runs; None takes no more.
        drafts: Whether it has work for a drafter, be it the text itself.
    """

    target_count: int
    drafter_count: int
    growth: TargetScaling | None
    drafts: bool


@dataclass(eq=False, slots=True)
class Slots:
    """The slots of one role. A method names a server by its slot's index.

    Attributes:
        sessions: By slot, the open session; None where the slot is empty.
        opening: By slot, the session that is being opened for it.
        closed: The slots that no server is to take.
    """

    role: Role
    sessions: list[RemoteSession | None]
    opening: dict[int, RemoteSession] = field(default_factory=dict)
    closed: set[int] = field(default_factory=set)

    @property
    def count(self) -> int:
        """How many slots can be taken."""
        return len(self.sessions) - len(self.closed)

    @property
    def taken(self) -> tuple[int, ...]:
        """The slots with an open session."""
        return tuple(index for index, session in enumerate(self.sessions) if session is not None)

    @property
    def all_sessions(self) -> list[RemoteSession]:
        """All sessions, by slot; one that is to replace another before that."""
        opening = [(index, 0, it) for index, it in self.opening.items()]
        opened = [(index, 1, it) for index, it in enumerate(self.sessions) if it is not None]
        return [session for _, _, session in sorted((*opened, *opening), key=lambda it: it[:2])]

    @property
    def empty(self) -> list[int]:
        """The open slots without a session, and without one that is being opened."""
        return [
            index
            for index, session in enumerate(self.sessions)
            if session is None and index not in self.opening and index not in self.closed
        ]

    @property
    def step_ns(self) -> int:
        """A decoding step of the first server; 0 while it is not known."""
        return next((it.server.latency.step_ns for it in self.all_sessions), 0)

    def remove(self, session: RemoteSession) -> bool:
        """Take a session out of its slot; tell whether it had one."""
        if session in self.sessions:
            self.sessions[self.sessions.index(session)] = None
            return True
        for index, opening in self.opening.items():
            if opening is session:
                del self.opening[index]
                return True
        return False

    def resize(self, count: int) -> list[RemoteSession]:
        """Have so many slots that can be taken; return the sessions of those that are closed.

        A slot keeps its index. Empty slots are closed first, then those with a session that is
        being opened, then the others from the last. Slots come back behind the first one taken, if
        they can.
        """
        open_slots = [it for it in range(len(self.sessions)) if it not in self.closed]
        missing = count - len(open_slots)
        if missing > 0:
            first = min(self.taken, default=0)
            again = sorted(self.closed, key=lambda it: (it < first, it))
            self.closed.difference_update(again[:missing])
            self.sessions += [None] * (count - self.count)
            return []
        taken = set(self.taken)
        kept = sorted(open_slots, key=lambda it: (it not in taken, it not in self.opening, it))
        self.closed.update(kept[count:])
        leaving = [it for index, it in self.opening.items() if index in self.closed]
        leaving += [it for index in kept[count:] if (it := self.sessions[index]) is not None]
        for session in leaving:
            self.remove(session)
        return leaving

    def clear(self) -> None:
        """Take all sessions out."""
        self.sessions = [None] * len(self.sessions)
        self.opening.clear()


class PrimaryTarget:
    """A request's primary target: the one in the first of its slots that is taken.

    Its other targets are secondary: it begins nothing at one that is another request's primary. So
    speculation that runs ahead uses targets that would idle, and every request has the target that
    plain decoding would have. As requests come and go, DSI shrinks and grows with the targets that
    are no request's primary.

    Args:
        pool: Told of each move; it counts the requests whose primary target a server is.
        targets: The request's slots at targets.
    """

    def __init__(self, pool: ServerPool, targets: Slots) -> None:
        self._pool = pool
        self._targets = targets
        self._server: ModelServer | None = None

    def relocate(self) -> None:
        """Move to the target that has the first slot taken, or is about to have it."""
        primary = next((it.server for it in self._targets.all_sessions), None)
        if primary is not self._server:
            origin, self._server = self._server, primary
            self._pool.move_primary(origin, primary)

    def may_use(self, index: int) -> bool:
        """Whether a slot's target is primary, or gives way to it, or is no request's primary."""
        session = self._targets.sessions[index]
        assert session is not None
        is_primary = session.server is self._server or index in self._targets.opening
        return is_primary or not session.server.primary_count

    def crowded_slot(self, other: ModelServer) -> int | None:
        """Return the primary target's slot, if another server is primary to far fewer requests."""
        slot = next(iter(self._targets.taken), None)
        if slot is None or slot in self._targets.opening:
            return None
        session = self._targets.sessions[slot]
        if session is None or session.server is not self._server:
            return None
        return slot if session.server.primary_count - other.primary_count > 1 else None
