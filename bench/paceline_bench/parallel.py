"""Computes on all cores."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")


def compute_all(
    function: Callable[[_Job], _Result],
    jobs: Sequence[_Job],
    *,
    on_done: Callable[[_Job], None] = lambda _: None,
    processes: int | None = None,
) -> list[_Result]:
    """Apply a function to every job, each in some process, and return the results in order.

    Processes are spawned, not forked: a fork of a process that uses gRPC may hang.

    Args:
        function: Of a module's top level.
        jobs: Its arguments.
        on_done: Told of each job that is done, in whatever order that happens.
        processes: How many to use; None for one for each core. With one, it is this process.
    """
    count = min(len(jobs), processes or os.cpu_count() or 1)
    if count <= 1:
        return [_tell(on_done, job, function(job)) for job in jobs]
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, mp_context=context, initializer=_follow_parent)
    try:
        futures = {pool.submit(function, job): job for job in jobs}
        for future in as_completed(futures):
            _tell(on_done, futures[future], future.result())
        return [future.result() for future in futures]
    finally:
        pool.shutdown(cancel_futures=True)


def _tell(on_done: Callable[[_Job], None], job: _Job, result: _Result) -> _Result:
    on_done(job)
    return result


def _follow_parent() -> None:
    """Leave Ctrl-C to the parent, which then ends these; and end when it dies some other way."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
