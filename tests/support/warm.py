"""Servers that need not import for seconds: forked from a process that has done so.

That process is Python's own fork server, one for each test process. What `python -m` does is seen
by tests/contract/test_server_process.py, and by the tests of the commands.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import signal
    from collections.abc import Sequence
    from multiprocessing.connection import Connection
    from pathlib import Path

    import psutil

__all__ = ["WarmProcess", "is_fork_server"]

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "grpc.aio",
        "paceline_engine.backends.transformers",
        "paceline_gateway.application",
        "paceline_model_server.application",
        "paceline_orchestrator.application",
        "transformers.models.llama.modeling_llama",
    ]
)


class WarmProcess:
    """`python -m MODULE ARGUMENTS`, with what tests use of a `subprocess.Popen`.

    Args:
        module: What is run as `__main__`.
        arguments: Its command line.
        output: The file to which stdout and stderr are appended.

    Attributes:
        stdin: The other end of the process's standard input.
    """

    def __init__(self, module: str, arguments: Sequence[str], *, output: Path) -> None:
        theirs, self.stdin = _CONTEXT.Pipe(duplex=False)
        self._process = _CONTEXT.Process(
            target=_run,
            args=(module, list(arguments), theirs, output, dict(os.environ)),
            daemon=True,
        )
        self._process.start()
        theirs.close()

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
        if self._process.exitcode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def is_fork_server(process: psutil.Process) -> bool:
    """Whether this is what forks, and not what it forked: both have its command line."""
    return process.ppid() == os.getpid() and "multiprocessing.forkserver" in " ".join(
        process.cmdline()
    )


def _run(
    module: str,
    arguments: list[str],
    stdin: Connection,
    output: Path,
    environment: dict[str, str],
) -> None:
    with output.open("ab") as file:
        for descriptor, source in enumerate((stdin, file, file)):
            os.dup2(source.fileno(), descriptor)
    stdin.close()
    sys.stdin, sys.stdout, sys.stderr = (
        open(descriptor, mode, closefd=False)  # noqa: SIM115 - as long as the process
        for descriptor, mode in enumerate("rww")
    )
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
