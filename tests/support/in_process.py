"""A whole system in this process: real hosts, servicers, interceptors and gRPC, within reach."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline import AsyncClient
from paceline_engine.sessions.host import HostLimits, ModelHost
from paceline_engine.torch_backend.transformers import TransformersBackend
from paceline_orchestrator.settings import OrchestratorSettings
from support.model_servers import DRAFTER, TARGET, serving
from support.orchestrating import orchestrator
from support.ports import free_address
from support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from paceline_orchestrator.application import OrchestratorApplication
    from paceline_orchestrator.fleet.server import ModelServer
    from support.tiny_models import TinyPair


@dataclass
class InProcessSystem:
    drafters: Sequence[ModelHost]
    targets: Sequence[ModelHost]
    client: AsyncClient
    application: OrchestratorApplication
    address: str

    @property
    def hosts(self) -> list[ModelHost]:
        return [*self.drafters, *self.targets]

    def server(self, name: str) -> ModelServer:
        """Return what the orchestrator knows of a server, such as "target-0"."""
        return next(it for it in self.application.pool.servers if it.name == name)

    async def settled(self) -> None:
        """Return once nothing of any request is left at the model servers."""
        for host in self.hosts:
            await until(lambda host=host: _is_idle(host), what="sessions, calls and queue are gone")


@asynccontextmanager
async def in_process_system(
    *, drafters: Sequence[ModelHost], targets: Sequence[ModelHost]
) -> AsyncIterator[InProcessSystem]:
    async with AsyncExitStack() as stack:

        async def start(role: Any, hosts: Sequence[ModelHost]) -> tuple[str, ...]:
            processes = [await stack.enter_async_context(serving(role, host)) for host in hosts]
            return tuple(
                f"{role.name}-{index}={process.addresses['address']}"
                for index, process in enumerate(processes)
            )

        settings = OrchestratorSettings(
            listen=free_address(),
            health_listen="",
            drafters=await start(DRAFTER, drafters),
            targets=await start(TARGET, targets),
        )
        process, application = await stack.enter_async_context(orchestrator(settings))
        address = process.addresses["address"]
        client = await stack.enter_async_context(AsyncClient(address))
        system = InProcessSystem(drafters, targets, client, application, address)
        await until_ready(system)
        yield system


@asynccontextmanager
async def system_of_pair(pair: TinyPair) -> AsyncIterator[InProcessSystem]:
    """Serve a tiny drafter, and its target twice."""

    def host(folder: Path) -> ModelHost:
        limits = HostLimits(warm_up_rounds=0)
        return ModelHost(lambda: TransformersBackend(str(folder)), limits=limits)

    drafters, targets = [host(pair.drafter)], [host(pair.target), host(pair.target)]
    async with in_process_system(drafters=drafters, targets=targets) as system:
        yield system


async def until_ready(system: InProcessSystem) -> None:
    """Wait until the orchestrator uses every server."""
    servers = (await system.client.info()).servers
    while not all(server.ready for server in servers):
        servers = (await system.client.info()).servers


def _is_idle(host: ModelHost) -> bool:
    now = host.statistics()
    return not (now.sessions_open or now.calls_live or now.queue_length or now.tokens_reserved)
