"""The life of a server process: listening, ready, draining, gone.

    start          ports are bound, health says NOT_SERVING, calls get LOADING     "listening"
    application    loads and warms up, then health says SERVING                    "ready"
    SIGTERM        health says NOT_SERVING first of all, and serving goes on
    drain delay    over: nothing new is accepted, running work may end             "draining"
    drain          over: calls are cut with DRAINING, sessions are gone, exit 0

Health also knows the name `liveness`: it is SERVING until SIGTERM, since a server that loads, or
waits for others, is alive.

The words on the right are announced on standard output (`process.announce`).
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Protocol

import grpc
from grpc_health.v1 import health, health_pb2_grpc

from paceline_serving import telemetry, tracing
from paceline_serving.health import Health
from paceline_serving.interceptors import EdgeInterceptor
from paceline_serving.metrics_endpoint import MetricsEndpoint
from paceline_serving.process import (
    announce,
    connection_limit,
    run_process,
    side_connection_limit,
)
from paceline_serving.security import AccessPolicy, server_credentials
from paceline_serving.sockets import claimed, why_not
from paceline_serving.transport import PROBE_SERVER_OPTIONS, connections_at_most

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from prometheus_client import CollectorRegistry

    from paceline_serving.keys import Keys
    from paceline_serving.server_settings import ServerSettings

_log = logging.getLogger(__name__)

_LIVENESS = "liveness"

# Time for answers that are being sent when the drain ends. Health watchers never end by themselves,
# so every stop with a watcher takes this long.
_STOP_GRACE_SECONDS = 0.25


class Application(Protocol):
    """The part of a server that differs between kinds of servers."""

    # gRPC server options, from `transport`.
    options: Sequence[tuple[str, int]]
    # Whether a piece of work is one call: then gRPC's own stop tells clients at once to connect to
    # another server (GOAWAY), and lets running calls end.
    work_is_one_call: bool

    def register(self, server: grpc.aio.Server) -> Sequence[str]:
        """Add the servicers; return the full names of their services."""

    async def start(self) -> None:
        """Load and warm up. Until it returns, servicers raise LoadingError."""

    def drain(self) -> None:
        """Refuse new work from now on."""

    async def settled(self) -> None:
        """Return when no work and no session is left."""

    def cut(self) -> None:
        """End the remaining work with DrainingError: the time to drain is over."""

    async def stop(self) -> None:
        """Free everything, after the handlers' `finally` blocks are done.

        gRPC's own stop returns before that.
        """

    def pages(self) -> Mapping[str, Callable[[], Any]]:
        """Return further JSON pages for the metrics port, by path."""


class ServerProcess:
    """A gRPC server with its health, metrics and interceptors, around an application: a `Process`.

    Usable without a process of its own: `begin`, then `finish`; `run` adds signals and exit codes.

    Args:
        application: Makes the application, which may call `stop_soon` and `set_serving` later.
        name: The server's name in traces.

    Raises:
        RuntimeError: Traces are wanted, and OpenTelemetry is not installed.

    Attributes:
        addresses: The bound addresses, by name.
        inspect: Looks at requests before they are parsed, if the application sets it.
        keys: The keys of allowed callers, if the application needs keys.
        edge: The guard around each call, from when the application is registered on.
    """

    def __init__(
        self,
        application: Callable[[ServerProcess], Application],
        settings: ServerSettings,
        *,
        registry: CollectorRegistry,
        name: str = "server",
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._spans = tracing.spans_to(settings.trace_endpoint, service=f"paceline-{name}")
        self._health = Health()
        self._services: Sequence[str] = ()
        self._servers: list[grpc.aio.Server] = []
        self._metrics: MetricsEndpoint | None = None
        self._end: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self.addresses: dict[str, str] = {}
        self.inspect: Callable[[bytes, str], None] | None = None
        self.keys: Keys | None = None
        self._application = application(self)
        telemetry.count_tasks(registry, asyncio.get_running_loop())

    async def begin(self) -> None:
        """Bind the ports, load the application, and set its health to SERVING.

        Raises:
            OSError: a port or a file cannot be used.
        """
        await self._listen()
        announce("listening", self.addresses)
        await self._application.start()
        await self.set_serving(True)
        announce("ready", self.addresses)

    async def set_serving(self, serving: bool) -> None:
        """Set whether health is SERVING; after a drain it stays NOT_SERVING."""
        for service in ("", *self._services):
            self._health.set(service, is_serving=serving)

    def stop_soon(self, failure: str | None = None) -> None:
        """Ask for the server's end; `failure` says why, if it cannot serve any more."""
        if not self._end.done():
            self._end.set_result(failure)

    async def stopping(self) -> str | None:
        """Wait until the end is asked for; return the failure, if it is one."""
        return await asyncio.shield(self._end)

    async def finish(self, *, drain: bool = True) -> None:
        """Drain, unless that is useless, and stop, in bounded time.

        NOT_SERVING comes first, so that balancers choose other servers while this one still serves.
        gRPC's own stop refuses new calls at once. If a piece of work is many calls of one session,
        sessions get their time before that stop. If it is one call, the time is the stop's grace:
        clients then connect to another server, instead of being refused during the whole drain.
        """
        self._health.end()
        if drain:
            await asyncio.sleep(self._settings.drain_delay_seconds)
        self._application.drain()
        announce("draining", self.addresses)
        main, *others = self._servers
        async with asyncio.TaskGroup() as stopping:
            if drain:
                if self._application.work_is_one_call:
                    grace_seconds = self._settings.drain_seconds + _STOP_GRACE_SECONDS
                    stopping.create_task(main.stop(grace_seconds), name="stop at leisure")
                await self._settle(self._settings.drain_seconds)
            await main.stop(_STOP_GRACE_SECONDS)  # the shorter grace counts
        await self._application.stop()
        for server in others:
            await server.stop(0)
        if self._metrics is not None:
            self._metrics.close()
        if self._spans is not None:
            await self._spans.close()

    async def _settle(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._application.settled()
        except TimeoutError:
            _log.warning("work is left after %g s of draining", seconds)
            self._application.cut()

    async def _listen(self) -> None:
        settings = self._settings
        roles = settings.role_of_peer
        if settings.tls_client_authority is not None and not roles:
            _log.warning(
                "every certificate of the client authority may call every service here;"
                " --peer-roles restricts that"
            )
        self.edge = EdgeInterceptor(
            telemetry.RpcMetrics(self._registry),
            access=AccessPolicy(roles) if roles else None,
            keys=self.keys,
            inspect=self.inspect,
            call_limit_seconds=settings.call_limit_seconds,
            spans=self._spans,
        )
        main = grpc.aio.server(
            interceptors=[self.edge],
            options=(*self._application.options, *connections_at_most(connection_limit())),
        )
        self._services = self._application.register(main)
        AccessPolicy.require_known(self._services)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, main)
        if settings.reflection:
            _add_reflection(main, self._services)
        await self.set_serving(False)
        self._health.set(_LIVENESS, is_serving=True)
        self._servers.append(main)
        credentials = server_credentials(settings.server_tls)
        self.addresses["address"] = bind(main, settings.listen, credentials=credentials)
        if settings.health_listen:
            # Plaintext, as probes need it: the port serves nothing but a status.
            probes = grpc.aio.server(
                options=(*PROBE_SERVER_OPTIONS, *connections_at_most(side_connection_limit()))
            )
            health_pb2_grpc.add_HealthServicer_to_server(self._health, probes)
            self._servers.append(probes)
            self.addresses["health_address"] = bind(
                probes, settings.health_listen, credentials=None
            )
        # Before any client connects, so that it gets the descriptors of its reserve.
        if settings.metrics_listen:
            self._metrics = MetricsEndpoint(
                settings.metrics_listen,
                registry=self._registry,
                pages=self._application.pages(),
            )
            self.addresses["metrics_address"] = self._metrics.address
        for server in self._servers:
            await server.start()


def run(
    application: Callable[[ServerProcess], Application],
    settings: ServerSettings,
    *,
    registry: CollectorRegistry,
    name: str,
) -> int:
    """Serve until a signal, under a name for traces; return the exit code.

    0 after a drain, 1 if the application failed to start or broke.
    """
    return run_process(
        lambda: ServerProcess(application, settings, registry=registry, name=name), settings
    )


def bind(
    server: grpc.aio.Server, address: str, *, credentials: grpc.ServerCredentials | None
) -> str:
    """Bind a port; return the address with the port that it got.

    Raises:
        OSError: The port cannot be bound; the text says why.
    """
    with claimed(address):
        try:
            port = (
                server.add_insecure_port(address)
                if credentials is None
                else server.add_secure_port(address, credentials)
            )
        except RuntimeError:
            port = 0
    if port == 0:
        cause = why_not(address)
        raise OSError(f"cannot listen on {address}" + (f": {cause}" if cause else ""))
    return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"


def _add_reflection(server: grpc.aio.Server, services: Sequence[str]) -> None:
    from grpc_reflection.v1alpha import reflection

    names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
