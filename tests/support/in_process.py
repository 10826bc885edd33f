"""A whole system in this process: real hosts, servicers, interceptors and gRPC, within reach."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

from paceline import AsyncClient
from paceline_orchestrator.application import OrchestratorApplication
from paceline_orchestrator.settings import OrchestratorSettings
from paceline_serving.lifecycle import ServerProcess
from support.model_servers import DRAFTER, TARGET, serving
from support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from paceline_engine.host import ModelHost

__all__ = ["InProcessSystem", "in_process_system"]


@dataclass
class InProcessSystem:
    drafters: Sequence[ModelHost]
    targets: Sequence[ModelHost]
    client: AsyncClient

    @property
    def hosts(self) -> list[ModelHost]:
        return [*self.drafters, *self.targets]

    async def settled(self) -> None:
        """Return once nothing of any request is left at the model servers."""
        for host in self.hosts:
            await until(lambda host=host: _is_idle(host), what="sessions, calls and queue are gone")


@asynccontextmanager
async def in_process_system(
    *, drafters: Sequence[ModelHost], targets: Sequence[ModelHost]
) -> AsyncIterator[InProcessSystem]:
    async with AsyncExitStack() as stack:

        async def start(role: Any, host: ModelHost) -> str:
            process = await stack.enter_async_context(serving(role, host))
            return process.addresses["address"]

        settings = OrchestratorSettings(
            listen="127.0.0.1:0",
            health_listen="",
            drafters=tuple([await start(DRAFTER, host) for host in drafters]),
            targets=tuple([await start(TARGET, host) for host in targets]),
        )
        registry = CollectorRegistry()
        orchestrator = ServerProcess(
            lambda process: OrchestratorApplication(settings, process=process, registry=registry),
            settings,
            registry=registry,
        )
        await orchestrator.begin()
        stack.push_async_callback(orchestrator.finish)
        client = await stack.enter_async_context(AsyncClient(orchestrator.addresses["address"]))
        system = InProcessSystem(drafters, targets, client)
        await until_ready(system)
        yield system


async def until_ready(system: InProcessSystem) -> None:
    """Wait until the orchestrator uses every server."""
    servers = (await system.client.info()).servers
    while not all(server.ready for server in servers):
        servers = (await system.client.info()).servers


def _is_idle(host: ModelHost) -> bool:
    now = host.statistics()
    return not (now.sessions_open or now.calls_live or now.queue_length or now.tokens_reserved)
