"""Servers that end while they work on a request: whether the request is what ends them.

For some prompts a process has too little memory, a kernel fails, or the device is lost. Each target
that is asked ends, so such a request must not go from one to the next. A connection that breaks
says less: servers are killed and moved, and networks fail. A loss counts only while all this holds:

- A call was on its way to an open session, and the server had not said before that it leaves.
- The call was made after the loss before it was noticed. Servers that vanish together are one loss.
- The same process has not come back.
- The text has not got past the tokens that the call was about.

After one loss of a target the request has one target at a time. After two that target is kept apart
from other requests that have lost two: the request that is to blame is alone with its third one.
After three it gets no target. It ends as soon as three processes are known to be gone, or when it
has waited for as long as for any target. After two losses of drafters it goes on without them.

What a request lost before it was resumed counts as well; see `fleet/losses.py`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from paceline.errors import InternalError
from paceline_orchestrator.fleet.discovery import Role
from paceline_orchestrator.fleet.losses import Loss

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from paceline_orchestrator.fleet.losses import PastLosses
    from paceline_orchestrator.fleet.quarantine import Quarantine
    from paceline_orchestrator.fleet.server import ModelServer

_MOST = {Role.TARGET: 3, Role.DRAFTER: 2}
_LOSSES_APART = 2


class Crashes:
    """The servers that one request has lost under its calls, one after the other.

    `close` it in the end: what it has lost counts if the request is resumed.

    Args:
        quarantine: Shared by all requests.
        past: What requests lost before they were resumed.
        request_key: Returns what names this request among them.
    """

    def __init__(
        self, quarantine: Quarantine, *, past: PastLosses, request_key: Callable[[], str]
    ) -> None:
        self._quarantine = quarantine
        self._past = past
        self._request_key = request_key
        self._losses: dict[Role, list[Loss]] = {role: [] for role in _MOST}
        if past:
            self._losses[Role.TARGET] = past.take(request_key())

    def add(self, server: ModelServer, *, asked_at: float, reach: int) -> None:
        """Take notice of a server that went away during a call.

        Args:
            server: Which one.
            asked_at: When the call was made, on the monotonic clock.
            reach: How long the request's text is with all tokens that the call was about.
        """
        losses = self._counted(server.role)
        if losses and asked_at < losses[-1].noticed_at:
            return
        losses.append(
            Loss(
                server,
                server.process_name,
                asked_at=asked_at,
                noticed_at=time.monotonic(),
                reach=reach,
            )
        )

    def allow(
        self, servers: list[ModelServer], *, role: Role, assigned: Collection[ModelServer]
    ) -> list[ModelServer]:
        """Return those that may be asked.

        Args:
            servers: Servers of one role, the best first.
            role: That role.
            assigned: Those of that role that work on the request.
        """
        count = len(self._counted(role))
        if not count:
            return servers
        if count >= _MOST[role]:
            return []
        if role is Role.DRAFTER:
            return servers
        if assigned:
            return []
        if count >= _LOSSES_APART:
            servers = [it for it in servers if self._quarantine.is_free(it, self)]
        return servers[:1]

    def note_opening(self, server: ModelServer) -> None:
        """Keep a target apart whose session is being opened, if the request is suspected."""
        if server.role is Role.TARGET and len(self._counted(Role.TARGET)) >= _LOSSES_APART:
            self._quarantine.take(server, self)

    def close(self) -> None:
        """Let others have the target that was kept apart, and keep the losses of targets."""
        self._quarantine.release(self)
        if losses := self._counted(Role.TARGET):
            self._past.leave(self._request_key(), losses)
            losses.clear()

    def note_final(self, length: int) -> bool:
        """Forget the targets that were lost at tokens which are final by now.

        Args:
            length: How many tokens of the request's text are final.

        Returns:
            Whether that clears the request, so that it may have several targets again.
        """
        losses = self._losses[Role.TARGET]
        if not losses:
            return False
        losses[:] = [it for it in losses if it.reach >= length]
        if losses:
            return False
        self._quarantine.release(self)
        return True

    @property
    def verdict(self) -> InternalError | None:
        """What the request ends with at once, if it is known to end targets."""
        is_known = sum(it.is_certain for it in self._losses[Role.TARGET]) >= _MOST[Role.TARGET]
        return self._error if is_known else None

    @property
    def shortage(self) -> InternalError | None:
        """What the request ends with after it has waited for a target, if it may have none."""
        return self._error if len(self._counted(Role.TARGET)) >= _MOST[Role.TARGET] else None

    @property
    def _error(self) -> InternalError:
        names = ", ".join(it.server.name for it in self._losses[Role.TARGET])
        return InternalError(f"targets ended, one after the other, at this request: {names}")

    def _counted(self, role: Role) -> list[Loss]:
        losses = self._losses[role]
        if losses:
            losses[:] = [it for it in losses if not it.is_refuted]
        return losses
