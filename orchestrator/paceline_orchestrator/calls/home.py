"""Where a request is at home: at the target in the first of its seats that is taken.

At its other targets it is a guest: where another request is at home it begins nothing. So
speculation that runs ahead uses targets that would idle, and every request has the target that
plain decoding would have. As requests come and go, DSI shrinks and grows with the targets that are
nobody's home.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline_orchestrator.calls.seats import Seats
    from paceline_orchestrator.fleet.pool import ServerPool
    from paceline_orchestrator.fleet.server import ModelServer

__all__ = ["Home"]


class Home:
    """A request's home, which moves when its seats change hands.

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
