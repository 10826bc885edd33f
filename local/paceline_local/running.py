"""Runs a system on this machine, and shows the progress of its start."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from paceline.errors import InternalError
from paceline_local.model_place import check_models
from paceline_local.screen import progress
from paceline_local.system import LocalSystem, LocalSystemConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from paceline_local.server import LocalServer

# Time and level, which are at the beginning of a line of a server's log.
_LOG_HEAD = re.compile(r"\S+T\S+ [A-Z]+ +")


@asynccontextmanager
async def running_system(
    config: LocalSystemConfig, *, log_directory: Path | None = None
) -> AsyncIterator[LocalSystem]:
    """Run a system, with a progress display while it starts; SIGTERM cancels the calling task.

    Raises:
        InvalidFieldError: A model is none, as can be seen before a process starts.
        ServerExitedError: A server could not start.
        TimeoutError: A server that is not ready said nothing for too long.
    """
    check_models((*config.drafter_arguments, *config.target_arguments))
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    count = config.targets + config.drafters + 1 + bool(config.gateway_listen)
    async with AsyncExitStack() as stack:
        with progress(f"starting {count} process{'es' if count > 1 else ''}", total=count) as step:

            def note(server: LocalServer, seconds: float) -> None:
                if (words := waiting_words(system, server)) is not None:
                    step.note(f"{server.name} {words} ({seconds:.0f} s)")

            system = LocalSystem(
                config,
                on_ready=lambda server: step(f"{server.name} is ready"),
                on_wait=note,
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


def waiting_words(system: LocalSystem, server: LocalServer) -> str | None:
    """Say what a server that is not ready does; None: it only waits for others of the system."""
    models = (*system.drafters, *system.targets)
    if server in models:
        if not server.has_reached("listening"):
            return "is still starting"
        said = _LOG_HEAD.sub("", server.last_log_lines().splitlines()[-1].strip())
        more = "" if said.startswith("listening") else f": {said}"
        return f"is still loading its model{more}"
    if server is system.gateway:
        models = (*models, system.orchestrator)
    return "is still starting" if all(it.has_reached("ready") for it in models) else None
