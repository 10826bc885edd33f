"""A drafter or a target as a server process: one model behind gRPC."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.v1 import model_service_pb2, model_service_pb2_grpc
from paceline_model_server.loading import new_host
from paceline_model_server.records import CallRecorder, HostCollector
from paceline_model_server.servicers import ModelServicer, SessionServicer
from paceline_serving import lifecycle, telemetry, transport
from paceline_serving.command_line import parse
from paceline_serving.model_settings import ModelServerSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import grpc
    from prometheus_client import CollectorRegistry

    from paceline_model_server.host import Host
    from paceline_serving.lifecycle import ServerProcess

__all__ = ["ModelApplication", "ModelRole", "serve"]


@dataclass(frozen=True, slots=True)
class ModelRole:
    """What makes a model server a drafter or a target.

    Attributes:
        name: "drafter" or "target".
        wire: The same on the wire.
        service: Full name of its service.
        servicer: Makes its servicer.
        add_servicer: Adds that to a server; generated.
    """

    name: str
    wire: model_service_pb2.ModelRole.ValueType
    service: str
    servicer: Callable[[Host, CallRecorder], SessionServicer]
    add_servicer: Callable[[Any, grpc.aio.Server], None]


class ModelApplication:
    """Serves one host in one role.

    Args:
        role: Drafter or target.
        host: The model.
        registry: Where metrics are kept.
        debug_calls: Whether to show the last calls on the metrics port.
    """

    options: Sequence[tuple[str, int]] = transport.POD_SERVER_OPTIONS

    def __init__(
        self, role: ModelRole, host: Host, *, registry: CollectorRegistry, debug_calls: bool = False
    ) -> None:
        self._role = role
        self._host = host
        self._recorder = CallRecorder(registry, role=role.name, keep=debug_calls)
        self._servicer = role.servicer(host, self._recorder)
        self._debug_calls = debug_calls
        registry.register(HostCollector(host, role=role.name))

    def register(self, server: grpc.aio.Server) -> Sequence[str]:
        """Add the model's service and the role's."""
        model_servicer = ModelServicer(self._host, role=self._role.wire)
        model_service_pb2_grpc.add_ModelServiceServicer_to_server(model_servicer, server)
        self._role.add_servicer(self._servicer, server)
        return ("paceline.v1.ModelService", self._role.service)

    async def start(self) -> None:
        """Load the model and warm it up."""
        await self._host.start()

    def drain(self) -> None:
        """Refuse new sessions; open ones end by themselves."""
        self._servicer.draining = True

    async def settled(self) -> None:
        """Return once every session is closed or its lease is over."""
        await self._host.settled()

    async def stop(self) -> None:
        """Stop the model's thread and free its memory."""
        await self._host.stop()

    def pages(self) -> Mapping[str, Callable[[], Any]]:
        """Show the last calls, where that was asked for."""
        return {"/debug/calls": self._recorder.recent} if self._debug_calls else {}


def serve(role: ModelRole, arguments: Sequence[str], *, program: str) -> int:
    """Parse settings, serve until a signal, and return the exit code."""
    settings = parse(ModelServerSettings, arguments, program=program)
    registry = telemetry.new_registry()

    def application(process: ServerProcess) -> ModelApplication:
        host = new_host(settings, role=role.name, on_failure=process.stop_soon)
        return ModelApplication(role, host, registry=registry, debug_calls=settings.debug_calls)

    return lifecycle.run(application, settings, registry=registry)
