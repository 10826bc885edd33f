"""A client may ping as often as libraries do without losing its calls; a flood is ended."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest

from paceline.v1 import orchestrator_service_pb2 as pb
from paceline.v1.orchestrator_service_pb2_grpc import OrchestratorServiceStub
from support.orchestrating import PROMPT, orchestrating, targets

# What a client says that wants to notice a dead server soon: many say 5 s.
OFTEN = (
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, GOAWAY = 4, 6, 7
ENHANCE_YOUR_CALM = 11


def frame(kind, payload=b"", *, flags=0):
    return len(payload).to_bytes(3) + bytes([kind, flags]) + bytes(4) + payload


@asynccontextmanager
async def connected(address):
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(PREFACE + frame(SETTINGS))
    try:
        yield reader, writer
    finally:
        writer.close()


async def next_of(reader, *kinds):
    """Return the next frame of one of these kinds: which, its flags, and what is in it."""
    while True:
        head = await reader.readexactly(9)
        payload = await reader.readexactly(int.from_bytes(head[:3]))
        if head[3] in kinds:
            return head[3], head[4], payload


async def test_a_call_outlives_pings_once_a_second_while_nothing_is_sent():
    target = targets(1)[0]
    async with orchestrating(targets=[target]) as system:
        target.answers.clear()
        async with grpc.aio.insecure_channel(system.address, options=OFTEN) as channel:
            request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), max_tokens=4)
            stream = OrchestratorServiceStub(channel).Generate(request, timeout=60)
            started = await stream.read()
            assert started.WhichOneof("event") == "started"
            reading = asyncio.create_task(stream.read())
            # Pings are five to seven by then; gRPC forgives two that come too soon.
            done, _ = await asyncio.wait({reading}, timeout=7)
            assert not done, "the connection was ended"
            target.answers.set()
            assert (await reading).WhichOneof("event") == "chunk"
            while await stream.read() is not grpc.aio.EOF:
                pass
            assert await stream.code() is grpc.StatusCode.OK


@pytest.mark.parametrize("who", ["orchestrator", "target"])
async def test_without_a_call_pings_are_answered_too_and_a_flood_of_them_ends_the_connection(who):
    async with orchestrating(targets=targets(1)) as system:
        address = system.address if who == "orchestrator" else system.targets[0].address
        async with connected(address) as (reader, writer):
            for number in range(7):
                writer.write(frame(PING, bytes([number]) * 8))
                kind, flags, payload = await next_of(reader, PING, GOAWAY)
                assert (kind, flags, payload) == (PING, 1, bytes([number]) * 8)
                await asyncio.sleep(0.6)  # the pace is what is tested
        async with connected(address) as (reader, writer):
            writer.write(frame(PING, bytes(8)) * 50)
            kind, _, payload = await next_of(reader, GOAWAY)
            assert int.from_bytes(payload[4:8]) == ENHANCE_YOUR_CALM
