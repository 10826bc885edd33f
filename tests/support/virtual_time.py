"""Time that passes only while everybody waits: an event loop that jumps to its next timer.

Nothing sleeps, so seconds pass in microseconds, and what happens at the same time on every machine
happens at the same time in every run. Threads have no place in it: what is given to one is done at
once, by the loop.
"""

from __future__ import annotations

import asyncio
import math
import selectors
import time
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

# Not 0, which code takes for "never".
_BEGIN_NS = 1000 * 10**9
_LONGEST_SECONDS = 3600.0
# Turns of the loop within one instant. What takes more never lets time go on.
_MOST_TURNS = 100_000


class StuckError(AssertionError):
    """Nobody will ever wake up those who wait; or they wait for longer than any test lasts."""


class _Clock:
    """Replaces those of the `time` module; what runs takes no time."""

    def __init__(self) -> None:
        self.now_ns = _BEGIN_NS

    def nanoseconds(self) -> int:
        return self.now_ns

    def seconds(self) -> float:
        return self.now_ns / 1e9

    @contextmanager
    def replacing_the_real_one(self) -> Iterator[None]:
        with patch.multiple(
            time,
            monotonic=self.seconds,
            monotonic_ns=self.nanoseconds,
            perf_counter=self.seconds,
            perf_counter_ns=self.nanoseconds,
        ):
            yield


class _Jumps(selectors.DefaultSelector):
    """Waits for nothing: where the loop would sleep until its next timer, the clock jumps there."""

    def __init__(self, clock: _Clock, *, limit_seconds: float) -> None:
        super().__init__()
        self._clock = clock
        self._ends_ns = clock.now_ns + round(limit_seconds * 1e9)
        self._turns = 0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        self._turns += 1
        if self._turns > _MOST_TURNS:
            self._give_up("time stands still: the loop never runs out of work")
        if ready or timeout == 0:
            return ready
        if timeout is None:
            self._give_up("nothing will ever happen again")
        self._turns = 0
        self._clock.now_ns += math.ceil(timeout * 1e9)
        if self._clock.now_ns > self._ends_ns:
            self._give_up("it takes too long")
        return ready

    def _give_up(self, why: str) -> None:
        self._turns, self._ends_ns = 0, math.inf  # what is cancelled now may take time to end
        waiting = "\n".join(sorted(f"  {_place(task)}" for task in asyncio.all_tasks(_loop())))
        raise StuckError(f"{why}. Those who wait:\n{waiting}")


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, clock: _Clock, *, limit_seconds: float) -> None:
        self._virtual_clock = clock
        super().__init__(_Jumps(clock, limit_seconds=limit_seconds))

    def time(self) -> float:
        return self._virtual_clock.seconds()

    def run_in_executor(
        self, executor: object, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - whoever awaits it gets it, as from a thread
            done.set_exception(error)
        return done


def run_virtually(
    work: Coroutine[Any, Any, Any], *, limit_seconds: float = _LONGEST_SECONDS
) -> Any:
    """Run it to its end on a clock of its own, and return what it returns.

    Raises:
        StuckError: It hangs, or takes longer than that; the message names the tasks that wait.
    """
    clock = _Clock()
    with (
        clock.replacing_the_real_one(),
        asyncio.Runner(
            loop_factory=lambda: _VirtualLoop(clock, limit_seconds=limit_seconds)
        ) as runner,
    ):
        return runner.run(work)


def virtually(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an asynchronous test on a clock of its own."""

    @wraps(test)
    def run(*arguments: Any, **fixtures: Any) -> None:
        run_virtually(test(*arguments, **fixtures))

    return run


def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def _place(task: asyncio.Task[Any]) -> str:
    """Say what a task is called, and where it waits."""
    awaited, line = task.get_coro(), "not yet begun"
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "ag_frame", None)
        if frame is not None and frame.f_lasti > 0:
            line = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "ag_await", None)
    return f"{task.get_name()}: {line}"
