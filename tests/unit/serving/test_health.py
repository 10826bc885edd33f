"""Health is told to all that watch it, whatever one of them does."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, asynccontextmanager

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub, add_HealthServicer_to_server

from paceline_serving.health import Health
from support.unread_watch import unread_watch

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING
UNKNOWN = HealthCheckResponse.SERVICE_UNKNOWN


@asynccontextmanager
async def served():
    """Yield health that is served, its address, and a stub."""
    health, server = Health(), grpc.aio.server()
    add_HealthServicer_to_server(health, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            yield health, address, HealthStub(channel)
    finally:
        await server.stop(None)


def watch(stub, service=""):
    return stub.Watch(HealthCheckRequest(service=service), timeout=60)


async def next_of(stream):
    return (await stream.read()).status


async def test_a_watcher_hears_of_each_change_and_of_nothing_else():
    async with served() as (health, _, stub):
        health.set("", is_serving=False)
        stream, other = watch(stub), watch(stub, "another")
        assert [await next_of(stream), await next_of(other)] == [NOT_SERVING, UNKNOWN]
        health.set("", is_serving=False)
        health.set("another", is_serving=True)
        assert await next_of(other) == SERVING
        health.set("", is_serving=True)
        assert await next_of(stream) == SERVING
        stream.cancel()
        health.set("another", is_serving=False)
        assert await next_of(other) == NOT_SERVING, "it hears on when another one leaves"


async def test_a_server_that_ends_says_so_of_all_its_services_for_good():
    async with served() as (health, _, stub):
        for service in ("", "liveness"):
            health.set(service, is_serving=True)
        streams = [watch(stub, service) for service in ("", "liveness")]
        assert [await next_of(it) for it in streams] == [SERVING] * 2
        health.end()
        health.set("", is_serving=True)
        assert [await next_of(it) for it in streams] == [NOT_SERVING] * 2
        checked = [
            await stub.Check(HealthCheckRequest(service=it), timeout=60) for it in ("", "liveness")
        ]
        assert [it.status for it in checked] == [NOT_SERVING] * 2


async def test_a_service_that_is_not_there_is_not_found():
    async with served() as (_, _, stub):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Check(HealthCheckRequest(service="nothing"), timeout=60)
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_watcher_that_reads_nothing_holds_up_no_other_one():
    async with served() as (health, address, stub):
        health.set("", is_serving=True)
        with ExitStack() as unread:
            await asyncio.to_thread(unread.enter_context, unread_watch(address))
            stream = watch(stub)
            assert await next_of(stream) == SERVING
            health.end()
            assert await next_of(stream) == NOT_SERVING
