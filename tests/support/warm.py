"""Servers that need not import for seconds: forked from a process that has done so.

That process is Python's own fork server, one for each test process. What it imports it takes from
what is installed, or PYTHONPATH, in the environment of the first test that starts a server. What
`python -m` does is seen by tests/contract/test_server_process.py, and by the tests of the commands.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import runpy
import signal
import subprocess
import sys
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    import psutil

PRELOADED = (
    "grpc.aio",
    "paceline_engine.torch_backend.transformers",
    "paceline_gateway.application",
    "paceline_model_server.application",
    "paceline_orchestrator.application",
    "transformers.models.llama.modeling_llama",
)
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(list(PRELOADED))


class WarmProcess:
    """`python -m MODULE ARGUMENTS`, with what tests use of a `subprocess.Popen`.

    Args:
        module: What is run as `__main__`.
        arguments: Its command line.
        output: The file to which stdout and stderr are appended.
        descriptor_limit: How many descriptors it may have at most; None is as many as this process.

    Attributes:
        stdin: The other end of the process's standard input.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        output: Path,
        descriptor_limit: int | None = None,
    ) -> None:
        theirs, self.stdin = _CONTEXT.Pipe(duplex=False)
        self._process = _CONTEXT.Process(
            target=_run,
            args=(module, list(arguments), theirs, output, dict(os.environ), descriptor_limit),
            daemon=True,
        )
        self._process.start()
        theirs.close()
        # Where a failed test left it, even stopped: multiprocessing would wait for its end.
        weakref.finalize(self, _end, self._process, self.stdin)

    @property
    def pid(self) -> int:
        return cast("int", self._process.pid)

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout or 0)
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        _send(self._process, number)


def is_fork_server(process: psutil.Process) -> bool:
    """Whether this is what forks, and not what it forked: both have its command line."""
    return process.ppid() == os.getpid() and "multiprocessing.forkserver" in " ".join(
        process.cmdline()
    )


def _send(process: BaseProcess, number: signal.Signals) -> None:
    if process.exitcode is None:
        with suppress(ProcessLookupError):
            os.kill(cast("int", process.pid), number)


def _end(process: BaseProcess, stdin: Connection) -> None:
    stdin.close()
    _send(process, signal.SIGKILL)


def _run(
    module: str,
    arguments: list[str],
    stdin: Connection,
    output: Path,
    environment: dict[str, str],
    descriptor_limit: int | None,
) -> None:
    # Servers look once for garbage among all that they have loaded. What was loaded before the fork
    # has none; to look at it takes 0.3 s of a core, and copies all its memory.
    gc.freeze()
    if descriptor_limit is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptor_limit, descriptor_limit))
    with output.open("ab") as file:
        for descriptor, source in enumerate((stdin, file, file)):
            os.dup2(source.fileno(), descriptor)
    stdin.close()
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - as long as the process
    Path("/proc/self/comm").write_text(module[:15])  # in lists of processes
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
