"""The other orchestrators: what their streams ask of the verifiers."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Self

import grpc

from paceline.errors import PacelineError
from paceline_orchestrator.fleet.wire import answer
from paceline_orchestrator.scaling.demand import Demand
from paceline_orchestrator.scaling.external_scaler import REPLICA_DEMAND, read_demand
from paceline_orchestrator.scaling.externalscaler.externalscaler_pb2 import GetMetricsRequest
from paceline_orchestrator.scaling.externalscaler.externalscaler_pb2_grpc import ExternalScalerStub

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline_orchestrator.fleet.discovery import Discovery, Endpoint

_TIMEOUT_SECONDS = 1.0
# What a replica that does not answer said last counts for so long: it may be busy, or gone.
_BELIEVED_SECONDS = 10.0


@dataclass
class _Peer:
    channel: grpc.aio.Channel
    replica_id: int = 0
    demand: Demand = field(default_factory=Demand)
    heard_at: float = float("-inf")


_heard_at = attrgetter("heard_at")


class Peers:
    """All orchestrators of the service, this one included. An asynchronous context manager.

    Args:
        discovery: Where they are.
        open_channel: How to reach one.
        replica_id: Who this one is: what it asks itself it need not be told.
    """

    def __init__(
        self,
        discovery: Discovery,
        *,
        open_channel: Callable[[Endpoint], grpc.aio.Channel],
        replica_id: int,
    ) -> None:
        self._discovery = discovery
        self._open_channel = open_channel
        self._replica_id = replica_id
        self._peers: dict[str, _Peer] = {}  # by address
        self._tasks = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._following = self._tasks.create_task(self._follow(), name="peers: follow discovery")
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._following.cancel()
        await self._tasks.__aexit__(None, None, None)
        for peer in self._peers.values():
            await peer.channel.close(None)

    async def demand(self) -> Demand:
        """Ask the others, all at once, and add up what they say or lately said."""
        peers = list(self._peers.values())
        async with asyncio.TaskGroup() as asking:
            for peer in peers:
                asking.create_task(self._ask(peer), name="peers: ask for the demand")
        now = time.monotonic()
        believed = [it for it in peers if now - it.heard_at < _BELIEVED_SECONDS]
        # By replica: one that has two addresses, or has just got another one, counts once.
        told = {it.replica_id: it.demand for it in sorted(believed, key=_heard_at)}
        told.pop(self._replica_id, None)
        return Demand.sum(told.values())

    async def _ask(self, peer: _Peer) -> None:
        request = GetMetricsRequest(metric_name=REPLICA_DEMAND)
        stub = ExternalScalerStub(peer.channel)
        # The channel of a replica that has gone just now refuses the call itself.
        with suppress(PacelineError, grpc.aio.UsageError):
            response = await answer(stub.GetMetrics(request, timeout=_TIMEOUT_SECONDS))
            peer.replica_id, peer.demand = read_demand(response)
            peer.heard_at = time.monotonic()

    async def _follow(self) -> None:
        async for endpoints in self._discovery.endpoints():
            found = {endpoint.address: endpoint for endpoint in endpoints}
            for address in found.keys() - self._peers.keys():
                self._peers[address] = _Peer(self._open_channel(found[address]))
            for address in self._peers.keys() - found.keys():
                await self._peers.pop(address).channel.close(None)
