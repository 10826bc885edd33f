"""The servers that work on one request: who sits where, and who takes over.

A decoding method names servers by index. Behind an index is a seat; in a seat is a session at some
server, and after that server is lost, at another one, or at none.
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
    ) -> None:
        self._pool = pool
        self._model = model
        self._make_spec = make_spec
        self._keeper = keeper
        self._deadline = deadline
        self._note_fallback = note_fallback
        self._barred_until: dict[ModelServer, float] = {}
        self.targets: list[Session | None] = [None] * target_count
        self.drafters: list[Session | None] = [None] * drafter_count
        self.fill()
        if drafter_count and not self.capacity.drafters:
            note_fallback("no_drafter")

    @property
    def capacity(self) -> CapacityChanged:
        """The seats that are taken: the method can give work to these."""
        return CapacityChanged(targets=_taken(self.targets), drafters=_taken(self.drafters))

    @property
    def sessions(self) -> list[Session]:
        """All sessions in use."""
        return [it for it in (*self.targets, *self.drafters) if it is not None]

    @property
    def is_idle(self) -> bool:
        """Whether this orchestrator uses the targets for nothing else."""
        return all(it.server.session_count == 1 for it in self.targets if it is not None)

    def fill(self) -> bool:
        """Put servers that are ready into empty seats; tell whether there were some."""
        return self._fill(self.targets, Role.TARGET) | self._fill(self.drafters, Role.DRAFTER)

    def vacate(self, session: Session, error: PacelineError) -> float | None:
        """Take a session out of its seat after a call of it failed.

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
        return pause

    def close(self) -> None:
        """End all sessions, behind the caller's back."""
        for session in self.sessions:
            session.close()
        self.targets = [None] * len(self.targets)
        self.drafters = [None] * len(self.drafters)

    def _fill(self, seats: list[Session | None], role: Role) -> bool:
        seated = {session.server for session in seats if session is not None}
        filled = False
        for server in self._candidates(role):
            if None not in seats:
                break
            is_barred = time.monotonic() < self._barred_until.get(server, 0.0)
            if server in seated or is_barred or server.facts is None:
                continue
            seats[seats.index(None)] = Session(
                server,
                self._make_spec(server.facts.fingerprint),
                keeper=self._keeper,
                deadline=self._deadline,
                note_repair=self._note_fallback,
            )
            filled = True
        return filled

    def _candidates(self, role: Role) -> list[ModelServer]:
        if role is Role.TARGET:
            return self._pool.targets(self._model)
        try:
            return self._pool.drafters(self._model)
        except TokenizerMismatchError:
            return []


def _taken(seats: list[Session | None]) -> tuple[int, ...]:
    return tuple(index for index, session in enumerate(seats) if session is not None)
