"""Servers as processes of their own, for tests to ask, kill, freeze and count."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from support.ports import free_address
from support.warm import WarmProcess, is_fork_server

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Everything that a test run starts inherits this variable, so that nothing can hide from the check
# that it is gone: a child of a killed child is found, too.
RUN_VARIABLE = "TEST_RUN_OF_PACELINE"

# gRPC would try again after 1 s, and then later and later.
_EAGER = (("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 50))
_READY_SECONDS = 240.0  # loading torch five times at once on a busy machine of two cores


class ServerProcess:
    """One server, run as `python -m paceline_<role>`.

    Args:
        role: "drafter", "target" or "orchestrator".
        flags: More of them.
        name: In logs; the role by default.
        tls: Whether it speaks TLS, so that its health is asked on a port of its own.
        is_warm: Whether it is spared the seconds of its imports, by a fork. Libraries that read the
            environment while they are imported need a process that imports them itself.
        descriptor_limit: How many descriptors a warm one may have at most (`ulimit -n`).

    Attributes:
        address: Its gRPC address, which it keeps over restarts.
    """

    def __init__(
        self,
        role: str,
        *flags: str,
        name: str = "",
        tls: bool = False,
        is_warm: bool = True,
        descriptor_limit: int | None = None,
    ) -> None:
        assert is_warm or descriptor_limit is None
        self.role = role
        self._descriptor_limit = descriptor_limit
        self._is_warm = is_warm
        self.name = name or role
        self.address = free_address()
        self.metrics_address = free_address()
        self._health_address = free_address() if tls else self.address
        self._flags = [
            *(f"--listen={self.address}", f"--metrics-listen={self.metrics_address}"),
            *self._health_flags(tls),
            *("--exit-with-parent", "--log-level=info", *flags),
        ]
        self._process: WarmProcess | subprocess.Popen[bytes] | None = None
        self._taken: tuple[int, tuple[int, int]] | None = None
        self._log = tempfile.NamedTemporaryFile()  # noqa: SIM115 - as long as the server

    def __repr__(self) -> str:
        return f"<{self.name} at {self.address}>"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        return Path(self._log.name).read_text(errors="replace")

    @property
    def health_address(self) -> str:
        """Where its health is asked: on a port of its own where it speaks TLS."""
        return self._health_address

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        assert not self.is_running
        module, output = f"paceline_{self.role}", Path(self._log.name)
        if self._is_warm:
            self._process = WarmProcess(
                module, self._flags, output=output, descriptor_limit=self._descriptor_limit
            )
        else:
            with output.open("ab") as file:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", module, *self._flags],
                    stdin=subprocess.PIPE,
                    stdout=file,
                    stderr=file,
                )
        return self

    def wait_until_ready(self) -> None:
        """Wait until the server itself says that it is serving."""
        assert self._process is not None
        ends = time.monotonic() + _READY_SECONDS
        while time.monotonic() < ends:
            assert self._process.poll() is None, (
                f"{self} ended with {self._process.poll()}:\n{self.log}"
            )
            if self._is_serving():
                return
        raise AssertionError(f"{self} is not ready after {_READY_SECONDS:g} s:\n{self.log}")

    def _health_flags(self, tls: bool) -> list[str]:
        return [f"--health-listen={self._health_address if tls else ''}"]

    def _is_serving(self) -> bool:
        return _is_serving(self._health_address)

    def revive(self) -> None:
        """Start it again if it has ended, let it run if it cannot, and wait until it serves."""
        self.thaw()
        self.give_descriptors_back()
        if not self.is_running:
            self.start()
        self.wait_until_ready()

    def kill(self, *, waits: bool = True) -> None:
        """End it as a crash does: nothing is said, nothing is closed."""
        self._signal(signal.SIGKILL)
        if waits:
            self.wait(60)

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def take_descriptors(self) -> None:
        """Let it open nothing more: no file, no connection; until it closes one of those it has."""
        used = {int(it.name) for it in Path(f"/proc/{self.pid}/fd").iterdir()}
        first_free = next(number for number in count() if number not in used)
        soft, hard = resource.prlimit(self.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(self.pid, resource.RLIMIT_NOFILE, (first_free, hard))
        if self._taken is None or self._taken[0] != self.pid:
            self._taken = self.pid, (soft, hard)

    def give_descriptors_back(self) -> None:
        """Undo `take_descriptors`, if that was done to the process that runs now."""
        if self._taken is not None and self._taken[0] == self.pid:
            with suppress(ProcessLookupError):
                resource.prlimit(self.pid, resource.RLIMIT_NOFILE, self._taken[1])
        self._taken = None

    @property
    def descriptor_count(self) -> int:
        return psutil.Process(self.pid).num_fds()

    @property
    def thread_count(self) -> int:
        return psutil.Process(self.pid).num_threads()

    def terminate(self) -> None:
        """Ask it to finish its work and end."""
        self._signal(signal.SIGTERM)

    def wait(self, timeout_seconds: float = 180.0) -> int:
        """Wait for its end and return its exit code."""
        assert self._process is not None
        return self._process.wait(timeout_seconds)

    def stop(self) -> None:
        """End it by whatever it takes."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()  # it exits with its parent
        self.thaw()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        if self.is_running:
            self._process.send_signal(number)

    def calls(self) -> list[dict[str, Any]]:
        """Return what the server noted of each call, the oldest first."""
        return json.loads(self.page("/debug/calls"))

    def metric(self, name: str, **labels: str) -> float:
        """Add up a metric's samples with these labels; 0 where there is none."""
        total = 0.0
        for line in self.page("/metrics").splitlines():
            found = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line)
            if found is None or found[1] != name:
                continue
            sample = dict(re.findall(r'(\w+)="([^"]*)"', found[2] or ""))
            if labels.items() <= sample.items():
                total += float(found[3])
        return total

    def page(self, path: str) -> str:
        """Return what its metrics port shows there."""
        with urllib.request.urlopen(f"http://{self.metrics_address}{path}", timeout=60) as page:
            return page.read().decode()


class GatewayProcess(ServerProcess):
    """A gateway, which speaks HTTP."""

    def __init__(self, *flags: str, name: str = "", descriptor_limit: int | None = None) -> None:
        super().__init__("gateway", *flags, name=name, descriptor_limit=descriptor_limit)

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def _health_flags(self, tls: bool) -> list[str]:
        return []

    def _is_serving(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(f"{self.url}/health/ready", timeout=5):
            return True
        time.sleep(0.05)
        return False


@contextmanager
def running(*servers: ServerProcess) -> Iterator[None]:
    """Start servers at once, wait until all are ready, and end them whatever happens."""
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
            server.start()
        for server in servers:
            server.wait_until_ready()
        yield


def last_words(role: str, *flags: str) -> str:
    """Return the last line of a server that does not start."""
    server = ServerProcess(role, *flags)
    try:
        assert server.start().wait() != 0
        return server.log.strip().splitlines()[-1]
    finally:
        server.stop()


def leftovers() -> Sequence[str]:
    """Name the living processes that this test run started, but for the run itself.

    And but for multiprocessing's resource tracker and fork server, which are Python's own and end
    with the run.
    """
    run = os.environ[RUN_VARIABLE]
    found = []
    for process in psutil.process_iter():
        try:
            of_this_run = process.environ().get(RUN_VARIABLE) == run
            if of_this_run and process.pid != os.getpid() and process.status() != "zombie":
                command = " ".join(process.cmdline())
                own = "multiprocessing.resource_tracker" in command or is_fork_server(process)
                if not own:
                    found.append(f"{process.pid} {process.name()}: {command}")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def _is_serving(address: str) -> bool:
    serving = health_pb2.HealthCheckResponse.SERVING
    with grpc.insecure_channel(address, options=_EAGER) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            watch = stub.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=2.0)
            return any(response.status == serving for response in watch)
        except grpc.RpcError:
            return False
