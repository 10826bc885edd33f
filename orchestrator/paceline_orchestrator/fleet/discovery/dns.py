"""Pods behind headless Services, from the addresses that DNS gives: where no API may be asked.

gRPC's own resolver would do it, but does not look again while its connections hold, so that new
pods are never used. DNS knows neither pods nor their state: a pod that is terminating is simply
left out. So an address that is gone is taken as terminating for a while, and health tells the rest.
When all addresses of a role are gone at once, it may well be the nodes' state that was lost, or the
record: then they are not ready, which is no decision that they shall end.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from paceline_orchestrator.fleet.discovery.endpoints import Availability, Endpoint
from paceline_orchestrator.fleet.discovery.services import DEFAULT_PORT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from paceline_orchestrator.fleet.discovery.metrics import WatchMetrics
    from paceline_orchestrator.fleet.discovery.services import Service

_log = logging.getLogger(__name__)

_PERIOD_SECONDS = 2.0
# After so long others are told of, and the name is waited for in the next rounds.
_PATIENCE_SECONDS = 1.0
# As long as a pod may take to end, in most clusters, and some more.
_LINGER_SECONDS = 60.0
# A headless Service without a ready pod has no record.
_NO_RECORD = frozenset({socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)})


async def resolve(name: str) -> frozenset[str]:
    """Look up the IPv4 addresses of a name, or the IPv6 ones if it has no others.

    On a thread of its own that nothing waits for: a lookup cannot be given up, and may take as long
    as all name servers together are waited for.

    Raises:
        OSError: Nobody could tell.
    """
    loop = asyncio.get_running_loop()
    found: asyncio.Future[frozenset[str]] = loop.create_future()

    def settle(addresses: frozenset[str], error: OSError | None) -> None:
        if not found.done():
            found.set_exception(error) if error else found.set_result(addresses)

    def look_up() -> None:
        addresses, failure = frozenset[str](), None
        try:
            addresses = _look_up(name)
        except OSError as error:
            failure = error
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, addresses, failure)

    threading.Thread(target=look_up, name=f"resolve {name}", daemon=True).start()
    return await found


class DnsDiscovery:
    """Looks up some Services again and again.

    Args:
        services: The headless Services to look up.
        metrics: Told of what happens.
        look_up: Returns a name's addresses.
        sleep: Waits for the next time.
        clock: Tells seconds.
    """

    def __init__(
        self,
        services: Sequence[Service],
        *,
        metrics: WatchMetrics,
        look_up: Callable[[str], Awaitable[frozenset[str]]] = resolve,
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._services = services
        self._metrics = metrics
        self._look_up = look_up
        self._sleep = sleep
        self._clock = clock
        self._present: dict[Service, frozenset[str]] = dict.fromkeys(services, frozenset())
        self._gone_at: dict[tuple[Service, str], float] = {}
        self._complaints: dict[Service, str] = {}

    async def endpoints(self) -> AsyncIterator[frozenset[Endpoint]]:
        """Yield the addresses; see Discovery. A name that takes long holds up no other."""
        last: frozenset[Endpoint] | None = None
        under_way: dict[Service, asyncio.Task[None]] = {}
        try:
            while True:
                for service in self._services:
                    if service not in under_way:
                        under_way[service] = asyncio.create_task(
                            self._update(service), name=f"look up {service.name}"
                        )
                await asyncio.wait(under_way.values(), timeout=_PATIENCE_SECONDS)
                for service in [each for each, task in under_way.items() if task.done()]:
                    under_way.pop(service).result()
                found = self._known()
                if found != last:
                    last = found
                    yield found
                await self._sleep(_PERIOD_SECONDS)
        finally:
            for task in under_way.values():
                task.cancel()

    async def _update(self, service: Service) -> None:
        """Look a Service up; if that fails, what was found last stands."""
        try:
            addresses = await self._look_up(service.name)
        except OSError as error:
            self._metrics.failed("dns")
            self._complain(service, f"cannot look up {service.name}: {error}")
            return
        self._metrics.heard()
        what = "it does not exist, or no pod behind it is ready"
        self._complain(service, "" if addresses else f"{service.name} has no address: {what}")
        for address in self._present[service] - addresses:
            self._gone_at[service, address] = self._clock()
        for address in addresses:
            self._gone_at.pop((service, address), None)
        self._present[service] = addresses

    def _complain(self, service: Service, words: str) -> None:
        """Log what is wrong with a Service, once for as long as it is that; empty: nothing is."""
        if words and words != self._complaints.get(service):
            _log.warning("%s", words)
        self._complaints[service] = words

    def _known(self) -> frozenset[Endpoint]:
        over = self._clock() - _LINGER_SECONDS
        self._gone_at = {gone: at for gone, at in self._gone_at.items() if at > over}
        present = (
            _endpoint(service, address, Availability.READY)
            for service, addresses in self._present.items()
            for address in addresses
        )
        in_sight = {service.role for service, addresses in self._present.items() if addresses}
        gone = (
            _endpoint(
                service,
                address,
                Availability.TERMINATING if service.role in in_sight else Availability.NOT_READY,
            )
            for service, address in self._gone_at
        )
        return frozenset((*present, *gone))


def _endpoint(service: Service, ip: str, availability: Availability) -> Endpoint:
    port = service.port or DEFAULT_PORT
    return Endpoint(
        name=f"{service.role}-{ip}",
        address=f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}",
        role=service.role,
        tls_name=service.name,
        availability=availability,
    )


def _look_up(name: str) -> frozenset[str]:
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in _NO_RECORD:
            return frozenset()
        raise
    by_family: dict[int, set[str]] = {}
    for family, _, _, _, address in answers:
        by_family.setdefault(family, set()).add(str(address[0]))
    return frozenset(by_family.get(socket.AF_INET) or by_family.get(socket.AF_INET6) or ())
