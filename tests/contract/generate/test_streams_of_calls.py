"""The calls of requests travel on one stream to each server, and as RPCs where none is wanted."""

from __future__ import annotations

import asyncio
import urllib.request
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest

from paceline import AsyncClient
from paceline_orchestrator.settings import OrchestratorSettings
from support.model_contract import a_host
from support.model_servers import DRAFTER, TARGET, serving
from support.orchestrating import orchestrator
from support.ports import free_address

if TYPE_CHECKING:
    from paceline_serving.lifecycle import ServerProcess

LISTEN = {"metrics_listen": "127.0.0.1:0"}


@pytest.mark.parametrize("exchange_calls", [True, False])
async def test_the_calls_of_a_request_travel_on_the_streams_that_servers_offer(exchange_calls):
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(serving(role, a_host(), **LISTEN))
            for role in (TARGET, DRAFTER)
        ]
        target, drafter = (it.addresses["address"] for it in servers)
        settings = OrchestratorSettings(
            listen=free_address(),
            health_listen="",
            targets=(f"target={target}",),
            drafters=(f"drafter={drafter}",),
            exchange_calls=exchange_calls,
        )
        process, _ = await stack.enter_async_context(orchestrator(settings))
        client = await stack.enter_async_context(AsyncClient(process.addresses["address"]))
        while not all(server.ready for server in (await client.info()).servers):
            pass
        completion = await client.generate(
            (1, 2, 3), strategy="speculative", max_tokens=20, ignore_eos=True
        ).collect()
        assert len(completion.token_ids) == 20
        streams = [await asyncio.to_thread(open_streams, server) for server in servers]
        assert streams == [float(exchange_calls)] * 2


def open_streams(server: ServerProcess) -> float:
    """Return how many streams of calls are open at a server."""
    url = f"http://{server.addresses['metrics_address']}/metrics"
    with urllib.request.urlopen(url, timeout=60) as page:
        lines: list[str] = page.read().decode().splitlines()
    name = 'paceline_rpcs_in_flight{method="paceline.v1.CallService/ExchangeCalls"}'
    return next((float(it.split()[-1]) for it in lines if it.startswith(name)), 0.0)
