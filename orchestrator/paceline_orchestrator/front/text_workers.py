"""Work on long texts, off the event loop: a loop that tokenises delivers no tokens meanwhile.

A tokenizer comes with a model, and so from a stranger. Its regular expressions can take hours over
a text that suits them, and nothing ends a thread. So a piece of work that takes long is given up:
its request is told, and another thread takes its turn. The thread itself goes on to its end, and
its share gets no other one until then. A few threads may be lost in that way at the same time; then
long texts are refused, and short ones go on.
"""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

from paceline.errors import InvalidFieldError, OverloadedError
from paceline_orchestrator.fleet import shortage

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")

# Of as many characters, or tokens, the work takes some milliseconds: less than a thread's way.
_SHORT = 512
# Of the processor's time: a short text that takes more has met a bad tokenizer.
_SURPRISING_SECONDS = 0.2
_THREADS = 2
_MOST_LOST = 4
# The longest prompt takes 0.2 s.
_MOST_SECONDS = 20.0


class TextWorkers:
    """A few threads, and each share's work in one of them at a time.

    So long texts of one client make another one wait for one of them at most.

    Args:
        most_seconds: What a piece of work may take.
    """

    def __init__(self, *, most_seconds: float = _MOST_SECONDS) -> None:
        self._most_seconds = most_seconds
        self._turns = asyncio.Semaphore(_THREADS)
        # A share's lock, for as long as somebody has it or waits for it.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._lost_shares: set[str] = set()
        self._is_wary = False

    async def run(
        self, work: Callable[[], _T], *, size: int, share: str, field: str = "text"
    ) -> _T:
        """Do it here and now if it is short, otherwise in a thread.

        Once a short text took long, it is not done here any more.

        Args:
            work: What to do; it lets the interpreter go where it takes long.
            size: Characters or tokens that it works on.
            share: Whose it is.
            field: Where the text came from, for errors.

        Raises:
            InvalidFieldError: It takes too long.
            OverloadedError: Work of this share, or of too many others, has been given up and still
                runs.
        """
        if size <= _SHORT and not self._is_wary:
            return self._do_here(work)
        self._refuse_if_lost(share)
        lock = self._locks.setdefault(share, asyncio.Lock())
        await lock.acquire()
        try:
            self._refuse_if_lost(share)
            await self._turns.acquire()
        except BaseException:
            lock.release()
            raise
        if len(self._lost_shares) >= _MOST_LOST:  # since it began to wait
            self._turns.release()
            lock.release()
            self._refuse_if_lost(share)
        done = _in_thread(work)
        loop = asyncio.get_running_loop()
        given_up: asyncio.Future[None] = loop.create_future()
        timer = loop.call_later(self._most_seconds, self._give_up, share, given_up)
        # A thread goes on when nobody waits any more, and its share's lock is held as long.
        done.add_done_callback(
            lambda _: self._end(share, lock=lock, timer=timer, given_up=given_up)
        )
        await asyncio.wait((done, given_up), return_when=asyncio.FIRST_COMPLETED)
        if done.done():
            return done.result()
        raise InvalidFieldError.of(
            field, f"the model's tokenizer has taken {self._most_seconds:g} s over it"
        )

    def _do_here(self, work: Callable[[], _T]) -> _T:
        began = time.thread_time()  # others' work on the machine does not count
        try:
            return work()
        finally:
            self._is_wary = time.thread_time() - began > _SURPRISING_SECONDS

    def _refuse_if_lost(self, share: str) -> None:
        if share in self._lost_shares or len(self._lost_shares) >= _MOST_LOST:
            raise OverloadedError(
                "the model's tokenizer still works on texts that it takes very long over",
                retry_after_seconds=shortage.RETRY_SECONDS,
            )

    def _give_up(self, share: str, given_up: asyncio.Future[None]) -> None:
        """Let another thread take the turn of one that takes too long."""
        self._lost_shares.add(share)
        self._turns.release()
        given_up.set_result(None)

    def _end(
        self,
        share: str,
        *,
        lock: asyncio.Lock,
        timer: asyncio.TimerHandle,
        given_up: asyncio.Future[None],
    ) -> None:
        timer.cancel()
        lock.release()
        if given_up.done():
            self._lost_shares.discard(share)
        else:
            self._turns.release()


def _in_thread(work: Callable[[], _T]) -> asyncio.Future[_T]:
    """Do work in a thread that holds up nobody's end: a process that ends does not wait for it."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_T] = loop.create_future()

    def do() -> None:
        try:
            answer = work()
        except BaseException as error:  # noqa: BLE001 - the waiting task gets it
            _tell(loop, done, error=error)
        else:
            _tell(loop, done, answer=answer)

    threading.Thread(target=do, name="paceline-text", daemon=True).start()
    return done


def _tell(loop: asyncio.AbstractEventLoop, done: asyncio.Future[Any], **outcome: Any) -> None:
    def tell() -> None:
        if "error" in outcome:
            done.set_exception(outcome["error"])
            done.exception()  # it counts as seen: nobody may wait any more
        else:
            done.set_result(outcome["answer"])

    with suppress(RuntimeError):  # the loop is closed: the process ends
        loop.call_soon_threadsafe(tell)
