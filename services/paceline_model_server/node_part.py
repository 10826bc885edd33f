"""What a node has of a model that another node serves, as a process that serves nothing itself.

Several nodes hold one model of vLLM's. The first one, with `node_rank=0`, is a model server like
any other. The others have the same command line with another rank. They open no port for clients,
and end with the first one, also after a signal: its sessions need them until they have moved.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from paceline_serving.process import announce, run_process

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline_model_server.settings import ModelServerSettings


def compute_part(settings: ModelServerSettings) -> int:
    """Compute until the node that serves is gone; return the exit code.

    0 if a signal came first. A second signal does not wait for that node.
    """
    return run_process(lambda: PartProcess(settings), settings)


class PartProcess:
    """The process of a part: a `Process` of `paceline_serving.process`."""

    def __init__(self, settings: ModelServerSettings) -> None:
        self._settings = settings
        self._end: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._useless = asyncio.Event()

    async def begin(self) -> None:
        """Load the part, which waits for the other nodes."""
        from paceline_engine.vllm_backend.load import load_part

        settings = self._settings
        part = await asyncio.to_thread(
            load_part,
            settings.model,
            revision=settings.model_revision or None,
            dtype=settings.dtype,
            threads=settings.threads,
            capture=settings.capture,
            invariant=settings.invariant,
            options=settings.engine_option,
        )
        self._watch(part.wait_for_leader, failure="the node that serves is gone")
        self._watch(part.wait_for_processes, failure="a process of vLLM has ended")
        announce("ready", {})

    def _watch(self, wait: Callable[[], None], *, failure: str) -> None:
        loop = asyncio.get_running_loop()

        def watch() -> None:
            wait()
            with suppress(RuntimeError):  # the loop has ended before
                loop.call_soon_threadsafe(self._give_up, failure)

        threading.Thread(target=watch, name="paceline-part", daemon=True).start()

    def _give_up(self, failure: str) -> None:
        self._useless.set()
        self.stop_soon(failure)

    def stop_soon(self, failure: str | None = None) -> None:
        """Ask for its end."""
        if not self._end.done():
            self._end.set_result(failure)

    async def stopping(self) -> str | None:
        """Wait until the end is asked for; return the failure, if it is one."""
        return await self._end

    async def finish(self, *, drain: bool = True) -> None:
        """Go on until the node that serves is gone; vLLM's processes end with this one.

        That takes as long as the other node's drain. Whoever sent the signal bounds it, as
        Kubernetes does with the grace period.
        """
        if drain:
            await self._useless.wait()
