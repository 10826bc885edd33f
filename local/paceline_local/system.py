"""A whole system on this machine: drafters, targets and an orchestrator, each its own process.

For `paceline up` and `paceline demo`, and for tests and benchmarks that need real processes.
"""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

import aiohttp

from paceline_local.early_exit import ServerExitedError
from paceline_local.metrics_pages import Page, PageError, parse_sources, read_page
from paceline_local.server import ANY_PORT, LocalServer
from paceline_serving.server_settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import TracebackType

__all__ = [
    "LocalServer",
    "LocalSystem",
    "LocalSystemConfig",
    "ServerExitedError",
    "reachable",
]

# Time between two checks of a server that is not ready.
_LOOK_SECONDS = 15.0
# After all servers are ready, the orchestrator has so long to notice it.
_KNOWN_SECONDS = 15.0
_KNOWN_POLL_SECONDS = 0.02
# Standings of servers that may be used soon, and of servers that take work.
_ON_THEIR_WAY = ("loading", "unreachable")
_AT_WORK = ("used", "resting")
# The modules for `python -m`.
_DRAFTER, _TARGET, _ORCHESTRATOR = "paceline_drafter", "paceline_target", "paceline_orchestrator"
_GATEWAY = "paceline_gateway"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSystemConfig:
    """The system to start. The arguments are flags of servers; see `paceline serve ROLE --help`.

    Attributes:
        targets: Target processes to start.
        drafters: Drafter processes to start.
        more_targets: Addresses of running targets, which are used, too.
        more_drafters: The same for drafters.
        gateway_listen: The address of a gateway; empty: there is no gateway.
        silence_seconds: How long a server that is not ready may give no sign of life. A server
            that loads or downloads its model gives some.
    """

    targets: int = 2
    drafters: int = 1
    target_arguments: tuple[str, ...] = ()
    drafter_arguments: tuple[str, ...] = ()
    orchestrator_arguments: tuple[str, ...] = ()
    orchestrator_listen: str = ANY_PORT
    more_targets: tuple[str, ...] = ()
    more_drafters: tuple[str, ...] = ()
    gateway_listen: str = ""
    gateway_arguments: tuple[str, ...] = ()
    silence_seconds: float = 180.0


class LocalSystem:
    """A running system, for the time of an `async with`.

        async with LocalSystem(LocalSystemConfig(target_arguments=("--model", "..."))) as system:
            async with AsyncClient(system.orchestrator_address) as client: ...

    No process is left in any case: servers notice even when this process is killed.

    Args:
        config: The system to start.
        on_ready: Called with each server when it is ready.
        on_wait: Called now and then with a server that is not ready, and its seconds so far.
        log_directory: The directory for logs. Default: a temporary one, removed at the end.

    Attributes:
        not_used: Numbers of servers that the orchestrator did not use when all were ready, by role
            and standing.

    Raises:
        ServerExitedError: From `async with`: a server could not start.
        TimeoutError: From `async with`: a server that is not ready said nothing for too long.
    """

    def __init__(
        self,
        config: LocalSystemConfig,
        *,
        on_ready: Callable[[LocalServer], None] = lambda _: None,
        on_wait: Callable[[LocalServer, float], None] = lambda _, __: None,
        log_directory: Path | None = None,
    ) -> None:
        self._config = config
        self._on_ready = on_ready
        self._on_wait = on_wait
        self._log_directory = log_directory
        self._tasks = asyncio.TaskGroup()
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._ended: asyncio.Queue[LocalServer] = asyncio.Queue()
        self.drafters: tuple[LocalServer, ...] = ()
        self.targets: tuple[LocalServer, ...] = ()
        self.orchestrator: LocalServer
        self.gateway: LocalServer | None = None
        self.not_used: Mapping[tuple[str, str], int] = {}

    @property
    def orchestrator_address(self) -> str:
        """The address for clients."""
        return self.orchestrator.address

    @property
    def servers(self) -> tuple[LocalServer, ...]:
        """All processes; the orchestrator is the last one before a gateway."""
        front = () if self.gateway is None else (self.gateway,)
        return (*self.drafters, *self.targets, self.orchestrator, *front)

    async def wait_for_exit(self) -> LocalServer:
        """Wait until a process has ended, and return it; each one is returned once."""
        return await self._ended.get()

    async def __aenter__(self) -> Self:
        try:
            await self._tasks.__aenter__()
            await self._start(self._open_log_directory())
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._close()

    async def _close(self) -> None:
        """Stop all, and clean up.

        This does not use an exit stack. If a task group is cancelled again while it ends, an exit
        stack makes an exception that is its own context, and then follows that circle for ever.
        """
        try:
            await self._stop()
        finally:
            try:
                await self._tasks.__aexit__(None, None, None)
            finally:
                if self._temporary is not None:
                    self._temporary.cleanup()

    def _open_log_directory(self) -> Path:
        if self._log_directory is not None:
            return self._log_directory
        self._temporary = tempfile.TemporaryDirectory(prefix="paceline-")
        return Path(self._temporary.name)

    async def _start(self, directory: Path) -> None:
        config = self._config
        server = partial(
            LocalServer, directory=directory, tasks=self._tasks, on_exit=self._ended.put_nowait
        )
        self.drafters = tuple(
            server(f"drafter-{index}", _DRAFTER, arguments=config.drafter_arguments)
            for index in range(config.drafters)
        )
        self.targets = tuple(
            server(f"target-{index}", _TARGET, arguments=config.target_arguments)
            for index in range(config.targets)
        )
        models = (*self.drafters, *self.targets)
        for model in models:
            await model.start()
        for model in models:
            await self._wait_for(model, "listening")
        self.orchestrator = server(
            "orchestrator",
            _ORCHESTRATOR,
            arguments=(*self._endpoints(), *config.orchestrator_arguments),
            listen=config.orchestrator_listen,
        )
        await self.orchestrator.start()
        if config.gateway_listen:
            await self._wait_for(self.orchestrator, "listening")
            self.gateway = server(
                "gateway",
                _GATEWAY,
                arguments=(
                    f"--orchestrators={reachable(self.orchestrator_address)}",
                    # Servers stop draining: a user at a terminal does not wait ten minutes.
                    f"--drain-seconds={ServerSettings.model_fields['drain_seconds'].default}",
                    *config.gateway_arguments,
                ),
                listen=config.gateway_listen,
            )
            await self.gateway.start()
        try:
            async with asyncio.TaskGroup() as waits:
                for each in self.servers:
                    waits.create_task(self._wait_until_ready(each), name=f"wait for {each.name}")
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        if "metrics_address" in self.orchestrator.addresses:
            await self._wait_until_all_are_known()

    async def _wait_until_ready(self, server: LocalServer) -> None:
        await self._wait_for(server, "ready")
        self._on_ready(server)

    async def _wait_for(self, server: LocalServer, event: str) -> None:
        """Wait until the server is ready, while it gives signs of life.

        Raises:
            ServerExitedError: The server ended.
            TimeoutError: The server gave no sign of life for too long.
        """
        began = heard_at = time.monotonic()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):
                    await server.wait_for(event)
                    return
            if await server.is_heard():
                heard_at = time.monotonic()
            elif time.monotonic() - heard_at >= self._config.silence_seconds:
                raise TimeoutError(
                    f"{server.name} is not ready, and has said nothing for"
                    f" {self._config.silence_seconds:g} s; its last log lines:\n"
                    f"{server.last_log_lines()}"
                )
            self._on_wait(server, time.monotonic() - began)

    async def _wait_until_all_are_known(self) -> None:
        """Wait until the orchestrator uses every server, or says why not.

        An orchestrator is ready with one target. It notices the others just after they have
        announced here that they are ready. The wait ends after a while if a server that ran already
        is not used.

        The orchestrator's metrics have this, and need no credentials.
        """
        (source,) = parse_sources([self.orchestrator.metrics_address])
        page = Page(source, source.host)
        wanted = {
            "drafter": len(self.drafters) + len(self._config.more_drafters),
            "target": len(self.targets) + len(self._config.more_targets),
        }
        async with aiohttp.ClientSession() as session:
            with suppress(TimeoutError):
                async with asyncio.timeout(_KNOWN_SECONDS):
                    while True:
                        if await self._are_all_known(wanted, session, page):
                            return
                        await asyncio.sleep(_KNOWN_POLL_SECONDS)

    async def _are_all_known(
        self, wanted: Mapping[str, int], session: aiohttp.ClientSession, page: Page
    ) -> bool:
        for server in self.servers:
            if server.exit_code is not None:
                raise server.exit_error()
        try:
            samples = await read_page(session, page)
        except PageError:
            return False
        known, not_used = Counter[str](), Counter[tuple[str, str]]()
        for labels, count in samples.values.get("paceline_servers", {}).items():
            of = dict(labels)
            role, word = of["role"], of["standing"]
            known[role] += 0 if word in _ON_THEIR_WAY else int(count)
            not_used[role, word] += 0 if word in _AT_WORK else int(count)
        self.not_used = +not_used
        return all(known[role] >= count for role, count in wanted.items())

    def _endpoints(self) -> Iterator[str]:
        targets = [f"{it.name}={it.address}" for it in self.targets] + [*self._config.more_targets]
        drafters = [f"{it.name}={it.address}" for it in self.drafters]
        drafters += self._config.more_drafters
        yield f"--targets={','.join(targets)}"
        if drafters:
            yield f"--drafters={','.join(drafters)}"

    async def _stop(self) -> None:
        """Stop the gateway and the orchestrator first: their running requests need the others."""
        door = (self.gateway,) if self.gateway is not None else ()
        front = (self.orchestrator,) if hasattr(self, "orchestrator") else ()
        models = (*self.drafters, *self.targets)
        try:
            for servers in (door, front, models):
                async with asyncio.TaskGroup() as stops:
                    for server in servers:
                        stops.create_task(server.stop(), name=f"stop {server.name}")
        finally:
            for server in (*door, *front, *models):  # servers that a cancelled stop did not reach
                server.signal(signal.SIGKILL)


def reachable(address: str) -> str:
    """Return where this machine reaches a server that may listen on all interfaces."""
    for everywhere, here in (("0.0.0.0:", "127.0.0.1:"), ("[::]:", "[::1]:")):
        if address.startswith(everywhere):
            return here + address.removeprefix(everywhere)
    return address
