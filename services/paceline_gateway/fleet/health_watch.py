"""Watches one orchestrator: whether it serves, and whether it accepts this gateway."""

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

# Pauses between connections to an address: each is longer, until an orchestrator serves.
_FIRST_REST_SECONDS, _LONGEST_REST_SECONDS = 0.2, 1.0
# A connection that takes longer is given up and tried again, since certificates may have been
# renewed.
_APPROACH_SECONDS = 10.0
# A corrected key is not announced, so a refused gateway asks again.
_KNOCK_AGAIN_SECONDS = 1.0


class Watch:
    """Tells the client whether to use an orchestrator, and logs once why not.

    Health needs no key. So an orchestrator is also asked a question that needs one: when it begins
    to serve, when it refused a request, and then until it accepts this gateway.

    Args:
        endpoint: The watched orchestrator; its `serves` is set here.
        connect: Opens a channel to the orchestrator.
        knock: Asks the orchestrator a question that needs a key or a certificate.
        changed: Called when `endpoint.serves` or `refusal` may have changed.

    Attributes:
        is_healthy: Whether its health is SERVING.
        refusal: The message by which it refuses this gateway's key or certificate, if it does.
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
        self._began_count = 0  # orchestrators that began to serve: each may be another process
        self._doubted = asyncio.Event()
        self.refusal: str | None = None

    async def follow(self) -> None:
        """Watch the orchestrator for ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_health(), name=f"health of {self._endpoint.address}")
            tasks.create_task(self._follow_door(), name=f"door of {self._endpoint.address}")

    def doubt(self) -> None:
        """Check again whether the orchestrator accepts this gateway: it refused a request."""
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
        """Follow the health of the reached orchestrator while it serves.

        A draining orchestrator can run for minutes, while a new connection to the same address, if
        it is a Service's, leads to another orchestrator.

        Raises:
            TimeoutError: No orchestrator is reached.
        """
        stream = HealthStub(channel).Watch(HealthCheckRequest(), wait_for_ready=True)
        async with asyncio.timeout(_APPROACH_SECONDS) as approach:
            async for state in stream:
                approach.reschedule(None)
                # grpc.aio hands over None for a message that cannot be decoded.
                if state is None or state.status != HealthCheckResponse.SERVING:
                    return
                self._hear(True)

    def _hear(self, is_healthy: bool) -> None:
        """Note the health; an orchestrator that begins to serve is asked about this gateway."""
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
                continue  # the answer is of the process before; the current one is asked next
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
            return None  # says nothing about the key; health decides
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
