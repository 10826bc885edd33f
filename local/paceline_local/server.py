"""One server process on this machine: started, heard of, signalled, stopped."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import textwrap
from contextlib import suppress
from http import HTTPStatus
from typing import TYPE_CHECKING

import aiohttp

from paceline.channel import open_async_channel
from paceline.errors import PacelineError
from paceline_serving.server_settings import ServerSettings
from paceline_serving.settings import VARIABLE_PREFIX, flag_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

ANY_PORT = "127.0.0.1:0"
_LOG_LINES = 8
# What one that is alive takes to say so, on a busy machine.
_ANSWER_SECONDS = 5.0
# What a server may take to stop when it has drained.
_STOP_SECONDS = 10.0


class ServerExitedError(PacelineError):
    """A server's process ended early. The text has its last log lines."""


class LocalServer:
    """One server process.

    Args:
        name: Its name in timelines, such as "target-0".
        module: What `python -m` runs.
        arguments: Further flags.
        directory: Where its log goes.
        tasks: Owns the task that watches the process.
        on_exit: Called when the process has ended.
        listen: The address to serve at.

    Attributes:
        name: The name in timelines.
        pid: Process id of the current process.
        addresses: The addresses that it bound, by their names in its announcement.
        exit_code: Exit code of the last process; None while it runs.
        log_file: The file with its log.
    """

    def __init__(
        self,
        name: str,
        module: str,
        *,
        arguments: Sequence[str],
        directory: Path,
        tasks: asyncio.TaskGroup,
        on_exit: Callable[[LocalServer], None],
        listen: str = ANY_PORT,
    ) -> None:
        self.name = name
        self.addresses: dict[str, str] = {}
        self.exit_code: int | None = None
        self.log_file = directory / f"{name}.log"
        self._module = module
        self._listen = listen
        self._arguments = arguments
        self._tasks = tasks
        self._on_exit = on_exit
        self._process: asyncio.subprocess.Process | None = None
        self._reached: dict[str, asyncio.Event] = {}
        self._logged_bytes = 0
        self._ended = asyncio.Event()

    @property
    def address(self) -> str:
        """Where it serves gRPC."""
        return self.addresses["address"]

    @property
    def metrics_address(self) -> str:
        """Where it serves metrics."""
        return self.addresses["metrics_address"]

    @property
    def pid(self) -> int:
        """Its process."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start the process; `wait_for` says how far it has come."""
        command = (
            *(sys.executable, "-m", self._module, "--listen", self._listen, "--exit-with-parent"),
            *("--metrics-listen", ANY_PORT, "--log-format", "text", *self._arguments),
        )
        self.exit_code = None
        self._reached = {"listening": asyncio.Event(), "ready": asyncio.Event()}
        self._ended = asyncio.Event()
        with self.log_file.open("ab") as log:
            # Its own session: Ctrl-C on the terminal is for this process, which then stops it.
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=_environment(),
                start_new_session=True,
            )
        self._tasks.create_task(self._watch(self._process), name=f"watch {self.name}")

    async def restart(self) -> None:
        """Start again after `kill` or `stop`, at the same address, and wait until it is ready."""
        self._listen = self.address
        await self.start()
        await self.wait_for("ready")

    async def wait_for(self, event: str) -> None:
        """Wait until it is `listening` or `ready`.

        Raises:
            ServerExitedError: It ended instead.
        """
        await self._reached[event].wait()
        if self.exit_code is not None:
            raise ServerExitedError(self.exit_report())

    async def is_heard(self) -> bool:
        """Whether it says that it is alive: in its log since this was asked last, or by its ports.

        One that loads a model, or downloads it, or waits for others is not ready for long.
        """
        byte_count = self.log_file.stat().st_size
        has_logged = byte_count != self._logged_bytes
        self._logged_bytes = byte_count
        return has_logged or await self._answers()

    async def _answers(self) -> bool:
        """Ask its health, which every server has but a gateway; that one shows metrics."""
        if "health_address" in self.addresses:
            return await _is_alive(self.addresses["health_address"])
        if "metrics_address" not in self.addresses:
            return False
        url = f"http://{self.metrics_address}/metrics"
        limit = aiohttp.ClientTimeout(total=_ANSWER_SECONDS)
        with suppress(aiohttp.ClientError, TimeoutError):
            async with aiohttp.ClientSession(timeout=limit) as session, session.get(url) as page:
                return page.status == HTTPStatus.OK
        return False

    def exit_report(self) -> str:
        """Say how it ended, with its last log lines."""
        code = self.exit_code or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        return f"{self.name} {how}; its last log lines:\n{self.last_log_lines()}"

    def last_log_lines(self) -> str:
        """Return what it logged last, indented."""
        lines = self.log_file.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return textwrap.indent("\n".join(lines) or "(nothing)", "    ")

    async def wait(self) -> None:
        """Wait until the process has ended, if it was started."""
        if self._process is not None:
            await self._ended.wait()

    def signal(self, number: int) -> None:
        """Send a signal, such as SIGSTOP; nothing happens if it has ended."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def kill(self) -> None:
        """End it without warning."""
        self.signal(signal.SIGKILL)
        await self.wait()

    async def stop(self) -> None:
        """Let it end what it is doing, for as long as it was told to drain."""
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(_drain_seconds(self._arguments) + _STOP_SECONDS):
                await self.wait()
        except TimeoutError:
            await self.kill()

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            self._read_announcement(line)
        self.exit_code = await process.wait()
        for waited_for in (self._ended, *self._reached.values()):
            waited_for.set()
        self._on_exit(self)

    def _read_announcement(self, line: bytes) -> None:
        """Take in one of the JSON lines by which a server tells how far it is."""
        try:
            words = json.loads(line)
        except ValueError:
            return
        if isinstance(words, dict) and words.get("event") in self._reached:
            self.addresses = {key: str(value) for key, value in words.items() if "address" in key}
            self._reached[words["event"]].set()


async def _is_alive(address: str) -> bool:
    from grpc import RpcError
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    alive = health_pb2.HealthCheckRequest(service="liveness")
    with suppress(RpcError, PacelineError):
        async with open_async_channel(address) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(alive, timeout=_ANSWER_SECONDS)
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
    return False


def _drain_seconds(arguments: Sequence[str]) -> float:
    """Return how long a server with these flags goes on after SIGTERM."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    for name in ("drain_delay_seconds", "drain_seconds"):
        default = ServerSettings.model_fields[name].default
        parser.add_argument(flag_of(name), type=float, default=default)
    known, _ = parser.parse_known_args(arguments)
    return float(known.drain_delay_seconds + known.drain_seconds)


def _environment() -> dict[str, str]:
    """Take out what was set for this process: the children are told all by flags."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith(VARIABLE_PREFIX)
    }
