"""Health as grpc.health.v1 has it: whether a server serves, and told to all that watch it.

The library's own servicer writes to each watcher under a lock that all of them share. A client that
watches and reads nothing would hold it: no other watcher would hear anything, no status could be
set, and the server could not drain. The health port has no keys, so anybody could do that.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_State = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc] # it has no types
    """The statuses of services, by name; the empty name is the server itself.

    Invariants:
        A watcher is told of each status that lasts; no watcher waits for another one.
    """

    def __init__(self) -> None:
        self._statuses: dict[str, Any] = {}
        self._watchers: set[asyncio.Event] = set()
        self._is_ending = False

    def set(self, service: str, *, is_serving: bool) -> None:
        """Set a service's status; after `end` it stays NOT_SERVING."""
        is_serving = is_serving and not self._is_ending
        self._statuses[service] = _State.SERVING if is_serving else _State.NOT_SERVING
        for changed in self._watchers:
            changed.set()

    def end(self) -> None:
        """Set all services to NOT_SERVING, for good."""
        self._is_ending = True
        for service in self._statuses:
            self.set(service, is_serving=False)

    async def Check(  # noqa: N802 - gRPC's name
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> health_pb2.HealthCheckResponse:
        """Return a service's status now."""
        if request.service not in self._statuses:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return _State(status=self._statuses[request.service])

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, _context: Any
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Yield a service's status at once, and whenever it is another one."""
        changed, told = asyncio.Event(), None
        self._watchers.add(changed)
        try:
            while True:
                changed.clear()
                status = self._statuses.get(request.service, _State.SERVICE_UNKNOWN)
                if status != told:
                    yield _State(status=status)
                told = status
                await changed.wait()
        finally:
            self._watchers.discard(changed)
