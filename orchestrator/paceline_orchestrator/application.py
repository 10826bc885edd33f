"""The orchestrator as a process: its pool, its servicer, and when it is ready."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from paceline.errors import NoTargetError, PacelineError
from paceline.v1.orchestrator_service_pb2_grpc import add_OrchestratorServiceServicer_to_server
from paceline_orchestrator.discovery import StaticDiscovery
from paceline_orchestrator.keeper import SessionKeeper
from paceline_orchestrator.metrics import RequestMetrics
from paceline_orchestrator.planning import Planning
from paceline_orchestrator.pool import ServerPool
from paceline_orchestrator.servicer import OrchestratorServicer
from paceline_orchestrator.tokenizer import Codecs
from paceline_serving.security import channel_credentials
from paceline_serving.transport import CLIENT_SERVER_OPTIONS, pod_channel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import grpc
    from prometheus_client import CollectorRegistry

    from paceline_orchestrator.discovery import Discovery, Endpoint
    from paceline_orchestrator.settings import OrchestratorSettings
    from paceline_serving.lifecycle import ServerProcess

__all__ = ["OrchestratorApplication"]

_log = logging.getLogger(__name__)

_RETRY_SECONDS = 0.5


class OrchestratorApplication:
    """Serves OrchestratorService; see lifecycle.Application.

    Args:
        settings: The operator's.
        process: Told whether there is a target.
        registry: Where metrics are kept.
        discovery: Where model servers are; None is the settings' list.
    """

    options: Sequence[tuple[str, int]] = CLIENT_SERVER_OPTIONS

    def __init__(
        self,
        settings: OrchestratorSettings,
        *,
        process: ServerProcess,
        registry: CollectorRegistry,
        discovery: Discovery | None = None,
    ) -> None:
        self._process = process
        self._exit = AsyncExitStack()
        self._tasks = asyncio.TaskGroup()
        self._credentials = channel_credentials(settings.pool_tls)
        self._pool = ServerPool(
            discovery or StaticDiscovery(settings.endpoints), open_channel=self._open_channel
        )
        self._keeper = SessionKeeper()
        self._codecs = Codecs()
        self._servicer = OrchestratorServicer(
            pool=self._pool,
            keeper=self._keeper,
            codecs=self._codecs,
            planning=Planning(self._pool),
            metrics=RequestMetrics(registry),
            settings=settings,
            tasks=self._tasks,
        )

    def register(self, server: grpc.aio.Server) -> Sequence[str]:
        """Add the servicer."""
        add_OrchestratorServiceServicer_to_server(self._servicer, server)
        return ("paceline.v1.OrchestratorService",)

    async def start(self) -> None:
        """Return as soon as there is a target, and its tokenizer."""
        # Left in the opposite order: requests, then their sessions, then the channels.
        await self._exit.enter_async_context(self._pool)
        await self._exit.enter_async_context(self._keeper)
        await self._exit.enter_async_context(self._tasks)
        ready = asyncio.Event()
        self._watching = self._tasks.create_task(self._watch(ready), name="watch readiness")
        await ready.wait()
        self._servicer.begin()

    def drain(self) -> None:
        """Accept nothing new."""
        self._servicer.drain()

    async def settled(self) -> None:
        """Return once no request is running."""
        await self._servicer.idle()

    async def stop(self) -> None:
        """Close the last sessions, then the channels."""
        self._watching.cancel()
        await self._exit.aclose()

    def pages(self) -> Mapping[str, Callable[[], Any]]:
        """There are none."""
        return {}

    def _open_channel(self, endpoint: Endpoint) -> grpc.aio.Channel:
        return pod_channel(endpoint.address, credentials=self._credentials)

    async def _watch(self, ready: asyncio.Event) -> None:
        """Let health follow whether there is a target and its tokenizer."""
        changed = asyncio.Event()
        with self._pool.listening(changed.set):
            while True:
                changed.clear()
                serving = await self._has_what_it_takes()
                if serving:
                    ready.set()
                if ready.is_set():
                    await self._process.set_serving(serving)
                await changed.wait()

    async def _has_what_it_takes(self) -> bool:
        while True:
            try:
                model = self._pool.model()
                await self._codecs.fetch(self._pool.targets(model)[0])
            except NoTargetError:
                return False
            except PacelineError as error:
                _log.warning("no tokenizer yet: %s", error.message)
                await asyncio.sleep(_RETRY_SECONDS)
            else:
                return True
