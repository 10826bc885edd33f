"""Runs a system on this machine, and shows the progress of its start."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from paceline.errors import InternalError
from paceline_local.screen import progress, safe
from paceline_local.system import LocalSystem, LocalSystemConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from paceline_local.server import LocalServer


@asynccontextmanager
async def running_system(
    config: LocalSystemConfig, *, log_directory: Path | None = None
) -> AsyncIterator[LocalSystem]:
    """Run a system, with a progress display while it starts; SIGTERM cancels the calling task.

    Raises:
        ServerExitedError: A server could not start.
        TimeoutError: A server that is not ready said nothing for too long.
    """
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    count = config.targets + config.drafters + 1 + bool(config.gateway_listen)
    async with AsyncExitStack() as stack:
        with progress(f"starting {count} process{'es' if count > 1 else ''}", total=count) as step:
            system = LocalSystem(
                config,
                on_ready=lambda server: step(f"{server.name} is ready"),
                on_wait=lambda server, seconds: step.note(_waiting(server, seconds)),
                log_directory=log_directory,
            )
            await stack.enter_async_context(system)
        try:
            yield system
        except InternalError:
            # The server's log, which alone has the reason, is removed after this.
            words = system.orchestrator.last_log_lines()
            print(f"the orchestrator's last log lines:\n{words}", file=sys.stderr)
            raise


def _waiting(server: LocalServer, seconds: float) -> str:
    last = server.last_log_lines().splitlines()[-1].strip()
    return f"{server.name} is not ready after {seconds:.0f} s; it says: {safe(last)}"
