"""The log's line on each change of how a server stands."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline_orchestrator.fleet.server import NOT_REACHED

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paceline_orchestrator.fleet.server import ModelServer
    from paceline_orchestrator.fleet.words import Standing, Word

_log = logging.getLogger(__name__)

# Whether servers rest follows from requests, which wake nobody up.
_LOOK_SECONDS = 10.0
# Between two looks: where hundreds of servers come at once, each look is at all of them.
_PAUSE_SECONDS = 0.1
# Lines on one server: so many at once, and then one in so many seconds.
_MOST_LINES = 10
_LINE_SECONDS = 10.0


@dataclass(slots=True)
class _Told:
    """What was last said of a server, and how much more may be said of it."""

    word: Word | None = None
    lines_left: float = _MOST_LINES
    counted_at: float = 0.0


class StandingLog:
    """Logs how a server stands when its word changes, and not for each request or probe.

    A server that comes and goes all the time has ten lines, and then one in ten seconds at most.

    Args:
        standings: Tells how all servers stand.
        clock: In seconds.
    """

    def __init__(
        self,
        standings: Callable[[], Mapping[ModelServer, Standing]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._standings = standings
        self._clock = clock
        self._told: dict[ModelServer, _Told] = {}
        self._changed = asyncio.Event()

    def look_soon(self) -> None:
        """Have changes told that were made in this turn of the event loop."""
        self._changed.set()

    async def run(self) -> None:
        """Tell changes for ever. A bug in what is told ends neither this nor the requests."""
        is_told = False
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):
                    await self._changed.wait()
            self._changed.clear()
            try:
                self.look()
            except Exception:  # noqa: BLE001 - whatever it is, requests go on
                if not is_told:
                    _log.exception("how servers stand could not be told")
                is_told = True
            await asyncio.sleep(_PAUSE_SECONDS)

    def look(self) -> None:
        """Tell what has changed since the last look; forget servers that are gone."""
        standings = self._standings()
        for gone in self._told.keys() - standings.keys():
            if self._told.pop(gone).word is not None:
                _log.info("%s is not listed any more", gone.name)
        for server, standing in standings.items():
            told = self._told.setdefault(server, _Told(counted_at=self._clock()))
            is_untried = server.health_status == NOT_REACHED and not server.trouble
            if standing.word is told.word or (is_untried and told.word is None):
                continue
            if self._may_tell(told):
                told.word = standing.word
                level = logging.INFO if standing.word.is_passing else logging.WARNING
                _log.log(level, "%s %s", server.name, standing, extra={"standing": standing.word})

    def _may_tell(self, told: _Told) -> bool:
        now = self._clock()
        gained = (now - told.counted_at) / _LINE_SECONDS
        told.lines_left, told.counted_at = min(told.lines_left + gained, _MOST_LINES), now
        if told.lines_left < 1:
            return False
        told.lines_left -= 1
        return True
