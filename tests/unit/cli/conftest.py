import asyncio
import os
import threading

import pytest

from paceline_cli.__main__ import main
from support.fake_orchestrator import FakeOrchestrator, serving


def run(capsys, *arguments):
    """Run a command in this process; return its exit code, its output and its errors."""
    code = main(arguments)
    output = capsys.readouterr()
    return code, output.out, output.err


@pytest.fixture(autouse=True)
def no_settings_of_the_machine(monkeypatch):
    for name in [name for name in os.environ if name.startswith("PACELINE_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def fake():
    """Serve a fake orchestrator from a thread, for commands that run an event loop themselves."""
    orchestrator = FakeOrchestrator()
    started = threading.Event()
    loop = asyncio.new_event_loop()
    end = asyncio.Event()

    async def serve():
        async with serving(orchestrator):
            started.set()
            await end.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert started.wait(90)
    yield orchestrator
    loop.call_soon_threadsafe(end.set)
    thread.join(90)
    assert not thread.is_alive()
    loop.close()
