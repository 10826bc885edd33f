"""The end of processes that a library has begun with `multiprocessing`, and of theirs."""

from __future__ import annotations

import multiprocessing
import os
import signal
from contextlib import suppress
from pathlib import Path


def kill_children() -> None:
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
