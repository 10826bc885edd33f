"""Answers that a client does not read take bounded memory, and no other client's."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import pytest
from prometheus_client import CollectorRegistry

from paceline.errors import OverloadedError
from paceline.status import decode
from paceline.v1 import orchestrator_service_pb2 as pb
from paceline.v1 import orchestrator_service_pb2_grpc as stubs
from paceline_serving import interceptors
from paceline_serving.interceptors import EdgeInterceptor
from paceline_serving.telemetry import RpcMetrics
from support.unread_watch import unread_calls
from support.waiting import until

PATH = "/paceline.v1.OrchestratorService/Tokenize"
TOKENS = 1 << 16  # each takes three bytes
ELSEWHERE = "127.0.0.2"


class Tokenizing(stubs.OrchestratorServiceServicer):
    async def Tokenize(self, request, context):  # noqa: N802
        return pb.TokenizeResponse(token_ids=[100_000] * TOKENS)


@asynccontextmanager
async def tokenizing():
    """Serve, and yield the address and a function that returns how many calls had each result."""
    registry = CollectorRegistry()
    server = grpc.aio.server(interceptors=[EdgeInterceptor(RpcMetrics(registry))])
    stubs.add_OrchestratorServiceServicer_to_server(Tokenizing(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    def count(code, reason=""):
        labels = {"method": PATH[1:], "code": code, "reason": reason}
        return registry.get_sample_value("paceline_rpcs_total", labels) or 0

    try:
        yield f"127.0.0.1:{port}", count
    finally:
        await server.stop(0)


async def tokenized(address):
    async with grpc.aio.insecure_channel(address) as channel:
        return await stubs.OrchestratorServiceStub(channel).Tokenize(pb.TokenizeRequest())


async def test_who_reads_no_answer_has_some_of_them_kept_and_others_are_answered(monkeypatch):
    monkeypatch.setattr(interceptors, "_UNREAD_BYTES", 15 * 3 * TOKENS + 15_000)
    async with tokenizing() as (address, count):
        async with AsyncExitStack() as stack:
            unread = unread_calls(address, PATH, count=30, source=ELSEWHERE)
            await asyncio.to_thread(stack.enter_context, unread)
            refused = ("RESOURCE_EXHAUSTED", "OVERLOADED")
            await until(lambda: count("OK") + count(*refused) == 30, what="all are answered")
            assert count("OK") == 12, "four fifths of what all clients together may leave unread"
            for _ in range(20):
                assert len((await tokenized(address)).token_ids) == TOKENS
        # Its connection has ended, and nothing is counted any more.
        async with AsyncExitStack() as stack:
            again = unread_calls(address, PATH, count=4, source=ELSEWHERE)
            before = count("OK")
            await asyncio.to_thread(stack.enter_context, again)
            await until(lambda: count("OK") == before + 4, what="all are answered")


async def test_a_client_that_is_over_its_part_is_told_when_to_come_again(monkeypatch):
    monkeypatch.setattr(interceptors, "_UNREAD_BYTES", 3 * TOKENS)
    async with tokenizing() as (address, _):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await tokenized(address)
    error = decode(refused.value)
    assert isinstance(error, OverloadedError)
    assert error.retry_after_seconds == 1
