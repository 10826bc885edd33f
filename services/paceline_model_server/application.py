"""A drafter or a target as a server process: one model behind gRPC."""

from __future__ import annotations

import asyncio
import logging
import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.v1 import (
    model_service_pb2,
    model_service_pb2_grpc,
    session_service_pb2_grpc,
)
from paceline_model_server.large_requests import check_large_request
from paceline_model_server.loading import new_host
from paceline_model_server.node_part import compute_part
from paceline_model_server.records import CallRecorder, HostCollector
from paceline_model_server.servicers import ModelServicer, SessionServicer
from paceline_model_server.settings import ModelServerSettings
from paceline_serving import exchanged_calls, lifecycle, telemetry, transport
from paceline_serving.command_line import parse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import grpc
    from prometheus_client import CollectorRegistry

    from paceline_engine.sessions.host import ModelHost
    from paceline_serving.lifecycle import ServerProcess

_log = logging.getLogger(__name__)

# The model's thread releases the interpreter's lock in each of its small steps, and has to get it
# back from the event loop. With Python's 5 ms, forwards beside calls took a quarter longer
# (bench/LOG.md).
_SWITCH_SECONDS = 1e-4


@dataclass(frozen=True, slots=True)
class ModelRole:
    """The differences between a drafter and a target.

    Attributes:
        name: "drafter" or "target".
        wire: The role's value in messages.
        service: Full name of the service that only this role has.
        servicer: Makes the servicer of this service.
        add_servicer: Adds the servicer to a server; generated.
    """

    name: str
    wire: model_service_pb2.ModelRole.ValueType
    service: str
    servicer: Callable[[ModelHost, CallRecorder], object]
    add_servicer: Callable[[Any, grpc.aio.Server], None]


class ModelApplication:
    """Serves one host in one role.

    Args:
        role: Drafter or target.
        process: The server process. Its health follows the model, and its requests are inspected.
        hang_limit_seconds: How long a forward may hang before the process ends; None: for ever.
        debug_calls: Whether to show the last calls on the metrics port.
        look_seconds: The time between two checks whether the model hangs.
    """

    options: Sequence[tuple[str, int]] = transport.POD_SERVER_OPTIONS
    work_is_one_call = False

    def __init__(
        self,
        role: ModelRole,
        host: ModelHost,
        *,
        process: ServerProcess,
        registry: CollectorRegistry,
        hang_limit_seconds: float | None,
        debug_calls: bool = False,
        look_seconds: float = 1.0,
    ) -> None:
        self._role = role
        self._host = host
        self._recorder = CallRecorder(registry, role=role.name, keep=debug_calls)
        self._sessions = SessionServicer(host)
        self._process = process
        process.inspect = self._inspect
        self._hang_limit_seconds = hang_limit_seconds
        self._debug_calls = debug_calls
        self._look_seconds = look_seconds
        self._tasks = asyncio.TaskGroup()
        self._watching: asyncio.Task[None] | None = None
        registry.register(HostCollector(host, role=role.name))

    def register(self, server: grpc.aio.Server) -> Sequence[str]:
        """Add the services of every model server, and the role's."""
        model_servicer = ModelServicer(self._host, role=self._role.wire)
        model_service_pb2_grpc.add_ModelServiceServicer_to_server(model_servicer, server)
        session_service_pb2_grpc.add_SessionServiceServicer_to_server(self._sessions, server)
        add_servicer = partial(
            self._role.add_servicer, self._role.servicer(self._host, self._recorder)
        )
        add_servicer(server)
        exchanged_calls.add_call_service(server, add_servicer, edge=self._process.edge)
        return (
            "paceline.v1.ModelService",
            "paceline.v1.SessionService",
            self._role.service,
            exchanged_calls.SERVICE,
        )

    async def start(self) -> None:
        """Load the model and warm it up."""
        await self._host.start()
        await self._tasks.__aenter__()
        self._watching = self._tasks.create_task(self._watch(), name="watch the model")

    def drain(self) -> None:
        """Refuse new sessions; open ones end by themselves."""
        self._sessions.draining = True

    async def settled(self) -> None:
        """Wait until every session is closed or its lease is over."""
        await self._host.settled()

    def cut(self) -> None:
        """End the sessions that are left, and their calls."""
        self._host.end_sessions()

    async def stop(self) -> None:
        """Stop the model's thread and free its memory."""
        if self._watching is not None:
            self._watching.cancel()
            await self._tasks.__aexit__(None, None, None)
        await self._host.stop()

    def _inspect(self, raw: bytes, caller: str) -> None:
        check_large_request(raw, host=self._host, caller=caller)

    async def _watch(self) -> None:
        """Report bad health while a forward hangs, and end the process if it hangs too long.

        No other code would notice, because the event loop goes on. Two checks in a row see the same
        forward, because a new one has a patience of some seconds.
        """
        noticed_seconds: float | None = None  # how long the forward had taken when it was noticed
        while True:
            await asyncio.sleep(self._look_seconds)
            overdue_seconds = self._host.overdue_seconds()
            if not overdue_seconds and noticed_seconds is not None:
                _log.warning("the model answers again")
                await self._process.set_serving(True)
                noticed_seconds = None
            elif overdue_seconds and noticed_seconds is None:
                _log.error("a forward has taken %.0f s: the model hangs", overdue_seconds)
                await self._process.set_serving(False)
                noticed_seconds = overdue_seconds
            elif noticed_seconds is not None and self._hangs_too_long(
                overdue_seconds - noticed_seconds
            ):
                # A thread cannot be ended, so only a new process can use the device again.
                hung_seconds = overdue_seconds - noticed_seconds
                self._process.stop_soon(f"a forward has hung for {hung_seconds:.0f} s")
                return

    def _hangs_too_long(self, hung_seconds: float) -> bool:
        limit = self._hang_limit_seconds
        return limit is not None and hung_seconds >= limit

    def pages(self) -> Mapping[str, Callable[[], Any]]:
        """Show the last calls, if `debug_calls` is set."""
        return {"/debug/calls": self._recorder.recent} if self._debug_calls else {}


def serve(role: ModelRole, arguments: Sequence[str], *, program: str) -> int:
    """Parse settings, serve until a signal, and return the exit code.

    A node that helps another one with its model computes its part instead.
    """
    settings = parse(ModelServerSettings, arguments, program=program)
    if settings.is_node_part:
        return compute_part(settings)
    sys.setswitchinterval(_SWITCH_SECONDS)
    registry = telemetry.new_registry()

    def application(process: ServerProcess) -> ModelApplication:
        host = new_host(settings, role=role.name, on_failure=process.stop_soon)
        return ModelApplication(
            role,
            host,
            process=process,
            registry=registry,
            hang_limit_seconds=settings.hang_limit_seconds or None,
            debug_calls=settings.debug_calls,
        )

    return lifecycle.run(application, settings, registry=registry, name=role.name)
