"""Paceline's services: a target and an orchestrator, asked over gRPC: see measuring.py."""

from __future__ import annotations

import asyncio
import time
from importlib import metadata
from typing import TYPE_CHECKING, Any

from paceline import AsyncClient, DrafterKind, Strategy
from paceline_local.system import LocalSystem, LocalSystemConfig
from peer_engines.runners.measuring import Engine, Text, run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline import GenerateOptions

_WAYS: dict[str, GenerateOptions] = {
    "plain": {"strategy": Strategy.AUTOREGRESSIVE},
    "si": {"strategy": Strategy.SPECULATIVE, "drafter": DrafterKind.MAX_GRAM},
    "auto": {"strategy": Strategy.AUTO},
}


class Services(Engine):
    """A running system and a client, on an event loop of their own."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.version = metadata.version("paceline")
        self._runner, self._ended = asyncio.Runner(), asyncio.Event()
        flags = (f"--model={job['model']}", f"--threads={job['threads']}", *job["flags"])
        self._config = LocalSystemConfig(targets=1, drafters=0, target_arguments=flags)
        self._runner.run(self._start())

    def decode(self, prompts: Sequence[Sequence[int]], *, count: int, way: str) -> list[Text]:
        """Send all requests at once, and read what comes."""

        async def decode() -> list[Text]:
            return await asyncio.gather(*(self._one(it, count, way) for it in prompts))

        return self._runner.run(decode())

    def pids(self) -> list[int]:
        """Return the servers; this process is a client."""
        return [self._system.orchestrator.pid, *(each.pid for each in self._system.targets)]

    def close(self) -> None:
        """End the servers."""

        async def end() -> None:
            self._ended.set()
            await self._keeper

        self._runner.run(end())
        self._runner.close()

    async def _start(self) -> None:
        ready = asyncio.get_running_loop().create_future()
        # One task begins and ends the system, between which the loop runs for each decoding.
        self._keeper = asyncio.create_task(self._keep(ready), name="the system")
        await asyncio.wait([self._keeper, ready], return_when=asyncio.FIRST_COMPLETED)
        if self._keeper.done():
            await self._keeper  # raises what it could not start for
        self._system, self._client = await ready

    async def _keep(self, ready: asyncio.Future[tuple[LocalSystem, AsyncClient]]) -> None:
        async with (
            LocalSystem(self._config) as system,
            AsyncClient(system.orchestrator_address) as client,
        ):
            ready.set_result((system, client))
            await self._ended.wait()

    async def _one(self, prompt: Sequence[int], count: int, way: str) -> Text:
        since, text = time.perf_counter(), Text()
        asked: GenerateOptions = {**_WAYS[way], "max_tokens": count, "ignore_eos": True}
        async for chunk in self._client.generate(tuple(prompt), **asked):
            text.take(chunk.token_ids, since=since)
        return text


if __name__ == "__main__":
    run(Services)
