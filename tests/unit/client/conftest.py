import pytest

from support.fake_orchestrator import FakeOrchestrator, serving


@pytest.fixture
async def fake():
    async with serving(FakeOrchestrator()) as orchestrator:
        yield orchestrator
