"""Failures that do not say whose fault they are: the server's, or the request's.

A target that answers INTERNAL, or what it must not, may be broken. Or the request has a prompt for
which the model computes no numbers, at whichever target. If each target paused for that, one
request would take all targets away from everybody. So no server pauses before there is evidence:

- The server is asked for a token of another text (`Pauses.examine`). A server that gives none is
  broken: it pauses, and its failure does not count against the request.
- Other targets get past the place where a target failed. They could do the work, so that target
  pauses.
- Targets that compute tokens for others have failed the request three times, its text has not got
  past the places of these failures, and every target that can have it now or soon has failed it.
  Then the request is to blame, and ends. After sixteen such failures it ends in any case.

Meanwhile other servers work on the request. A server that failed it is asked again only if no other
server of its role works on it, and a target not after three failures. While a server is being
examined, it is not asked, unless it is too busy to answer within a second. A request can do without
drafters, so it never ends because a drafter fails. A drafter that has failed it twice is left
alone; one that fails a client's requests one after the other: see `fleet/failed_drafts.py`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import InternalError, InvariantViolatedError, NoTargetError, PacelineError
from paceline_orchestrator.fleet import shortage
from paceline_orchestrator.fleet.bad_answers import BadAnswerError
from paceline_orchestrator.fleet.discovery import Role

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Collection

    from paceline_orchestrator.fleet.pool import ServerPool
    from paceline_orchestrator.fleet.server import ModelServer

_LEAST_FAILURES_OF_TARGETS = 3
_MOST_FAILURES_OF_TARGETS = 16
_MOST_FAILURES_OF_A_DRAFTER = 2
# So long a request waits for a server's token before it asks that server again.
SOON_SECONDS = 1.0


def is_doubtful(error: PacelineError) -> bool:
    """Whether an error may as well be the request's fault as the server's."""
    return isinstance(error, InternalError | InvariantViolatedError | BadAnswerError)


@dataclass(frozen=True, slots=True, eq=False)
class _Doubt:
    """A failure: where, what with, when its call was made, how far that looked, and the probe."""

    server: ModelServer
    error: PacelineError
    asked_at: float
    reach: int
    examination: asyncio.Task[bool]
    noticed_at: float

    @property
    def words(self) -> str:
        """What its server said."""
        return f"{self.server.name} said {self.error.reason or 'BAD_ANSWER'}: {self.error.message}"

    @property
    def is_open(self) -> bool:
        """Whether its server is being asked, and may answer soon."""
        is_recent = time.monotonic() - self.noticed_at < SOON_SECONDS
        return is_recent and not self.examination.done()

    @property
    def is_well(self) -> bool:
        """Whether its server has computed a token for others since."""
        examination = self.examination
        return examination.done() and not examination.cancelled() and examination.result()


class Doubts:
    """The failures of one request of which it is not known yet who is to blame.

    Args:
        pool: Examines servers, and hears of those that are to blame.
    """

    def __init__(self, pool: ServerPool) -> None:
        self._pool = pool
        self._doubts: list[_Doubt] = []
        self._latest: _Doubt | None = None  # a target's; None if its last failure was another one

    def add(
        self, server: ModelServer, error: PacelineError, *, asked_at: float, reach: int
    ) -> None:
        """Take notice of a failure.

        Args:
            server: Where a call failed.
            error: What with.
            asked_at: When it was made, on the monotonic clock.
            reach: How long the request's text is with all tokens that it was about.
        """
        examination = self._pool.examine(server, error)
        doubt = _Doubt(server, error, asked_at, reach, examination, noticed_at=time.monotonic())
        self._doubts.append(doubt)
        if server.role is Role.TARGET:
            self._latest = doubt

    def note_other(self, server: ModelServer) -> None:
        """Take notice of a failure that is the server's fault."""
        if server.role is Role.TARGET:
            self._latest = None

    def allow(
        self, servers: list[ModelServer], *, role: Role, assigned: Collection[ModelServer]
    ) -> list[ModelServer]:
        """Return those that may be asked, the ones that never failed first.

        Args:
            servers: Servers of one role.
            role: That role.
            assigned: Those of that role that work on the request.
        """
        if not self._doubts:
            return servers
        if len(self._of(role)) >= _MOST_FAILURES_OF_TARGETS:
            return []
        fresh = [it for it in servers if not self.about(it)]
        if assigned:
            return fresh
        return fresh + [it for it in servers if it not in fresh and self._may_be_asked_again(it)]

    @property
    def has_any(self) -> bool:
        """Whether there are any."""
        return bool(self._doubts)

    def about(self, server: ModelServer) -> list[_Doubt]:
        """Return the failures of one server."""
        return [it for it in self._doubts if it.server is server]

    def verdict(self, targets: Collection[ModelServer]) -> InternalError | None:
        """Return what the request ends with, if it is to blame; None if that is not known.

        Args:
            targets: Those that work on it, or can have it now or soon.
        """
        counted = [it for it in self._of(Role.TARGET) if it.is_well]
        can_go_on = self._others_can_try(targets)
        most = _MOST_FAILURES_OF_TARGETS if can_go_on else _LEAST_FAILURES_OF_TARGETS
        if len(counted) < most:
            return None
        return InternalError(f"targets fail at this request: {counted[-1].words}")

    def shortage(self, targets: Collection[ModelServer]) -> PacelineError:
        """Return what the request ends with, if it has waited for a target for too long.

        Args:
            targets: Those that can have it, now or soon.
        """
        latest = self._latest
        if latest is not None and latest.is_well and not self._others_can_try(targets):
            return InternalError(f"targets fail at this request: {latest.words}")
        words = f": {latest.words}" if latest is not None else ""
        return NoTargetError(
            f"no target is left for this request{words}",
            retry_after_seconds=shortage.RETRY_SECONDS,
        )

    def note_final(self, length: int, *, targets: Collection[ModelServer]) -> None:
        """Blame the targets that failed where others did not.

        Args:
            length: How many tokens of the request's text are final by now.
            targets: Those at work on it. A target that is alone has got past the place of its
                failure itself.
        """
        passed = [it for it in self._of(Role.TARGET) if it.reach < length]
        if self._latest in passed:
            self._latest = None
        for doubt in passed:
            self._doubts.remove(doubt)
            if set(targets) != {doubt.server}:
                self._pool.report_failure(doubt.server, doubt.error, asked_at=doubt.asked_at)

    def _others_can_try(self, targets: Collection[ModelServer]) -> bool:
        return any(not self.about(it) for it in targets)

    def _of(self, role: Role) -> list[_Doubt]:
        return [it for it in self._doubts if it.server.role is role]

    def _may_be_asked_again(self, server: ModelServer) -> bool:
        doubts = self.about(server)
        if any(it.is_open for it in doubts):
            return False
        is_target = server.role is Role.TARGET
        most = _LEAST_FAILURES_OF_TARGETS if is_target else _MOST_FAILURES_OF_A_DRAFTER
        return sum(it.is_well for it in doubts) < most
