"""How a server's own health is followed, for as long as the server is listed.

A stream of health is renewed now and then, and with it what the server says of its model. Whatever
one server does, it ends neither the task that follows it nor the pool, whose tasks have one group;
and it is not asked again and again without a pause.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing
from typing import TYPE_CHECKING

from paceline.errors import DeadlineError, LoadingError, PacelineError
from paceline_orchestrator.fleet.bad_answers import BadAnswerError, demand
from paceline_orchestrator.fleet.health import health_changes, why_unreachable
from paceline_orchestrator.fleet.pauses import status_of
from paceline_orchestrator.fleet.server import LOADING, NOT_REACHED, NOT_SERVING
from paceline_orchestrator.fleet.wire import fetch_facts

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from paceline_orchestrator.fleet.pauses import Pauses
    from paceline_orchestrator.fleet.server import ModelServer

_log = logging.getLogger(__name__)

# The health stream is renewed so often, and with it what the server says of its model.
_WATCH_SECONDS = 60.0
_RECONNECT_SECONDS = 0.1
# That of a server which is not known to be well: where certificates were renewed since, the next
# stream connects with the new ones.
_APPROACH_SECONDS = 5.0
# One that ends its health stream as soon as that gets longer pauses each time, up to the next ones.
_HASTY_SECONDS = 1.0
# A server that says what it must not is asked again after so long. A health stream whose time is
# over too early counts as such an answer.
_BAD_ANSWER_SECONDS = 5.0
# However long a server says that it is to be left alone, it is asked after so long.
_LONGEST_RETRY_SECONDS = 10.0
# Health changes in a stream: each has the server asked what its model is.
_MOST_CHANGES = 100


class HealthWatch:
    """Keeps what servers say of themselves, by following their health.

    Args:
        pauses: Told of each server that can be reached again.
        tell: Told of each server that something has changed of.
    """

    def __init__(self, *, pauses: Pauses, tell: Callable[[ModelServer], None]) -> None:
        self._pauses = pauses
        self._tell = tell

    async def follow(
        self, server: ModelServer, *, has_failed: Callable[[], Awaitable[None]]
    ) -> None:
        """Follow a server's health for ever.

        Args:
            server: Whose.
            has_failed: Called whenever it cannot be followed; may cancel this task.
        """
        hasty_count = 0
        while True:
            begun = time.monotonic()
            status, pause_seconds = await self._follow_for_a_while(server)
            is_hasty = time.monotonic() - begun < _HASTY_SECONDS
            hasty_count = hasty_count + 1 if is_hasty else 0
            if status:
                server.health_status = status
                self._tell(server)
                await has_failed()
                own_seconds = _RECONNECT_SECONDS * 2.0 ** min(max(0, hasty_count - 1), 10)
                await asyncio.sleep(max(pause_seconds, min(own_seconds, _BAD_ANSWER_SECONDS)))

    async def _follow_for_a_while(self, server: ModelServer) -> tuple[str, float]:
        """Follow it while that can be done.

        Returns:
            Why it is out, and when to try again, at least. Empty if the time of its stream is over.
        """
        # One that says NOT_SERVING may have gone meanwhile.
        seconds = _APPROACH_SECONDS if server.health_status else _WATCH_SECONDS
        begun = time.monotonic()
        try:
            await self._follow_for(seconds, server)
        except DeadlineError as error:
            if time.monotonic() - begun >= seconds / 2:
                return "", 0.0
            return error.reason, _BAD_ANSWER_SECONDS
        except BadAnswerError as error:
            return status_of(error), _BAD_ANSWER_SECONDS
        except PacelineError as error:
            server.trouble = error.message
            told_seconds = min(error.retry_after_seconds or 0.0, _LONGEST_RETRY_SECONDS)
            return error.reason or NOT_REACHED, told_seconds
        except Exception as bug:  # noqa: BLE001 - one server must not end the watch of the others
            if type(bug) not in server.bugs:
                server.bugs.add(type(bug))
                _log.exception("%s could not be watched", server.name)
            return f"FAILED: {type(bug).__name__}", _BAD_ANSWER_SECONDS
        return NOT_REACHED, 0.0  # it ended the stream

    async def _follow_for(self, seconds: float, server: ModelServer) -> None:
        changes = health_changes(server.channel, seconds=seconds)
        change_count = 0
        try:
            async with aclosing(changes):
                async for is_serving in changes:
                    change_count += 1
                    demand(change_count <= _MOST_CHANGES, "health", "changes all the time")
                    await (self._take_serving(server) if is_serving else self._take_not(server))
        except DeadlineError:
            if not change_count and server.health_status == NOT_REACHED:
                server.trouble = await why_unreachable(server.channel)
                self._tell(server)
            raise

    async def _take_serving(self, server: ModelServer) -> None:
        if server.adopt(await fetch_facts(server.models)):
            server.bugs.clear()
        server.trouble = None
        if server.health_status:
            server.health_status = None
            self._pauses.after_reconnection(server)
        self._tell(server)

    async def _take_not(self, server: ModelServer) -> None:
        """Note that it says NOT_SERVING; and ask it why, after requests have been told.

        Until it has said why, one that served ends, and one that comes loads; what is known of it
        from an earlier stream stands.
        """
        if server.health_status != NOT_SERVING:
            server.trouble = LOADING if server.health_status else None
        server.health_status = NOT_SERVING
        self._tell(server)
        try:
            await fetch_facts(server.models)
            server.trouble = None
        except LoadingError:
            server.trouble = LOADING
        except PacelineError:
            return  # it has said already that it takes nothing
        self._tell(server)
