"""An orchestrator in this process, over fake models, behind real gRPC."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
from prometheus_client import CollectorRegistry

from paceline.status import decode
from paceline.v1 import orchestrator_service_pb2 as pb
from paceline.v1.orchestrator_service_pb2_grpc import OrchestratorServiceStub
from paceline_orchestrator.application import OrchestratorApplication
from paceline_orchestrator.settings import OrchestratorSettings
from paceline_protocol.methods import METHODS
from paceline_serving.lifecycle import ServerProcess
from support.fake_models import FakeModelServer, serving
from support.fake_text import byte_tokenizer
from support.ports import free_address
from support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from paceline_orchestrator.fleet.discovery import Discovery

PROMPT = tuple(byte_tokenizer().encode("once upon a time").ids)
# Plain decoding, then all that draft: not all targets draft for themselves.
STRATEGIES = tuple(
    pb.Strategy.Value(f"STRATEGY_{strategy.name}")
    for strategy, method in METHODS.items()
    if not method.self_drafts
)
_STEP_SECONDS = 0.002


def a_drafter(**settings: Any) -> FakeModelServer:
    """Return one that is four times as fast as a target, and wrong at every fifth position."""
    settings.setdefault("latency_seconds", _STEP_SECONDS / 4)
    settings.setdefault("agrees", lambda position: position % 5 != 0)
    return FakeModelServer("drafter", **settings)


def targets(count: int, **settings: Any) -> list[FakeModelServer]:
    """Return so many that take 2 ms for a forward."""
    settings.setdefault("latency_seconds", _STEP_SECONDS)
    return [FakeModelServer("target", **settings) for _ in range(count)]


@dataclass
class Received:
    """What a client got."""

    started: pb.GenerationStarted | None = None
    prompt: list[pb.PromptChunk] = field(default_factory=list)
    chunks: list[pb.GenerationChunk] = field(default_factory=list)
    events: list[pb.TimelineEvent] = field(default_factory=list)
    finished: pb.GenerationFinished | None = None

    @property
    def token_ids(self) -> list[int]:
        return [token_id for chunk in self.chunks for token_id in chunk.token_ids]

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def fallbacks(self) -> dict[str, int]:
        return {
            pb.FallbackKind.Name(it.kind).removeprefix("FALLBACK_KIND_").lower(): it.count
            for it in self.finished.statistics.fallbacks
        }

    def add(self, message: pb.GenerateResponse) -> None:
        match message.WhichOneof("event"):
            case "started":
                self.started = message.started
            case "prompt_chunk":
                self.prompt.append(message.prompt_chunk)
            case "chunk":
                self.chunks.append(message.chunk)
            case "timeline_event":
                self.events.append(message.timeline_event)
            case "finished":
                self.finished = message.finished


@dataclass
class System:
    """Fake models, an orchestrator, and a client's stub of it."""

    drafters: list[FakeModelServer]
    targets: list[FakeModelServer]
    channel: grpc.aio.Channel
    stub: OrchestratorServiceStub
    process: ServerProcess
    application: OrchestratorApplication

    @property
    def address(self) -> str:
        return self.process.addresses["address"]

    @property
    def models(self) -> list[FakeModelServer]:
        return [*self.drafters, *self.targets]

    def call(self, **request: Any) -> Any:
        """Begin to generate; by default 24 tokens after the usual prompt, over our channel."""
        if not {"text", "token_ids", "parts", "fill_in"} & request.keys():
            request["token_ids"] = pb.TokenIds(ids=PROMPT)
        request.setdefault("max_tokens", 24)
        timeout = request.pop("timeout", 60)
        channel = request.pop("channel", None)
        stub = self.stub if channel is None else OrchestratorServiceStub(channel)
        return stub.Generate(pb.GenerateRequest(**request), timeout=timeout)

    async def generate(self, **request: Any) -> Received:
        """Generate; raises the typed error."""
        received = Received()
        try:
            async for message in self.call(**request):
                received.add(message)
        except grpc.aio.AioRpcError as error:
            raise decode(error) from None
        return received

    async def whole(self) -> None:
        """Return once every server is used that is known: for a beginning one target is enough."""
        pool = self.application.pool
        await until(lambda: all(it.ready for it in pool.servers), what="every server is used")

    async def settled(self) -> None:
        """Return once no request runs, every session is closed and no call runs."""
        servicer = self.application.servicer
        await until(
            lambda: (
                not (servicer.running_count or servicer.waiting_count)
                and not any(it.sessions or it.running for it in self.models)
            ),
            what="nothing is left of any request",
        )


def new_orchestrator(
    settings: OrchestratorSettings, *, discovery: Discovery | None = None
) -> tuple[ServerProcess, OrchestratorApplication]:
    """Return an orchestrator in this process, which the first one's `begin` starts."""
    registry, made = CollectorRegistry(), []

    def application(process: ServerProcess) -> OrchestratorApplication:
        made.append(
            OrchestratorApplication(
                settings, process=process, registry=registry, discovery=discovery
            )
        )
        return made[0]

    process = ServerProcess(application, settings, registry=registry)
    return process, made[0]


@asynccontextmanager
async def orchestrator(
    settings: OrchestratorSettings, *, discovery: Discovery | None = None
) -> AsyncIterator[tuple[ServerProcess, OrchestratorApplication]]:
    """Run an orchestrator in this process."""
    process, application = new_orchestrator(settings, discovery=discovery)
    try:
        await process.begin()
        yield process, application
    finally:  # also after a failed assertion: a server left behind hangs at exit
        await process.finish()


@asynccontextmanager
async def orchestrating(
    *,
    drafters: list[FakeModelServer] | None = None,
    targets: list[FakeModelServer],
    discovery: Discovery | None = None,
    listen: str = "",
    **settings: Any,
) -> AsyncIterator[System]:
    """Run fake models and an orchestrator; in the end nothing of a request may be left.

    Args:
        drafters: All there are.
        targets: All there are.
        discovery: Which of them the orchestrator knows; None is all.
        listen: Where the orchestrator listens; by default where nobody of another test looks.
        settings: The orchestrator's.
    """
    drafters = drafters or []
    async with serving(*drafters, *targets):
        values = OrchestratorSettings(
            listen=listen or free_address(),
            health_listen="",
            drafters=tuple(it.address for it in drafters),
            targets=tuple(it.address for it in targets),
            drain_seconds=5,
            **settings,
        )
        async with (
            orchestrator(values, discovery=discovery) as (process, application),
            grpc.aio.insecure_channel(process.addresses["address"]) as channel,
        ):
            stub = OrchestratorServiceStub(channel)
            system = System(drafters, targets, channel, stub, process, application)
            await system.whole()
            yield system
        leftovers = [
            task
            for task in asyncio.all_tasks()
            if task.get_name().startswith(("verify ", "draft ", "run "))
        ]
        assert not leftovers
