"""One server process on this machine: starts it, follows it, signals it, stops it."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from contextlib import suppress
from http import HTTPStatus
from typing import TYPE_CHECKING

import aiohttp

from paceline.channel import open_async_channel
from paceline.errors import PacelineError
from paceline_local.early_exit import ServerExitedError, last_lines
from paceline_serving.server_settings import ServerSettings
from paceline_serving.settings import VARIABLE_PREFIX, flag_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

ANY_PORT = "127.0.0.1:0"
# Time in which a live server answers, on a busy machine.
_ANSWER_SECONDS = 5.0
# Time for a server to stop after its drain.
_STOP_SECONDS = 10.0


class LocalServer:
    """One server process.

    Args:
        name: Its name in timelines, such as "target-0".
        module: The module for `python -m`.
        arguments: Further flags.
        directory: The directory of its log.
        tasks: Owns the task that watches the process.
        on_exit: Called when the process has ended.
        listen: The address to listen on.

    Attributes:
        name: The name in timelines.
        pid: Process id of the current process.
        addresses: The bound addresses, by their names in the server's announcement.
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
        """The address of gRPC."""
        return self.addresses["address"]

    @property
    def metrics_address(self) -> str:
        """The address of metrics."""
        return self.addresses["metrics_address"]

    @property
    def pid(self) -> int:
        """The server's process."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start the process; `wait_for` waits for its steps."""
        command = (
            *(sys.executable, "-m", self._module, "--listen", self._listen, "--exit-with-parent"),
            *("--metrics-listen", ANY_PORT, "--log-format", "text", *self._arguments),
        )
        self.exit_code = None
        self._reached = {"listening": asyncio.Event(), "ready": asyncio.Event()}
        self._ended = asyncio.Event()
        with self.log_file.open("ab") as log:
            # Its own session: Ctrl-C on the terminal reaches only this process, which stops it.
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
        """Wait until the server is `listening` or `ready`.

        Raises:
            ServerExitedError: The server ended instead.
        """
        await self._reached[event].wait()
        if self.exit_code is not None:
            raise self.exit_error()

    def has_reached(self, event: str) -> bool:
        """Whether the server is, or was, `listening` or `ready`."""
        return event in self._reached and self._reached[event].is_set()

    async def is_heard(self) -> bool:
        """Whether the server is alive: it logged since the last call of this, or its ports answer.

        A server that loads or downloads a model, or waits for others, can be unready for long.
        """
        byte_count = self.log_file.stat().st_size
        has_logged = byte_count != self._logged_bytes
        self._logged_bytes = byte_count
        return has_logged or await self._answers()

    async def _answers(self) -> bool:
        """Ask for its health; a gateway has none, so its metrics are asked for."""
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

    def exit_error(self) -> ServerExitedError:
        """Describe the server's end, with its last log lines."""
        return ServerExitedError(self.name, code=self.exit_code or 0, log=self._log())

    def last_log_lines(self) -> str:
        """Return the last log lines, indented."""
        return last_lines(self._log())

    def _log(self) -> str:
        return self.log_file.read_text(errors="replace")

    async def wait(self) -> None:
        """Wait until the process has ended, if it was started."""
        if self._process is not None:
            await self._ended.wait()

    def signal(self, number: int) -> None:
        """Send a signal, such as SIGSTOP; does nothing after the process ended."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def kill(self) -> None:
        """Kill the process."""
        self.signal(signal.SIGKILL)
        await self.wait()

    async def stop(self) -> None:
        """Let the server drain and stop."""
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
        """Read one of the JSON lines by which a server announces its steps."""
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
    """Remove this process's own settings: child processes get all options as flags."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith(VARIABLE_PREFIX)
    }
