"""The orchestrator as a process: its pool, its servicer, and when it is ready."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from paceline.v1.orchestrator_service_pb2_grpc import add_OrchestratorServiceServicer_to_server
from paceline_contract.limits import most_request_bytes
from paceline_orchestrator.decoding import probe
from paceline_orchestrator.decoding.metrics import RequestMetrics
from paceline_orchestrator.decoding.session_opener import SessionOpener
from paceline_orchestrator.fleet.discovery import StaticDiscovery
from paceline_orchestrator.fleet.discovery.dns import DnsDiscovery
from paceline_orchestrator.fleet.discovery.metrics import DiscoveryMetrics, WatchMetrics
from paceline_orchestrator.fleet.pool import ServerPool
from paceline_orchestrator.fleet.server_metrics import count_servers
from paceline_orchestrator.front.served_tokenizer import ServedTokenizer
from paceline_orchestrator.front.servicer import OrchestratorServicer
from paceline_orchestrator.front.tokenizer import Codecs
from paceline_orchestrator.planning.request_planner import RequestPlanner
from paceline_orchestrator.scaling.autoscaler import Autoscaler
from paceline_orchestrator.scaling.demand import DemandMeter
from paceline_orchestrator.scaling.external_scaler import ScalerServer
from paceline_orchestrator.scaling.peers import Peers
from paceline_serving.keys import Keys
from paceline_serving.security import channel_credentials
from paceline_serving.transport import client_server_options, pod_channel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import grpc
    from prometheus_client import CollectorRegistry

    from paceline_orchestrator.fleet.discovery import Discovery, Endpoint, Service
    from paceline_orchestrator.fleet.wire import ModelFacts
    from paceline_orchestrator.settings import OrchestratorSettings
    from paceline_serving.lifecycle import ServerProcess

_log = logging.getLogger(__name__)


class OrchestratorApplication:
    """Serves OrchestratorService; see lifecycle.Application.

    Args:
        process: Told whether there is a target.
        registry: Where metrics are kept.
        discovery: Where model servers are; None is as the settings say.

    Attributes:
        pool: The model servers.
        servicer: What clients call.
        autoscaler: How many targets are wanted.

    Raises:
        ValueError: The file of keys, or one of TLS, is unusable.
    """

    work_is_one_call = True

    def __init__(
        self,
        settings: OrchestratorSettings,
        *,
        process: ServerProcess,
        registry: CollectorRegistry,
        discovery: Discovery | None = None,
    ) -> None:
        self._process = process
        self.options: Sequence[tuple[str, int]] = client_server_options(
            request_limit=settings.request_limit + settings.queue_limit,
            message_bytes=settings.message_limit_bytes,
            call_seconds=settings.call_limit_seconds,
        )
        process.inspect = self._inspect
        if settings.api_keys is not None:
            process.keys = Keys(settings.api_keys)
        self._exit = AsyncExitStack()
        self._tasks = asyncio.TaskGroup()
        self._credentials = channel_credentials(settings.pool_tls)
        self._settings = settings
        self._watches = DiscoveryMetrics(registry)
        self.pool = ServerPool(
            discovery or self._discovery(settings.services, of="models"),
            open_channel=self._open_channel,
            probe=probe.answers,
            draw_lot=random.random,
        )
        count_servers(registry, self.pool)
        self._opener = SessionOpener()
        self._codecs = Codecs()
        self._tokenizer = ServedTokenizer(self.pool, self._codecs)
        demand = DemandMeter(self.pool, lookahead=settings.verifier_lookahead)
        self._replica_id = secrets.randbits(53)
        self._peers = self._find_peers(settings.peers)
        self.autoscaler = Autoscaler(
            demand,
            settings=settings,
            registry=registry,
            replica_id=self._replica_id,
            others=self._peers.demand if self._peers is not None else None,
        )
        self.servicer = OrchestratorServicer(
            pool=self.pool,
            opener=self._opener,
            codecs=self._codecs,
            planning=RequestPlanner(self.pool),
            demand=demand,
            metrics=RequestMetrics(registry),
            settings=settings,
            tasks=self._tasks,
        )

    def register(self, server: grpc.aio.Server) -> Sequence[str]:
        """Add the servicer."""
        add_OrchestratorServiceServicer_to_server(self.servicer, server)
        return ("paceline.v1.OrchestratorService",)

    async def start(self) -> None:
        """Return as soon as there is a target, and its tokenizer."""
        # Left in the opposite order: requests, then their sessions, then the channels.
        await self._exit.enter_async_context(self.pool)
        await self._exit.enter_async_context(self._opener)
        await self._exit.enter_async_context(self._tasks)
        await self._begin_scaling()
        ready = asyncio.Event()
        self._watching = self._tasks.create_task(self._watch(ready), name="watch readiness")
        await ready.wait()
        self.servicer.begin()

    def drain(self) -> None:
        """Accept nothing new."""
        self.servicer.drain()

    async def settled(self) -> None:
        """Return once no request is running."""
        await self.servicer.idle()

    def cut(self) -> None:
        """End the requests that still run; their streams say why."""
        self.servicer.cut()

    async def stop(self) -> None:
        """Close the last sessions, then the channels."""
        self._watching.cancel()
        await self._exit.aclose()

    def pages(self) -> Mapping[str, Callable[[], Any]]:
        """There are none."""
        return {}

    def _inspect(self, raw: bytes, _caller: str) -> None:
        self.servicer.check_size(len(raw))

    def _open_channel(self, endpoint: Endpoint) -> grpc.aio.Channel:
        return pod_channel(
            endpoint.address,
            credentials=self._credentials,
            tls_name=endpoint.tls_name,
            may_exchange=self._settings.exchange_calls,
        )

    def _discovery(self, services: Sequence[Service], *, of: str) -> Discovery:
        metrics = WatchMetrics(self._watches, of=of)
        match self._settings.discovery:
            case "static":
                return StaticDiscovery(self._settings.endpoints)
            case "dns":
                return DnsDiscovery(services, metrics=metrics)
            case "kubernetes":
                from paceline_orchestrator.fleet.discovery.kubernetes import KubernetesDiscovery

                return KubernetesDiscovery(services, metrics=metrics)

    def _find_peers(self, service: Service | None) -> Peers | None:
        if service is None:
            return None
        return Peers(
            self._discovery([service], of="orchestrators"),
            open_channel=self._open_channel,
            replica_id=self._replica_id,
        )

    async def _begin_scaling(self) -> None:
        """Say how many targets are wanted, also while there is none."""
        if self._peers is not None:
            await self._exit.enter_async_context(self._peers)
        await self._exit.enter_async_context(self.autoscaler)
        if self._settings.scaler_listen:
            server = ScalerServer(self.autoscaler, self._settings)
            await self._exit.enter_async_context(server)
            self._process.addresses["scaler_address"] = server.address
            _log.info("the external scaler listens on %s", server.address)

    async def _watch(self, ready: asyncio.Event) -> None:
        """Let health follow whether there is a target and its tokenizer."""
        changed = asyncio.Event()
        with self.pool.listening(changed.set):
            while True:
                changed.clear()
                model = await self._tokenizer.fetch()
                if model is not None and not ready.is_set():
                    self._warn_of_bigrams(model)
                    self._warn_of_messages(model)
                    ready.set()
                if ready.is_set():
                    await self._process.set_serving(model is not None)
                await self._tokenizer.wait(changed)

    def _warn_of_bigrams(self, model: ModelFacts) -> None:
        if not self._settings.text_rules().fit(model.vocabulary_size):
            _log.warning(
                "max_gram_bigrams is of another vocabulary than the targets', which has %d tokens:"
                " it is left out",
                model.vocabulary_size,
            )

    def _warn_of_messages(self, model: ModelFacts) -> None:
        needed = most_request_bytes(model.context_length)
        allowed = self._settings.message_limit_bytes
        if needed > allowed:
            _log.warning(
                "requests for a context of %d tokens may have %d bytes; --message-limit-bytes"
                " (%d) refuses the longest",
                model.context_length,
                needed,
                allowed,
            )
