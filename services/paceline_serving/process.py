"""A process that serves: how it begins, which signals it hears, and how it ends.

A second signal, or the parent's death if asked for, ends it at once. Each step is printed on
standard output as a JSON line with the bound addresses, for whoever started it; logs go to standard
error.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import resource
import signal
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from paceline_serving import telemetry
from paceline_serving.grpc_batches import free_all_batches

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paceline_serving.server_settings import RunSettings

_log = logging.getLogger(__name__)

_MOST_CONNECTIONS = 1 << 20
_MOST_SIDE_CONNECTIONS = 128


class Process(Protocol):
    """A server that can begin and end, whatever it speaks."""

    async def begin(self) -> None:
        """Bind the ports, load, and say that it serves."""

    def stop_soon(self, failure: str | None = None) -> None:
        """Ask for the end: of a healthy server, or of one that can serve no more (and why)."""

    async def stopping(self) -> str | None:
        """Wait until someone asked for the end; return why, if it is a failure."""

    async def finish(self, *, drain: bool = True) -> None:
        """Drain (unless that is in vain) and stop, in bounded time."""


def announce(event: str, addresses: Mapping[str, str]) -> None:
    """Tell whoever started this process how far it is."""
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
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the end, in one line
        _log.debug("failed to start", exc_info=error)
        reason = " ".join(str(error).split()) or type(error).__name__
        print(f"failed to start: {reason}", file=sys.stderr)
        # Loading may go on in a thread that cannot be stopped.
        _exit_at_once(1)
    leave_to_no_collector()
    _on_signals(loop, process.stop_soon)
    failure = await process.stopping()
    _on_signals(loop, lambda: _exit_at_once(1))
    if failure is not None:
        _log.error("this server has to stop: %s", failure)
    await process.finish(drain=failure is None)
    if failure is not None:
        # A thread may hang in its device, and libraries wait for that when the interpreter ends.
        _exit_at_once(1)
    return 0


def leave_to_no_collector() -> None:
    """Keep what is there for good: no collection looks at it, which takes longer than a token.

    And let collections come in time for what requests leave: a full one waits until a quarter of
    what the last one found is new, so the last one has to find nothing.
    """
    gc.collect()
    gc.freeze()
    gc.collect()


def connection_limit() -> int:
    """Return how many clients' connections to take: as many as half of the descriptors.

    The others are for probes, scrapers, model servers and files.
    """
    return _descriptor_count() // 2


def side_connection_limit() -> int:
    """Return how many connections to take at a port beside the main one, such as the probes'.

    A sixteenth of the descriptors, 128 at most: all of these ports together leave a quarter.
    """
    return max(1, min(_descriptor_count() // 16, _MOST_SIDE_CONNECTIONS))


def _descriptor_count() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else min(soft, _MOST_CONNECTIONS)


def _allow_many_connections() -> None:
    """Raise the soft limit of open descriptors, often 1024, to the hard one: each takes one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS calls it unlimited, and does not mean it
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _on_signals(loop: asyncio.AbstractEventLoop, action: Callable[[], None]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, action)


def _exit_at_once(code: int) -> NoReturn:
    """End the process without waiting for threads; nothing it holds outlives it."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


def _exit_with_parent() -> None:
    """End this process when the other end of standard input closes: its parent died.

    The kernel closes it, however the parent died, and a thread sees it even while the loop hangs.
    A death signal (prctl) would follow the parent's *thread*, and exists on Linux only.
    """

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        _exit_at_once(1)

    threading.Thread(target=wait, name="paceline-parent", daemon=True).start()


def _log_unhandled(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what nobody awaited, without the text that asyncio would add."""
    _log.error(context["message"], exc_info=context.get("exception"))
