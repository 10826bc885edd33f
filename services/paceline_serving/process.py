"""The process of a server: its start, its signals and its end.

A second signal ends it at once, and so does the parent's death, if that is set. Each step is
printed on standard output as a JSON line with the bound addresses; logs go to standard error.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import multiprocessing
import os
import resource
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from paceline_serving import telemetry
from paceline_serving.grpc_batches import free_all_batches
from paceline_serving.one_line import on_one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paceline_serving.server_settings import RunSettings

_log = logging.getLogger(__name__)

_MOST_CONNECTIONS = 1 << 20
_MOST_SIDE_CONNECTIONS = 128


class Process(Protocol):
    """A server that can begin and end, for gRPC or HTTP."""

    async def begin(self) -> None:
        """Bind the ports, load, and set health to SERVING."""

    def stop_soon(self, failure: str | None = None) -> None:
        """Ask for the server's end; `failure` says why, if it cannot serve any more."""

    async def stopping(self) -> str | None:
        """Wait until the end is asked for; return the failure, if it is one."""

    async def finish(self, *, drain: bool = True) -> None:
        """Drain, unless that is useless, and stop, in bounded time."""


def announce(event: str, addresses: Mapping[str, str]) -> None:
    """Print a step of this process for its parent."""
    print(json.dumps({"event": event, "pid": os.getpid(), **addresses}), flush=True)
    _log.info(event, extra=dict(addresses))


def run_process(new_process: Callable[[], Process], settings: RunSettings) -> int:
    """Serve until a signal; return the exit code.

    0 after a drain, 1 if the server failed to start or broke.

    Args:
        new_process: Makes the server, in the event loop.
    """
    telemetry.configure_logging(level=settings.log_level, log_format=settings.log_format)
    _allow_many_connections()
    free_all_batches()
    return asyncio.run(_serve(new_process, settings))


async def _serve(new_process: Callable[[], Process], settings: RunSettings) -> int:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_log_unhandled)
    if settings.exit_with_parent:
        _exit_with_parent()
    # Nothing is open before "ready", so there is nothing to drain.
    _on_signals(loop, lambda: _exit_at_once(0))
    try:
        process = new_process()
        await process.begin()
    except Exception as error:  # noqa: BLE001 - every exception ends the process, in one line
        _log.debug("failed to start", exc_info=error)
        reason = " ".join(str(error).split()) or type(error).__name__
        print(f"failed to start: {on_one_line(reason)}", file=sys.stderr)
        # Loading may continue in a thread that cannot be stopped.
        _exit_at_once(1)
    leave_to_no_collector()
    _on_signals(loop, process.stop_soon)
    failure = await process.stopping()
    _on_signals(loop, lambda: _exit_at_once(1))
    if failure is not None:
        _log.error("this server has to stop: %s", failure)
    await process.finish(drain=failure is None)
    if failure is not None:
        # A thread may hang in its device, and libraries wait for it when the interpreter ends.
        _exit_at_once(1)
    return 0


def leave_to_no_collector() -> None:
    """Exclude all present objects from garbage collection, which would take longer than a token.

    Python delays a full collection until the new objects are a quarter of those that the last one
    found. So the last one has to find nothing, or the garbage of requests would stay too long.
    """
    gc.collect()
    gc.freeze()
    gc.collect()


def connection_limit() -> int:
    """Return the limit of clients' connections: half of the descriptors.

    The others are for probes, scrapers, model servers and files.
    """
    return _descriptor_count() // 2


def side_connection_limit() -> int:
    """Return the limit of connections at a port beside the main one, such as the probes'.

    A sixteenth of the descriptors, 128 at most: all of these ports together leave a quarter.
    """
    return max(1, min(_descriptor_count() // 16, _MOST_SIDE_CONNECTIONS))


def _descriptor_count() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else min(soft, _MOST_CONNECTIONS)


def _allow_many_connections() -> None:
    """Raise the soft limit of descriptors, often 1024, to the hard one: a connection takes one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS reports "unlimited", but refuses it
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _on_signals(loop: asyncio.AbstractEventLoop, action: Callable[[], None]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, action)


def _exit_at_once(code: int) -> NoReturn:
    """End the process without waiting for threads, and with it the processes of libraries."""
    _kill_children()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


def _kill_children() -> None:
    """Kill what `multiprocessing` has begun here, and on Linux all that has begun there.

    Nothing else does it for a process that ends by `os._exit`; and a child that loads, or waits for
    another node, may heed no other signal.
    """
    for child in multiprocessing.active_children():
        if child.pid is not None:
            _kill(child.pid)


def _kill(process_id: int) -> None:
    """Kill a process, before it can begin more of them, and its children."""
    with suppress(ProcessLookupError):
        os.kill(process_id, signal.SIGSTOP)
        children = _children_of(process_id)
        os.kill(process_id, signal.SIGKILL)
        for child in children:
            _kill(child)


def _children_of(process_id: int) -> list[int]:
    found: list[int] = []
    for thread in Path(f"/proc/{process_id}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended, or this kernel does not say it
            found += map(int, thread.read_text().split())
    return found


def _exit_with_parent() -> None:
    """End this process when the other end of standard input closes: the parent process ended.

    The kernel closes it at every kind of end, and a thread sees it even while the loop hangs.
    A death signal (prctl) would follow the parent's *thread*, and exists on Linux only.
    """

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        _exit_at_once(1)

    threading.Thread(target=wait, name="paceline-parent", daemon=True).start()


def _log_unhandled(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an exception that no task awaited, without the text that asyncio would add."""
    _log.error(context["message"], exc_info=context.get("exception"))
