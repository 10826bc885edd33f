"""An orchestrator over virtual servers: its real servicer, driver, sessions and pool."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

from paceline.v1 import orchestrator_service_pb2 as pb
from paceline_orchestrator.decoding import probe
from paceline_orchestrator.decoding.metrics import RequestMetrics
from paceline_orchestrator.decoding.session_opener import SessionOpener
from paceline_orchestrator.fleet.discovery import Availability, Endpoint, Role, StaticDiscovery
from paceline_orchestrator.fleet.pool import ServerPool
from paceline_orchestrator.front.servicer import OrchestratorServicer
from paceline_orchestrator.front.tokenizer import Codecs
from paceline_orchestrator.planning.planner import Planner
from paceline_orchestrator.planning.refinement import Refinement
from paceline_orchestrator.planning.request_planner import RequestPlanner
from paceline_orchestrator.scaling.demand import DemandMeter
from paceline_orchestrator.settings import OrchestratorSettings
from paceline_serving import lanes
from support.orchestrating import PROMPT, Received
from support.virtual_network import VirtualChannel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Sequence

    from paceline_orchestrator.fleet.discovery import Discovery
    from paceline_orchestrator.fleet.server import ModelServer
    from paceline_orchestrator.planning.background_computation import BackgroundComputation
    from support.virtual_network import CallRecord
    from support.virtual_servers import VirtualServer

# Longer than anything takes that goes on behind a request: closing a session, asking a late server.
SETTLING_SECONDS = 10.0


def now() -> float:
    """Return the time."""
    return asyncio.get_running_loop().time()


def endpoint(server: VirtualServer) -> Endpoint:
    """Return where a server is."""
    return Endpoint(server.name, server.address, Role(server.role))


class VirtualDiscovery:
    """Endpoints that a test changes.

    Args:
        servers: Those that are known at first.
    """

    def __init__(self, *servers: VirtualServer) -> None:
        self._sets: asyncio.Queue[frozenset[Endpoint]] = asyncio.Queue()
        self.list(*servers)

    def list(self, *servers: VirtualServer, leaving: Collection[VirtualServer] = ()) -> None:
        """Know these from now on, and no others."""
        ready = [endpoint(it) for it in servers]
        ending = [replace(endpoint(it), availability=Availability.TERMINATING) for it in leaving]
        self._sets.put_nowait(frozenset([*ready, *ending]))

    async def endpoints(self) -> AsyncIterator[frozenset[Endpoint]]:
        """Yield each set."""
        while True:
            yield await self._sets.get()


@dataclass
class Stream(Received):
    """What a client got, and when.

    Attributes:
        began: When it asked.
        ended: When its stream was over.
        arrivals: When which tokens came.
        failure: What it ended with.
    """

    began: float = field(default_factory=now)
    ended: float | None = None
    arrivals: list[tuple[float, list[int]]] = field(default_factory=list)
    failure: Exception | None = None

    def add(self, message: pb.GenerateResponse) -> None:
        super().add(message)
        if message.WhichOneof("event") == "chunk":
            self.arrivals.append((now(), list(message.chunk.token_ids)))


class _Refinement(Refinement):
    """Simulates nothing: a simulation takes real time, and changes later plans.

    Attributes:
        count: How often there was time for one.
    """

    count = 0

    async def _refine(self, computing: BackgroundComputation) -> None:
        self.count += 1


@dataclass
class VirtualSystem:
    """Fake models, and an orchestrator that a test can look into."""

    models: Sequence[VirtualServer]
    pool: ServerPool
    planning: RequestPlanner
    servicer: OrchestratorServicer
    registry: CollectorRegistry
    demand: DemandMeter

    async def generate(
        self,
        *,
        seconds: float | None = 60.0,
        into: Stream | None = None,
        client: str = "10.0.0.1",
        lane: str = "",
        **request: Any,
    ) -> Stream:
        """Generate; by default 24 tokens after the usual prompt, with a deadline.

        Args:
            seconds: Until the deadline; None is none.
            into: What it is received into.
            client: The client's address.
            lane: What the client, a proxy, says whose request it is.
            request: The request's fields.

        Raises:
            PacelineError: What the stream ended with.
        """
        stream = Stream() if into is None else into
        request.setdefault("token_ids", pb.TokenIds(ids=PROMPT))
        request.setdefault("max_tokens", 24)
        ends = None if seconds is None else now() + seconds
        context = SimpleNamespace(
            time_remaining=lambda: None if ends is None else ends - now(),
            auth_context=dict,
            peer=lambda: f"ipv4:{client}:1",
            invocation_metadata=lambda: ((lanes.HEADER, lane),) if lane else (),
        )
        try:
            messages = self.servicer.Generate(pb.GenerateRequest(**request), context)
            async with aclosing(messages):
                async for message in messages:
                    stream.add(message)
        except Exception as failure:
            stream.failure = failure
            raise
        finally:
            stream.ended = now()
        return stream

    def server(self, name: str) -> ModelServer:
        """Return what the orchestrator knows of a server."""
        return next(it for it in self.pool.servers if it.name == name)

    def records(self, *methods: str, server: str = "") -> list[CallRecord]:
        """Return the calls of these methods, of all if none is named, as they were sent."""
        found = [
            it
            for model in self.models
            for it in model.link.records
            if (not methods or it.method in methods) and server in {"", model.name}
        ]
        return sorted(found, key=lambda it: it.sent_at)

    async def until(self, condition: Callable[[], bool]) -> float:
        """Wait for a change of who is ready after which it holds; return how long that took."""
        began, changed = now(), asyncio.Event()
        with self.pool.listening(changed.set):
            while not condition():
                changed.clear()
                await changed.wait()
        return now() - began

    async def settle(self) -> None:
        """Let end what goes on behind requests."""
        await asyncio.sleep(SETTLING_SECONDS)

    def leftovers(self) -> list[str]:
        """Name tasks and timers of requests; after the last of them there are none."""
        loop: Any = asyncio.get_running_loop()
        tasks = (it.get_name() for it in asyncio.all_tasks())
        timers = (it._callback.__qualname__ for it in loop._scheduled if not it.cancelled())
        requests = ("verify ", "draft ", "run ", "renew ", "open ", "close ", "ask ")
        owners = ("Driver.", "CallsInFlight.", "Endurance.", "Event.set")
        return [
            *(it for it in tasks if it.startswith(requests)),
            *(it for it in timers if it.startswith(owners)),
        ]


@asynccontextmanager
async def virtual_system(
    *models: VirtualServer,
    discovery: Discovery | None = None,
    seed: int = 0,
    planner: Planner | None = None,
    **settings: Any,
) -> AsyncIterator[VirtualSystem]:
    """Run an orchestrator until it is left; no handler of a model may have met a bug.

    Args:
        models: All there are, in the order in which equals are chosen.
        discovery: Which of them the orchestrator knows; None is all, and waits until it is so.
        seed: Breaks ties between servers; 0 lets the first ones be chosen.
        planner: Chooses among the methods; None is the usual one.
        settings: The orchestrator's.
    """
    by_address = {it.address: it for it in models}

    def open_channel(where: Endpoint) -> Any:
        def standing() -> str | None:
            return next((it.status for it in pool.servers if it.name == where.name), "REMOVED")

        return VirtualChannel(by_address[where.address].link, standing=standing)

    random = Random(seed)
    pool = ServerPool(
        discovery or StaticDiscovery([endpoint(it) for it in models]),
        open_channel=open_channel,
        probe=probe.answers,
        draw_lot=random.random if seed else lambda: 0.0,
    )
    opener, tasks, codecs = SessionOpener(), asyncio.TaskGroup(), Codecs()
    planner, registry = planner or Planner(), CollectorRegistry()
    planning = RequestPlanner(pool, planner=planner, cpu_clock=lambda: 0)
    planning.refinement = _Refinement(planner, clock=time.monotonic)
    demand = DemandMeter(pool, lookahead=5, clock=now)
    servicer = OrchestratorServicer(
        pool=pool,
        opener=opener,
        codecs=codecs,
        planning=planning,
        demand=demand,
        metrics=RequestMetrics(registry),
        settings=OrchestratorSettings(targets=("127.0.0.1:1",), **settings),
        tasks=tasks,
    )
    async with pool, opener:
        await tasks.__aenter__()
        try:
            model = await pool.wait_for_model(10)
            first = pool.targets(model)[0]
            await codecs.fetch(first)
            codecs.conclude(model.tokenizer_fingerprint, [first])
            servicer.begin()
            system = VirtualSystem(models, pool, planning, servicer, registry, demand)
            if discovery is None:
                await system.until(lambda: sum(it.ready for it in pool.servers) == len(models))
            yield system
        finally:
            await tasks.__aexit__(None, None, None)  # what fails in here is no group of failures

    bugs = [bug for model in models for bug in model.link.bugs]
    if bugs:
        raise bugs[0]
