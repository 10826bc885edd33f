"""One orchestrator, watched: whether it serves, and whether it lets this gateway in."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from paceline.errors import PacelineError, PermissionDeniedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from paceline.connection import AsyncConnection
    from paceline.endpoints import Endpoint

_log = logging.getLogger(__name__)

# How long to wait before an address is connected to again: each time longer, until one serves.
_FIRST_REST_SECONDS, _LONGEST_REST_SECONDS = 0.2, 1.0
# A connection that takes longer than an attempt is made again: with certificates that may have been
# renewed meanwhile.
_APPROACH_SECONDS = 10.0
# Nobody says that a key was mended: who is refused asks again.
_KNOCK_AGAIN_SECONDS = 1.0


class Watch:
    """Tells the client which orchestrator to ask, and says once why one is not.

    Health needs no key. So who serves is asked besides whether it lets this gateway in: when it
    begins to serve, when a request was refused, and then until it does.

    Args:
        endpoint: Who is watched; its `serves` is set here.
        connect: Opens a channel to it.
        knock: Asks it what only those are told whom it lets in.
        changed: Called when anything of this has changed.

    Attributes:
        is_healthy: Whether its health says that it serves.
        refusal: What it says to this gateway's key or certificate, while it refuses.
    """

    def __init__(
        self,
        endpoint: Endpoint[AsyncConnection],
        *,
        connect: Callable[[], grpc.aio.Channel],
        knock: Callable[[], Awaitable[object]],
        changed: Callable[[], None],
    ) -> None:
        self._endpoint = endpoint
        self._connect = connect
        self._knock = knock
        self._changed = changed
        self.is_healthy = False
        self._lets_in = False
        self._began_count = 0  # how often one has begun to serve: each may be another process
        self._doubted = asyncio.Event()
        self.refusal: str | None = None

    async def follow(self) -> None:
        """Watch it, for ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_health(), name=f"health of {self._endpoint.address}")
            tasks.create_task(self._follow_door(), name=f"door of {self._endpoint.address}")

    def doubt(self) -> None:
        """Ask again whether it lets this gateway in: a request says that it does not."""
        self._doubted.set()

    async def _follow_health(self) -> None:
        rest_seconds = _FIRST_REST_SECONDS
        while True:
            with suppress(grpc.RpcError, TimeoutError):
                async with self._connect() as channel:
                    await self._listen(channel)
            if self.is_healthy:
                rest_seconds = _FIRST_REST_SECONDS
            self._hear(False)
            await asyncio.sleep(rest_seconds)
            rest_seconds = min(2 * rest_seconds, _LONGEST_REST_SECONDS)

    async def _listen(self, channel: grpc.aio.Channel) -> None:
        """Take the word of the one that is reached, for as long as it serves.

        One that drains can go on for minutes, while a new connection to the same address leads to
        another one: an address can be a Service's.

        Raises:
            TimeoutError: None is reached.
        """
        stream = HealthStub(channel).Watch(HealthCheckRequest(), wait_for_ready=True)
        async with asyncio.timeout(_APPROACH_SECONDS) as approach:
            async for state in stream:
                approach.reschedule(None)
                if state.status != HealthCheckResponse.SERVING:
                    return
                self._hear(True)

    def _hear(self, is_healthy: bool) -> None:
        """Take its word; who begins to serve, perhaps after a restart, is asked about the door."""
        if is_healthy and not self.is_healthy:
            self._began_count += 1
            self._doubted.set()
        self.is_healthy = is_healthy
        self._lets_in &= is_healthy
        self._tell()

    async def _follow_door(self) -> None:
        while True:
            await self._doubted.wait()
            self._doubted.clear()
            asked_of = self._began_count
            refusal = await self._refusal_now()
            if asked_of != self._began_count:
                continue  # the answer is that of the one before, and who serves now is asked next
            if refusal is not None and refusal != self.refusal:
                _log.error(
                    "an orchestrator refuses this gateway's own key or certificate"
                    " (--orchestrator-key-file, --orchestrator-tls-certificate): %s",
                    refusal,
                    extra={"orchestrator": self._endpoint.address},
                )
            self.refusal = refusal
            self._lets_in = self.is_healthy and refusal is None
            self._tell()
            if refusal is not None:
                await asyncio.sleep(_KNOCK_AGAIN_SECONDS)
                self._doubted.set()

    async def _refusal_now(self) -> str | None:
        try:
            await self._knock()
        except PermissionDeniedError as error:
            return error.message
        except PacelineError:
            return None  # no word about the key; whether it serves its health says
        return None

    def _tell(self) -> None:
        serves = self.is_healthy and self._lets_in
        if serves != self._endpoint.serves:
            self._endpoint.serves = serves
            _log.info(
                "an orchestrator %s",
                "serves" if serves else "does not serve",
                extra={"orchestrator": self._endpoint.address},
            )
        self._changed()
