"""Servers that went away during a call, and what is remembered of the requests that lost them.

A request can end because all its targets are away, and its client resumes it a little later. An
orchestrator keeps nothing of a request, so what the request has lost would be forgotten, and a
request that ends targets could do so for ever. So what a request had lost when it ended is kept for
a while, under a key that is the same for all resumptions of the request. The key has the tenant in
it, and all that the request asks for. A client that changes the request to begin with a clean count
could as well send another one; it never adds to the count of others.

Each orchestrator remembers for itself: a request ends three targets at each of them at most.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline_orchestrator.fleet.server import ModelServer

# A broken connection is noticed at once. A server that is well after so long never had one.
_NOTICE_SECONDS = 1.0
# The largest models take minutes to load, and a third loss comes after two such restarts.
_KEPT_SECONDS = 3600.0
_MOST_REQUESTS = 1024


@dataclass(frozen=True, slots=True, eq=False)
class Loss:
    """A server that went away during a call: which process, when, and the call's reach.

    Attributes:
        asked_at: When the call was made, on the monotonic clock.
        reach: How long the request's text is with all tokens that the call was about.
    """

    server: ModelServer
    process_name: str
    asked_at: float
    noticed_at: float
    reach: int

    @property
    def is_certain(self) -> bool:
        """Whether another process is there now."""
        return self.server.process_name != self.process_name

    @property
    def is_refuted(self) -> bool:
        """Whether the same process is well, so that only a connection broke."""
        if self.is_certain or self.server.health_status is not None:
            return False
        was_away = self.server.ready_since > self.noticed_at
        return was_away or time.monotonic() - self.noticed_at > _NOTICE_SECONDS


class PastLosses:
    """What requests had lost when they ended; the oldest are forgotten first."""

    def __init__(self) -> None:
        self._losses: OrderedDict[str, list[Loss]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._losses)

    def take(self, request_key: str) -> list[Loss]:
        """Return what a request has lost before, the latest last: it is the request's again."""
        losses = self._losses.pop(request_key, [])
        is_recent = losses and time.monotonic() - losses[-1].noticed_at < _KEPT_SECONDS
        return losses if is_recent else []

    def leave(self, request_key: str, losses: Iterable[Loss]) -> None:
        """Keep what a request had lost when it ended.

        The same request may run several times at once, and all of them lose a server with it: that
        is one loss.
        """
        kept: list[Loss] = []
        known = self.take(request_key)
        for loss in sorted((*known, *losses), key=attrgetter("noticed_at")):
            if not kept or loss.asked_at >= kept[-1].noticed_at:
                kept.append(loss)
        if kept:
            self._losses[request_key] = kept
        if len(self._losses) > _MOST_REQUESTS:
            self._losses.popitem(last=False)
