"""Makes grpc.aio free the memory of each batch of operations, however the batch ends.

grpc.aio hands core an array of operations for each batch of a call: a message and its metadata, or
room for what comes. It frees the array in the coroutine that waits for the batch, after the wait.
If the wait ends with an exception the array is lost for the life of the process (grpc/grpc#43360).
That is so if the waiting task is cancelled, and if core says that the batch failed: the call's
client has left, or the call was cancelled before its headers came. One such batch is 100 bytes, and
300 to 1,300 with what it was to send. An orchestrator cancels calls with every rejection, and the
clients of its drafters leave in the middle of a stream.

Here the library's coroutine waits for a future of ours, which nobody can cancel, and which says
that all went well. So the coroutine goes on to free the array, and it does so when core has ended
the batch. Who called is told of failures and cancels as before, and as soon.

    caller ── await ──► Batch.waiter ◄── result, failure ── Batch ◄── core
                                                              └──── resumes ──► the coroutine

That takes one private name of the library, as a module's global that its other functions look up at
each call. In a version without it the memory is lost as described, and a line in the log says so.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined] # it is compiled

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator

_log = logging.getLogger(__name__)

_NAME = "execute_batch"


def free_all_batches() -> None:
    """Make grpc.aio free what it loses, in this whole process. It can be called again.

    Cost: some microseconds for each batch.
    """
    execute: Callable[..., Coroutine[Any, Any, None]] | None = getattr(cygrpc, _NAME, None)
    if execute is None:
        _log.warning(
            "grpcio %s has no private name %s: each cancelled call leaks up to 1.3 KiB of memory",
            grpc.__version__,
            _NAME,
        )
    elif not isinstance(execute, _Freeing):
        setattr(cygrpc, _NAME, _Freeing(execute))


class _Freeing:
    """Stands for the library's coroutine function.

    Args:
        execute: What it stands for.
    """

    def __init__(self, execute: Callable[..., Coroutine[Any, Any, None]]) -> None:
        self._execute = execute

    def __call__(
        self, call: Any, operations: Any, loop: asyncio.AbstractEventLoop
    ) -> asyncio.Future[None]:
        """Hand core a batch, and return the future of its end.

        Raises:
            grpc.aio.InternalError: Core does not take it.
        """
        batch = _Batch(loop)
        batch.begin(self._execute(call, operations, batch))
        return batch.waiter


class _Batch:
    """A batch that core has; to the library's coroutine an event loop, and a future of that.

    Attributes:
        waiter: Of who called. It can be cancelled, and the batch goes on.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._execution: Coroutine[Any, Any, None] | None = None
        self.waiter: asyncio.Future[None] = loop.create_future()

    def begin(self, execution: Coroutine[Any, Any, None]) -> None:
        """Run the coroutine up to its wait."""
        execution.send(None)
        self._execution = execution

    # --- as an event loop ---------------------------------------------------------------------

    def create_future(self) -> _Batch:
        """Return what the coroutine waits for."""
        return self

    def call_soon_threadsafe(self, callback: Callable[..., None], *arguments: object) -> None:
        """Call what tells of the batch's end: here and now, if this is its loop's thread."""
        if asyncio.get_running_loop() is self._loop:
            callback(*arguments)
        else:
            self._loop.call_soon_threadsafe(callback, *arguments)

    # --- as a future --------------------------------------------------------------------------

    def __await__(self) -> Generator[_Batch, None, None]:
        yield self

    def cancelled(self) -> bool:
        """Return False: core has the batch until it has ended it."""
        return False

    def set_result(self, _result: None) -> None:
        """Take notice of its end."""
        try:
            self._free()
        finally:
            if not self.waiter.done():
                self.waiter.set_result(None)

    def set_exception(self, failure: Exception) -> None:
        """Take notice of its failure."""
        try:
            self._free()
        finally:
            if not self.waiter.done():
                self.waiter.set_exception(failure)
                self.waiter.exception()  # a task that is cancelled in this turn never asks for it

    def _free(self) -> None:
        """Let the coroutine go on behind its wait, to its end."""
        assert self._execution is not None, "core has the batch"
        execution, self._execution = self._execution, None
        try:
            execution.send(None)
        except StopIteration:
            return
        raise AssertionError("the library's coroutine waits for something else as well")
