"""A name that leads to several servers, such as a headless Service's."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthServicer, HealthStub, add_HealthServicer_to_server

from paceline.channel import Route

_ADDRESS = 1  # the type of an A record


class Dns(asyncio.DatagramProtocol):
    """Answers every name with the same addresses."""

    def __init__(self):
        self.addresses = []

    def connection_made(self, transport):
        self._transport = transport

    def datagram_received(self, query, peer):
        end = query.index(b"\0", 12) + 5  # the name, its type and its class
        wants_addresses = struct.unpack(">H", query[end - 4 : end - 2])[0] == _ADDRESS
        found = self.addresses if wants_addresses else []
        head = query[:2] + struct.pack(">HHHHH", 0x8180, 1, len(found), 0, 0)
        records = b"".join(
            b"\xc0\x0c" + struct.pack(">HHIH", _ADDRESS, 1, 5, 4) + socket.inet_aton(each)
            for each in found
        )
        self._transport.sendto(head + query[12:end] + records, peer)


class Named(HealthServicer):
    """Tells its own address."""

    def __init__(self, address):
        self._address = address

    async def Check(self, _request, context):  # noqa: N802 - gRPC's name
        context.set_trailing_metadata((("address", self._address),))
        return HealthCheckResponse(status=HealthCheckResponse.SERVING)


@asynccontextmanager
async def served(address, port=0):
    server = grpc.aio.server()
    add_HealthServicer_to_server(Named(address), server)
    bound = server.add_insecure_port(f"{address}:{port}")
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(0)


async def asked(channel):
    """Return who answers."""
    call = HealthStub(channel).Check(HealthCheckRequest(), timeout=5, wait_for_ready=True)
    await call
    return dict(await call.trailing_metadata())["address"]


async def test_all_that_a_name_leads_to_take_turns_and_who_replaces_them_is_soon_found():
    loop = asyncio.get_running_loop()
    transport, dns = await loop.create_datagram_endpoint(Dns, local_addr=("127.0.0.1", 0))
    dns_port = transport.get_extra_info("sockname")[1]
    async with AsyncExitStack() as stack:
        stack.callback(transport.close)
        leaving = await stack.enter_async_context(AsyncExitStack())
        port = await leaving.enter_async_context(served("127.0.0.1"))
        await leaving.enter_async_context(served("127.0.0.2", port))
        dns.addresses = ["127.0.0.1", "127.0.0.2"]
        route = Route.to(f"dns://127.0.0.1:{dns_port}/orchestrators.test:{port}", insecure=True)
        channel = await stack.enter_async_context(route.open_async())
        answered = set()
        async with asyncio.timeout(5):
            while answered != set(dns.addresses):
                answered.add(await asked(channel))
        await stack.enter_async_context(served("127.0.0.3", port))
        dns.addresses = ["127.0.0.3"]
        began = time.monotonic()
        await leaving.aclose()
        assert await asked(channel) == "127.0.0.3"
        assert time.monotonic() - began < 4  # gRPC's own default is 30 s
