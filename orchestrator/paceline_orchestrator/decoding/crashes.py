"""Servers that end while they work on a request: whether the request is what ends them.

For some prompts a process has too little memory, or a kernel fails. Each target that is asked for
such a request ends, so the request must not go from one to the next. A connection that breaks says
less: servers are killed and moved, and networks fail. A loss counts only where all this holds:

- A call was on its way to an open session, and the server had not said that it is about to end.
- The call was made after the loss before it was noticed. Servers that vanish together are one loss.
- The process is gone: its server cannot be reached, or is another process now.
- No other target has got past the tokens that the call was about.

After three such losses of targets the request ends. After two of drafters it goes on without them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import InternalError
from paceline_orchestrator.fleet.discovery import Role
from paceline_orchestrator.fleet.server import NOT_REACHED, REMOVED

if TYPE_CHECKING:
    from paceline_orchestrator.fleet.server import ModelServer

_MOST = {Role.TARGET: 3, Role.DRAFTER: 2}


@dataclass(frozen=True, slots=True, eq=False)
class _Loss:
    """A connection that broke under a call: whose, to which process, when, and the call's reach."""

    server: ModelServer
    process_name: str
    noticed_at: float
    reach: int

    @property
    def is_crash(self) -> bool:
        """Whether the process is gone."""
        is_another = self.server.process_name != self.process_name
        return is_another or self.server.health_status in (NOT_REACHED, REMOVED)


class Crashes:
    """The servers that one request has lost under its calls, one after the other."""

    def __init__(self) -> None:
        self._losses: dict[Role, list[_Loss]] = {role: [] for role in _MOST}

    def add(self, server: ModelServer, *, asked_at: float, reach: int) -> None:
        """Take notice of a connection that broke under a call.

        Args:
            server: Where it led to.
            asked_at: When the call was made, on the monotonic clock.
            reach: How long the request's text is with all tokens that the call was about.
        """
        losses = self._losses[server.role]
        if server.leaving or (losses and asked_at < losses[-1].noticed_at):
            return
        process_name = server.process_name
        # A process that is lost again has outlived the first time.
        losses[:] = [it for it in losses if it.process_name != process_name]
        losses.append(_Loss(server, process_name, time.monotonic(), reach))

    def note_final(self, length: int) -> None:
        """Forget the targets that were lost at tokens which another one has computed.

        Args:
            length: How many tokens of the request's text are final by now.
        """
        losses = self._losses[Role.TARGET]
        losses[:] = [it for it in losses if it.reach >= length]

    @property
    def has_any(self) -> bool:
        """Whether a target was lost."""
        return bool(self._losses[Role.TARGET])

    @property
    def spares_drafters(self) -> bool:
        """Whether no drafter shall be asked any more."""
        return self._has_too_many(Role.DRAFTER)

    @property
    def verdict(self) -> InternalError | None:
        """What the request ends with, if it is what ends targets."""
        if not self._has_too_many(Role.TARGET):
            return None
        names = ", ".join(it.server.name for it in self._losses[Role.TARGET])
        return InternalError(f"targets ended, one after the other, at this request: {names}")

    def _has_too_many(self, role: Role) -> bool:
        # Of the newest loss the server's health may not have heard yet.
        losses = self._losses[role]
        return bool(losses) and sum(it.is_crash for it in losses[:-1]) + 1 >= _MOST[role]
