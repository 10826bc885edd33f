"""An address is watched for as long as the gateway lives, whoever is behind it just now."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from types import SimpleNamespace

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from paceline.errors import ConnectionLostError, UnauthenticatedError
from paceline_gateway.fleet import health_watch
from paceline_gateway.fleet.health_watch import Watch
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
async def watched(connect, knock=None):
    """Watch what `connect` leads to, which lets everybody in unless `knock` says otherwise."""

    async def enter():
        pass

    knock = knock or enter
    endpoint = SimpleNamespace(address="service:1", serves=False)
    endpoint.watch = Watch(endpoint, connect=connect, knock=knock, changed=lambda: None)
    following = asyncio.create_task(endpoint.watch.follow())
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
    monkeypatch.setattr(health_watch, "_FIRST_REST_SECONDS", 0.01)
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


@asynccontextmanager
async def a_health_that_cannot_be_decoded():
    """Yield an address, and how often it was asked."""
    asked = []

    async def watch(_request, context):
        asked.append(None)
        await context.write(b"\xff")
        await asyncio.Event().wait()

    handlers = {"Watch": grpc.unary_stream_rpc_method_handler(watch)}
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("grpc.health.v1.Health", handlers),)
    )
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield address, asked
    finally:
        await server.stop(None)


async def test_health_that_cannot_be_decoded_is_none_and_ends_nothing(monkeypatch):
    monkeypatch.setattr(health_watch, "_FIRST_REST_SECONDS", 0.01)
    async with replica() as only, a_health_that_cannot_be_decoded() as (address, asked):
        leads_to = [address]
        async with watched(lambda: grpc.aio.insecure_channel(leads_to[-1])) as endpoint:
            await until(lambda: len(asked) == 3, what="it is asked again")
            assert not endpoint.serves
            leads_to.append(only.address)
            await until(lambda: endpoint.serves, what="the next process serves")


class Door:
    """What orchestrators say to this gateway's key: the answers are the test's."""

    def __init__(self):
        self.knocks = asyncio.Queue()

    async def __call__(self):
        answer = asyncio.get_running_loop().create_future()
        self.knocks.put_nowait(answer)
        await answer

    async def next_knock(self):
        async with asyncio.timeout(60):
            return await self.knocks.get()


@asynccontextmanager
async def a_first_process_that_serves():
    """Yield a door, the endpoint that it lets in, and what replaces the process."""
    async with AsyncExitStack() as stack:
        door, leads_to = Door(), [await stack.enter_async_context(replica())]
        endpoint = await stack.enter_async_context(
            watched(lambda: grpc.aio.insecure_channel(leads_to[-1].address), door)
        )

        async def replace():
            leads_to.append(await stack.enter_async_context(replica()))
            await leads_to[-2].says(NOT_SERVING)

        yield door, endpoint, replace


async def test_the_next_process_at_an_address_serves_when_it_has_let_this_gateway_in():
    async with a_first_process_that_serves() as (door, endpoint, replace):
        (await door.next_knock()).set_result(None)
        await until(lambda: endpoint.serves, what="the first one serves")
        await replace()
        again = await door.next_knock()
        assert not endpoint.serves, "what the one before said does not count"
        again.set_exception(UnauthenticatedError("another list of keys"))
        again = await door.next_knock()
        assert not endpoint.serves
        again.set_result(None)
        await until(lambda: endpoint.serves, what="its list was mended")


@pytest.mark.parametrize(
    "late", [None, ConnectionLostError("gone"), UnauthenticatedError("the old list")], ids=str
)
async def test_a_late_word_of_the_process_before_says_nothing_of_the_next_one(late):
    async with a_first_process_that_serves() as (door, endpoint, replace):
        (await door.next_knock()).set_result(None)
        await until(lambda: endpoint.serves, what="the first one serves")
        endpoint.watch.doubt()
        to_the_one_before = await door.next_knock()
        await replace()
        await until(lambda: not endpoint.serves, what="the first one drains")
        await until(lambda: endpoint.watch.is_healthy, what="the next one says that it is well")
        if late is None:
            to_the_one_before.set_result(None)
        else:
            to_the_one_before.set_exception(late)
        to_the_next_one = await door.next_knock()
        assert not endpoint.serves
        assert endpoint.watch.refusal is None
        to_the_next_one.set_result(None)
        await until(lambda: endpoint.serves, what="the next one serves")
