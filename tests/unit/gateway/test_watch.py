"""An address is watched for as long as the gateway lives, whoever is behind it just now."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from types import SimpleNamespace

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from paceline_gateway import watch
from paceline_gateway.watch import Watch
from support.waiting import until

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Replica:
    """One of a Service's, as far as its health goes."""

    def __init__(self):
        self.health = health.aio.HealthServicer()
        self.address = ""

    async def says(self, status):
        await self.health.set("", status)


@asynccontextmanager
async def replica():
    server, it = grpc.aio.server(), Replica()
    health_pb2_grpc.add_HealthServicer_to_server(it.health, server)
    it.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await it.says(SERVING)
    await server.start()
    try:
        yield it
    finally:
        await server.stop(None)


@asynccontextmanager
async def watched(connect):
    """Watch what `connect` leads to, which lets everybody in."""

    async def knock():
        pass

    endpoint = SimpleNamespace(address="service:1", serves=False)
    following = asyncio.create_task(
        Watch(endpoint, connect=connect, knock=knock, changed=lambda: None).follow()
    )
    try:
        yield endpoint
    finally:
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following


async def test_while_one_replica_drains_another_one_behind_the_same_address_serves():
    async with AsyncExitStack() as stack:
        leaving, staying = [await stack.enter_async_context(replica()) for _ in range(2)]
        leads_to = [leaving]
        endpoint = await stack.enter_async_context(
            watched(lambda: grpc.aio.insecure_channel(leads_to[-1].address))
        )
        await until(lambda: endpoint.serves, what="the first one serves")
        leads_to.append(staying)
        await leaving.says(NOT_SERVING)  # and goes on for as long as it has work
        await until(lambda: not endpoint.serves, what="the first one drains")
        await until(lambda: endpoint.serves, what="the other one is found")


async def test_where_nobody_serves_the_address_is_tried_again_until_somebody_does(monkeypatch):
    monkeypatch.setattr(watch, "_FIRST_REST_SECONDS", 0.01)
    attempts = []

    def connect():
        attempts.append(None)
        return grpc.aio.insecure_channel(only.address)

    async with replica() as only:
        await only.says(NOT_SERVING)
        async with watched(connect) as endpoint:
            await until(lambda: len(attempts) == 3, what="it is tried a third time")
            assert not endpoint.serves
            await only.says(SERVING)
            await until(lambda: endpoint.serves, what="it serves")
