"""Work on long texts, off the event loop: a loop that tokenises delivers no tokens meanwhile."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from paceline_orchestrator.calls.share_locks import ShareLocks

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["TextWorkers"]

_T = TypeVar("_T")

# Of as many characters, or tokens, the work takes some milliseconds: less than a thread's way.
_SHORT = 512
_THREADS = 2


class TextWorkers:
    """A few threads, and each share's work in one of them at a time.

    So long texts of one client make another one wait for one of them at most.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="paceline-text")
        self._locks = ShareLocks()

    async def run(self, work: Callable[[], _T], *, size: int, share: str) -> _T:
        """Do it here and now if it is short, else in a thread.

        Args:
            work: What to do; it lets the interpreter go where it takes long.
            size: Characters or tokens that it works on.
            share: Whose it is.
        """
        if size <= _SHORT:
            return work()
        lock = self._locks.of(share)
        await lock.acquire()
        done = asyncio.get_running_loop().run_in_executor(self._threads, work)
        # A thread goes on when nobody waits any more, and its share's lock is held as long.
        done.add_done_callback(lambda _: lock.release())
        return await asyncio.shield(done)
