"""A run of chaos: streams of every kind while servers and connections fail in every way.

One seed draws what is asked for and what goes wrong. At any time one more target and one more
orchestrator are well than are struck, so every stream must end as if nothing had happened. One
orchestrator sends its calls as messages of a stream, the other one as RPCs.
"""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Self

from paceline import AsyncClient
from paceline.errors import PacelineError
from support.chaos.faults import MODEL_FAULTS, ORCHESTRATOR_FAULTS, is_working, lift
from support.chaos.history import History, Strike
from support.chaos.workload import draw_order, stream
from support.links import Link
from support.system import System, simulated_model
from support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from support.chaos.faults import Fault
    from support.processes import ServerProcess

_STREAMS_AT_ONCE, _WARM_UP_STREAMS = 6, 3
_DRAFTERS, _TARGETS, _ORCHESTRATORS = 2, 3, 2
_LASTS_SECONDS = (0.5, 4.0)
_REST_SECONDS = (0.2, 2.0)
_LOOK_AGAIN_SECONDS = 0.1
_USED_AGAIN_WITHIN_SECONDS, _ASKED_SECONDS = 60.0, 2.0
# Descriptors and threads of a process that come and go by themselves.
_SPARE = 3
# Sessions of a killed orchestrator end with their lease of 15 s.
_SETTLED_WITHIN_SECONDS = 60.0


async def chaos(*, seed: int, tokens: int, fewest_hits: int) -> History:
    """Run until so many tokens came and so many faults hit; then see what is left."""
    async with _Run(seed, tokens=tokens, fewest_hits=fewest_hits) as run:
        try:
            await run.to_the_end()
        finally:
            run.collect_errors()
        return run.history


class _Run:
    def __init__(self, seed: int, *, tokens: int, fewest_hits: int) -> None:
        self._seed = seed
        self._tokens = tokens
        self._fewest_hits = fewest_hits
        self._clients: list[AsyncClient] = []
        self._lots = random.Random(f"{seed} which orchestrator")

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            models = [
                *(
                    simulated_model("drafter", it, seconds=0.001, simulated_acceptance_rate=0.8)
                    for it in range(_DRAFTERS)
                ),
                *(
                    simulated_model("target", it, seconds=0.003, simulated_self_rates="0.6,0.4")
                    for it in range(_TARGETS)
                ),
            ]
            self.models = [await stack.enter_async_context(Link(server)) for server in models]
            system = System(
                drafters=models[:_DRAFTERS],
                targets=models[_DRAFTERS:],
                orchestrator_count=_ORCHESTRATORS,
                flags_of_one={1: ("--no-exchange-calls",)},
                relayed={link.server.name: link.address for link in self.models},
            )
            processes = system.running()
            await asyncio.to_thread(processes.__enter__)
            stack.push_async_callback(asyncio.to_thread, processes.__exit__, None, None, None)
            self.fronts = [
                await stack.enter_async_context(Link(server)) for server in system.orchestrators
            ]
            for link in self.fronts:
                client = AsyncClient(link.address)
                self._clients.append(await stack.enter_async_context(client))
            self._stack = stack.pop_all()
        self.history = History(self._seed, began=time.monotonic())
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._stack.aclose()

    @property
    def links(self) -> list[Link]:
        return [*self.models, *self.fronts]

    async def to_the_end(self) -> None:
        await self._until_all_used()
        await asyncio.gather(*(self._warm_up(number) for number in range(_STREAMS_AT_ONCE)))
        before = {link: _footprint(link.server) for link in self.links}
        self.history.began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            wanted = [
                tasks.create_task(self._ask(number), name=f"asks {number}")
                for number in range(_STREAMS_AT_ONCE)
            ]
            injectors = [
                tasks.create_task(self._strike_at(links, faults), name="strikes")
                for links, faults in (
                    (self.models, MODEL_FAULTS),
                    (self.fronts, ORCHESTRATOR_FAULTS),
                )
            ]
            await asyncio.wait(wanted)
            for injector in injectors:
                injector.cancel()
        self.history.ended = time.monotonic()
        for link in self.links:
            await asyncio.to_thread(lift, link)
        await self._until_all_used()
        self.history.leftovers += await self._leftovers(before)

    def collect_errors(self) -> None:
        for link in self.links:
            errors = [line for line in link.server.log.splitlines() if '"level": "ERROR"' in line]
            self.history.logged_errors += [f"{link.server.name}: {line}" for line in errors]

    @property
    def _is_enough(self) -> bool:
        history = self.history
        return history.token_count >= self._tokens and history.hit_count >= self._fewest_hits

    async def _warm_up(self, number: int) -> None:
        """Let every process open what it keeps open, and start the threads that it keeps."""
        lots = random.Random(number)
        for _ in range(_WARM_UP_STREAMS):
            self.history.records.append(await stream(draw_order(lots), self._choose))

    async def _ask(self, number: int) -> None:
        """Ask for one stream after the other."""
        lots = random.Random(f"{self._seed} orders {number}")
        while not self._is_enough:
            self.history.records.append(await stream(draw_order(lots), self._choose))

    def _choose(self, failed: int | None) -> tuple[int, AsyncClient]:
        """Return any orchestrator but the one that has just failed."""
        others = [index for index in range(_ORCHESTRATORS) if index != failed]
        index = self._lots.choice(others)
        return index, self._clients[index]

    async def _strike_at(self, links: Sequence[Link], faults: Sequence[Fault]) -> None:
        """Strike one after the other, each kind of fault as often as any other."""
        lots = random.Random(f"{self._seed} {faults}")
        while True:
            for fault in lots.sample(faults, len(faults)):
                await self._strike(lots.choice(links), fault, lots)
                await asyncio.sleep(lots.uniform(*_REST_SECONDS))

    async def _strike(self, link: Link, fault: Fault, lots: random.Random) -> None:
        await until(lambda: is_working(link), what=f"{link!r} has calls", within_seconds=60)
        orchestrator = self.fronts.index(link) if link in self.fronts else None
        hits = link.hits
        strike = Strike(fault.name, link.server.name, orchestrator, time.monotonic())
        self.history.strikes.append(strike)
        try:
            await asyncio.to_thread(fault.begin, link, lots)
            await asyncio.sleep(lots.uniform(*_LASTS_SECONDS))
            strike.hit = link.hits > hits or await asyncio.to_thread(fault.has_hit, link)
        finally:
            await asyncio.shield(asyncio.to_thread(lift, link))
            strike.end = time.monotonic()
        for index in (orchestrator,) if orchestrator is not None else range(_ORCHESTRATORS):
            await self._until_used(link, by=index)

    async def _until_used(self, link: Link, *, by: int) -> None:
        """Wait until an orchestrator has said that it uses a server; an orchestrator, some target.

        So the next strike leaves more than one well. That it takes long is the run's finding.
        """
        names = (
            {link.server.name} if link in self.models else {it.server.name for it in self.models}
        )
        try:
            async with asyncio.timeout(_USED_AGAIN_WITHIN_SECONDS):
                used: set[str] = set()
                while not names & used:
                    used = await self._used(by)
                    await asyncio.sleep(_LOOK_AGAIN_SECONDS)
        except TimeoutError:
            self.history.leftovers.append(f"{link.server.name} was not used again by {by}")

    async def _used(self, by: int) -> set[str]:
        """Ask an orchestrator which servers it uses; none, if it cannot answer now."""
        try:
            servers = (await self._clients[by].info(timeout=_ASKED_SECONDS)).servers
        except PacelineError:
            return set()
        return {server.name for server in servers if server.ready}

    async def _until_all_used(self) -> None:
        for link in self.models:
            for index in range(_ORCHESTRATORS):
                await self._until_used(link, by=index)

    async def _leftovers(self, before: dict[Link, tuple[int, int]]) -> list[str]:
        """Say what is left of the streams once all had time to end."""
        left = ["not looked yet"]
        with suppress(TimeoutError):
            async with asyncio.timeout(_SETTLED_WITHIN_SECONDS):
                while left:
                    await asyncio.sleep(_LOOK_AGAIN_SECONDS)
                    left = await asyncio.to_thread(self._left_now, before)
        return left

    def _left_now(self, before: dict[Link, tuple[int, int]]) -> list[str]:
        left = []
        for link in self.links:
            for name in ("sessions_active", "calls_live", "num_requests_running"):
                value = link.server.metric(f"paceline_{name}")
                if value:
                    left.append(f"{link.server.name}: {name} is {value:g}")
            running = [method for method, count in link.calls.running.items() if count]
            left += [f"{link!r}: {it} runs" for it in running if it != "Watch"]
            for what, was, now in zip(
                ("descriptors", "threads"), before[link], _footprint(link.server), strict=True
            ):
                if now > was + _SPARE:
                    left.append(f"{link.server.name}: {now} {what}, {was} before")
        return left


def _footprint(server: ServerProcess) -> tuple[int, int]:
    """Return how many descriptors and threads a process has."""
    return server.descriptor_count, server.thread_count
