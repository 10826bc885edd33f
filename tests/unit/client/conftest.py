import asyncio

import pytest

from paceline import AsyncClient, Client
from support.fake_orchestrator import FakeOrchestrator, serving


@pytest.fixture
async def fake():
    async with serving(FakeOrchestrator()) as orchestrator:
        yield orchestrator


@pytest.fixture(params=["asyncio", "blocking"])
def use(request):
    """Make a client, and let it do something, in the face that is tested."""

    async def asynchronous(address, do, **settings):
        async with AsyncClient(address, timeout=60, **settings) as client:
            return await do(client)

    async def blocking(address, do, **settings):
        with Client(address, timeout=60, **settings) as client:
            return await asyncio.to_thread(do, client)

    return {"asyncio": asynchronous, "blocking": blocking}[request.param]
