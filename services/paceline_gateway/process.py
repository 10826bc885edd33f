"""A gateway's process: its HTTP server, its health, and its drain."""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import AsyncExitStack, contextmanager
from typing import TYPE_CHECKING, cast

import uvicorn

from paceline_gateway.application import application
from paceline_gateway.fleet.orchestrators import Orchestrators
from paceline_gateway.http.certificate import server_context
from paceline_gateway.http.strict_connection import HttpConnection
from paceline_gateway.metrics import GatewayMetrics
from paceline_gateway.readiness import Readiness
from paceline_gateway.templates.chat_template import ChatTemplates, look_at_template
from paceline_serving import telemetry, tracing
from paceline_serving.admission import Admission
from paceline_serving.keys import follow_key
from paceline_serving.listener import Listener
from paceline_serving.metrics_endpoint import MetricsEndpoint
from paceline_serving.process import announce, connection_limit
from paceline_serving.sockets import bound_address, listen

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import CollectorRegistry

    from paceline_gateway.settings import GatewaySettings
    from paceline_serving.listener import Place

_log = logging.getLogger(__name__)
# uvicorn logs its start and stop at "info", where our own records say the same.
logging.getLogger("uvicorn.error").setLevel(logging.WARNING)

# Time for answers that are being sent when the drain ends.
_STOP_GRACE_SECONDS = 2
_BACKLOG = 2048
# For probes, while all connections are busy.
_SPARE_CONNECTIONS = 16


class HttpProcess:
    """A gateway without a process of its own: `begin`, then `finish`.

    A `paceline_serving.process.Process`.

    Raises:
        RuntimeError: Traces are wanted, and OpenTelemetry is not installed.
        ValueError: A file of keys is unusable.

    Attributes:
        addresses: The bound addresses, by name.
        orchestrators: Get the requests.
        requests: Counts the running requests.
        readiness: Whether balancers should send requests here.
    """

    def __init__(self, settings: GatewaySettings, *, registry: CollectorRegistry) -> None:
        self._settings = settings
        self._registry = registry
        self._exit = AsyncExitStack()
        self._tasks = asyncio.TaskGroup()
        self._end: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self.addresses: dict[str, str] = {}
        key_file = settings.orchestrator_key_file
        self.orchestrators = Orchestrators(
            settings.orchestrators,
            tls=settings.orchestrator_tls,
            insecure=settings.insecure,
            token=follow_key(key_file) if key_file is not None else None,
            patience_seconds=settings.resume_seconds,
        )
        self._spans = tracing.spans_to(settings.trace_endpoint, service="paceline-gateway")
        self.requests = Admission("this gateway is shutting down")
        self.readiness = Readiness(self.orchestrators)
        self._templates = ChatTemplates()
        self._application = application(
            settings,
            orchestrators=self.orchestrators,
            templates=self._templates,
            requests=self.requests,
            readiness=self.readiness,
            metrics=GatewayMetrics(registry),
            spans=self._spans,
        )
        telemetry.count_tasks(registry, asyncio.get_running_loop())

    async def begin(self) -> None:
        """Bind the ports, and wait for the first orchestrator that serves.

        Until then requests are answered with 503.

        Raises:
            OSError: A port or a file cannot be used.
        """
        settings = self._settings
        listener = _bind(settings.listen, settings.slow_reader_seconds)
        self.addresses["address"] = bound_address(listener)
        self._server = _Server(self._configuration(), head_seconds=settings.slow_reader_seconds)
        await self._exit.enter_async_context(self.orchestrators)
        await self._exit.enter_async_context(self._tasks)
        self._serving = self._tasks.create_task(
            self._server.serve(sockets=[listener]), name="serve HTTP"
        )
        self._exit.push_async_callback(self._templates.close)
        self._tasks.create_task(self._templates.prepare(), name="start a template's process")
        if settings.metrics_listen:
            metrics = MetricsEndpoint(settings.metrics_listen, registry=self._registry, pages={})
            self._exit.callback(metrics.close)
            self.addresses["metrics_address"] = metrics.address
        if settings.drain_seconds < settings.call_limit_seconds:
            _log.warning(
                "a call may take %g s here (--call-limit-seconds), and is cut after %g s when this"
                " gateway stops (--drain-seconds)",
                settings.call_limit_seconds,
                settings.drain_seconds,
            )
        announce("listening", self.addresses)
        await self.orchestrators.until_one_serves()
        looking = self._tasks.create_task(
            look_at_template(orchestrators=self.orchestrators, templates=self._templates),
            name="look at the chat template",
        )
        self._exit.callback(looking.cancel)
        announce("ready", self.addresses)

    def _configuration(self) -> uvicorn.Config:
        """Set the server up.

        Raises:
            OSError: A file of TLS is unusable.
        """
        settings = self._settings
        configuration = uvicorn.Config(
            self._application,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=settings.keep_alive_seconds,
            timeout_graceful_shutdown=_STOP_GRACE_SECONDS,
        )
        configuration.load()
        if settings.tls_certificate is not None and settings.tls_key is not None:
            configuration.ssl = server_context(settings.tls_certificate, settings.tls_key)
        return configuration

    def stop_soon(self, failure: str | None = None) -> None:
        """Ask for the end."""
        if not self._end.done():
            self._end.set_result(failure)

    async def stopping(self) -> str | None:
        """Wait until the end is asked for; return the failure, if it is one."""
        return await asyncio.shield(self._end)

    async def finish(self, *, drain: bool = True) -> None:
        """Drain and stop, in bounded time: first readiness ends, while requests are served."""
        self.readiness.is_leaving = True
        if drain:
            await asyncio.sleep(self._settings.drain_delay_seconds)
        self.requests.close()
        announce("draining", self.addresses)
        if drain:
            try:
                async with asyncio.timeout(self._settings.drain_seconds):
                    await self.requests.idle()
            except TimeoutError:
                _log.warning("work is left after %g s of draining", self._settings.drain_seconds)
        self.requests.cut()
        self._server.should_exit = True
        await self._serving
        await self._exit.aclose()
        if self._spans is not None:
            await self._spans.close()


class _Server(uvicorn.Server):
    """uvicorn's server without its handling of signals and accepting.

    Args:
        head_seconds: Most seconds of a TLS handshake, and of a request's head.
    """

    def __init__(self, config: uvicorn.Config, *, head_seconds: float) -> None:
        super().__init__(config)
        self._head_seconds = head_seconds

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve on the given socket."""
        assert sockets is not None
        (listening,) = sockets
        await self.lifespan.startup()
        listener = Listener(
            listening,
            self._connection,
            limit=connection_limit(),
            reserve=_SPARE_CONNECTIONS,
            tls=self.config.ssl,
            handshake_seconds=self._head_seconds,
        )
        self.servers = [cast("asyncio.Server", listener)]  # closed like asyncio's servers
        self.started = True

    def _connection(self, place: Place) -> HttpConnection:
        """Make a connection with h11, so that no parser in C reads strangers' bytes."""
        return HttpConnection(
            place,
            head_seconds=self._head_seconds,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals."""
        yield


def _bind(address: str, stall_seconds: float) -> socket.socket:
    """Listen; the kernel ends a connection whose client takes nothing for so long.

    Raises:
        OSError: The address cannot be bound.
    """
    listener = listen(address, backlog=_BACKLOG)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        milliseconds = int(stall_seconds * 1000)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
    return listener
