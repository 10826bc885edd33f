"""Fake model servers on virtual time: a queue, leases, and faults that begin and end when told."""

from __future__ import annotations

import asyncio
import heapq
import math
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2

from paceline import errors
from paceline.v1 import model_service_pb2, session_service_pb2
from support.fake_models import FakeModelServer
from support.virtual_network import HEALTH, Link

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

LEASE_SECONDS = 15.0
_STATES = health_pb2.HealthCheckResponse
# A forward that takes so many times what it should, and so long, is overdue: health says so, and no
# call is in sight; see paceline_engine/scheduling/latencies.py.
_OVERDUE_FACTOR, _LEAST_OVERDUE_SECONDS = 10, 10.0


@dataclass
class VirtualServer(FakeModelServer):
    """A drafter or a target with one worker: the lowest depth first, then who came first.

    Attributes:
        row_seconds: What each row of a forward beyond the first takes, as in a prefill.
        says_latencies: Whether it says what its forwards cost.
        slowdown: How many times as long forwards take for now.
        is_stuck: Whether forwards go on for ever, for now.
        is_full: Whether calls are refused for now.
        is_leaving: Whether it says that it takes nothing new.
        used_at: By session, when it was last asked something.
        prefixes: By session and sequence, what calls assumed.
        link: The way to it; it has the records of all calls.
    """

    name: str = ""
    seed: int = 0
    latency_seconds: float = 0.03
    row_seconds: float = 0.0
    says_latencies: bool = True
    slowdown: float = 1.0
    is_stuck: bool = False
    is_full: bool = False
    is_leaving: bool = False
    used_at: dict[str, float] = field(default_factory=dict)
    prefixes: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    tokenizer: bytes | None = None
    link: Link = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.address = f"{self.name}:1"
        self.link = Link(self.name, seed=self.seed)
        self.register(self.link)
        self.link.handlers[HEALTH] = grpc.unary_stream_rpc_method_handler(
            self._watch,
            request_deserializer=health_pb2.HealthCheckRequest.FromString,
            response_serializer=_STATES.SerializeToString,
        )
        self._overdue_at = math.inf
        self._turns = count()
        self._queue: list[tuple[int, int, asyncio.Future[None]]] = []
        self._is_busy = False

    # --- faults -------------------------------------------------------------------------------

    async def start(self) -> None:
        """Come back, with nothing left of what was."""
        self.is_leaving = False
        self.link.restore()

    async def kill(self) -> None:
        """Vanish: connections break, sessions are lost."""
        self.link.break_off()
        self.sessions.clear()
        self.live.clear()

    async def set_serving(self, serving: bool) -> None:
        """Say at once whether this server takes work."""
        self.is_leaving = not serving
        self.link.tell()

    def lose_sessions(self) -> None:
        """Forget the sessions that no call runs in."""
        self.sessions = {name: it for name, it in self.sessions.items() if name in self.live}

    def lose_tokens(self) -> None:
        """Forget half of what each session holds that no call runs in."""
        for name, session in self.sessions.items():
            if name not in self.live:
                session.tokens = session.tokens[: len(session.tokens) // 2]

    def get_stuck(self, is_stuck: bool) -> None:
        """Let forwards go on for ever, or to their end."""
        self.is_stuck = is_stuck
        self.link.tell()

    # --- what it says and does ----------------------------------------------------------------

    def info(self) -> model_service_pb2.GetModelInfoResponse:
        """Return what it says of its model, latencies included."""
        said = super().info()
        if self.says_latencies:
            step_ns, row_ns = round(self.latency_seconds * 1e9), round(self.row_seconds * 1e9)
            for rows in (1, 16):
                said.forward_latencies.add(rows=rows, median_ns=step_ns + (rows - 1) * row_ns)
            said.prefill_fixed_ns, said.prefill_ns_per_token = step_ns, row_ns
        return said

    async def open(self, spec: session_service_pb2.SessionSpec) -> session_service_pb2.SessionGrant:
        """Open a session, unless it is about to end."""
        if self.is_leaving:
            raise errors.DrainingError("it is shutting down")
        grant = await super().open(spec)
        self.used_at[grant.session_id] = _now()
        return grant

    def renew(self, session_id: str) -> int:
        """Give it another lease, and return its call that can be expected to be answered."""
        super().renew(session_id)
        self.used_at[session_id] = _now()
        return 0 if self.is_overdue else self.live.get(session_id, 0)

    @property
    def is_overdue(self) -> bool:
        """Whether the forward that runs takes far longer than it should."""
        return _now() >= self._overdue_at

    @property
    def health(self) -> int:
        """What it says of itself."""
        is_well = not (self.is_leaving or self.is_overdue)
        return int(_STATES.SERVING if is_well else _STATES.NOT_SERVING)

    @contextmanager
    def call(self, request: Any) -> Iterator[tuple[Any, str]]:
        """Fence a call; what it holds outlives its lease."""
        session_id = request.call.session_id
        if self.is_full:
            raise errors.OverloadedError("full", retry_after_seconds=0.3)
        with super().call(request) as (session, fault):
            base = session.tokens[: request.call.base_length]
            prefix = [*base, *request.call.token_ids]
            self.prefixes[session_id, request.call.sequence] = prefix
            try:
                yield session, fault
            finally:
                self.used_at[session_id] = _now()

    async def forward(
        self, superseded: asyncio.Event, fault: str, *, rows: int, depth: int = 0
    ) -> session_service_pb2.CallTiming:
        """Wait for the worker and take a forward's time; stop when a newer call came."""
        came = _now()
        ended = asyncio.ensure_future(superseded.wait())
        try:
            await self._have_turn(depth, ended)
            try:
                begun = _now()
                await self._compute(rows, ended, is_stuck=fault == "hang")
                took_ns = round((_now() - begun) * 1e9)
            finally:
                self._pass_on()
        finally:
            ended.cancel()
        return session_service_pb2.CallTiming(
            queue_ns=round((begun - came) * 1e9),
            forward_count=1,
            forward_ns=took_ns,
            row_count=rows,
        )

    def _session(self, session_id: str) -> Any:
        lasts_until = self.used_at.get(session_id, 0.0) + LEASE_SECONDS
        if session_id not in self.live and _now() > lasts_until:
            self.sessions.pop(session_id, None)
        return super()._session(session_id)

    async def _have_turn(self, depth: int, ended: asyncio.Future[Any]) -> None:
        if not self._is_busy:
            self._is_busy = True
            return
        turn = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (depth, next(self._turns), turn))
        try:
            await asyncio.wait((turn, ended), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._decline(turn)
            raise
        if ended.done():
            self._decline(turn)
            raise errors.SupersededError("a newer call came")

    def _decline(self, turn: asyncio.Future[None]) -> None:
        if turn.done():
            self._pass_on()
        else:
            turn.cancel()

    def _pass_on(self) -> None:
        while self._queue:
            turn = heapq.heappop(self._queue)[2]
            if not turn.done():
                turn.set_result(None)
                return
        self._is_busy = False

    async def _compute(self, rows: int, ended: asyncio.Future[Any], *, is_stuck: bool) -> None:
        """Take the time of these rows; what is stuck takes it when it is well again."""
        seconds = self.latency_seconds + (rows - 1) * self.row_seconds
        patience = max(_LEAST_OVERDUE_SECONDS, _OVERDUE_FACTOR * seconds)
        self._overdue_at = _now() + patience
        loop = asyncio.get_running_loop()
        overdue = loop.call_at(self._overdue_at, self.link.tell)
        try:
            await asyncio.wait((ended,), timeout=seconds * self.slowdown)
            if self.is_stuck or is_stuck:
                healed = loop.create_task(self.link.until(lambda: not (self.is_stuck or is_stuck)))
                try:
                    await asyncio.wait((ended, healed), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    healed.cancel()
        finally:
            overdue.cancel()
            self._overdue_at = math.inf
            self.link.tell()
        if ended.done():
            raise errors.SupersededError("a newer call came")

    async def _watch(self, _request: object, _context: object) -> AsyncIterator[Any]:
        told = None
        while True:
            await self.link.until(lambda old=told: self.health != old)
            told = self.health
            yield _STATES(status=told)


def drafters(number: int, **options: Any) -> list[VirtualServer]:
    """Return so many drafters, by default six times as fast as a target."""
    options.setdefault("latency_seconds", 0.005)
    names = (f"drafter-{index}" for index in range(number))
    return [VirtualServer("drafter", name=name, **options) for name in names]


def targets(number: int, **options: Any) -> list[VirtualServer]:
    """Return so many targets."""
    names = (f"target-{index}" for index in range(number))
    return [VirtualServer("target", name=name, **options) for name in names]


def _now() -> float:
    return asyncio.get_running_loop().time()
