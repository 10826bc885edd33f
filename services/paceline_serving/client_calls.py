"""Calls to another server that leave no memory behind when they are cancelled.

grpc.aio hands core an array of operations for each batch of a call, and frees it in the task that
waits for the batch. A task that is cancelled meanwhile never does, and what the batch holds is lost
for the life of the process (grpc/grpc#43360): 960 bytes for a unary call, 300 more with our
metadata, 100 for the read of a stream. The library's own `cancel` cancels that task. An
orchestrator cancels calls with every rejection.

So here a task of grpc.aio is never cancelled. A cancel ends the call in core, as the library's does
first of all; core then completes the batch at once, without the peer, and the task frees it.

A process that serves loses nothing anyway (`grpc_batches`); this holds in every other one as well.

That takes two private names of the library. In one that has them no longer a cancel is its own: all
is as before but for the memory, and a line in the log says so.
"""

from __future__ import annotations

import asyncio
import logging
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Generator

__all__ = ["StreamCall", "UnaryCall", "UndecodableError"]

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

# Messages that were received and not yet asked for: room for a burst, and a bound.
_READ_AHEAD = 64


class UndecodableError(Exception):
    """The bytes of an answer are not the message that was asked for."""


class UnaryCall(Generic[_T]):
    """A call with one answer. Await it once.

    Cancellation:
        Cancelling the task that awaits it cancels the call.

    Args:
        call: The library's. Nobody else may await or cancel it.
    """

    def __init__(self, call: grpc.aio.UnaryUnaryCall[Any, _T]) -> None:
        self._call: Any = call
        self._is_cancelled = False

    def cancel(self) -> bool:
        """End it, unless it has ended; tell whether it had not."""
        was_running = _end_in_core(self._call)
        self._is_cancelled = self._is_cancelled or was_running
        return was_running

    def __await__(self) -> Generator[Any, None, _T]:
        """Wait for the answer.

        Raises:
            CancelledError: It was cancelled here.
            UndecodableError: The answer is not the message that was asked for.
            grpc.aio.AioRpcError: What the server or the transport said.
        """
        return self._answer().__await__()

    async def _answer(self) -> _T:
        response = _private(self._call, "_call_response")
        if response is not None:  # else a cancel of who waits here reaches the call's own task
            try:
                await self._end(response)
            except asyncio.CancelledError:
                self.cancel()
                raise
            if self._is_cancelled:
                raise asyncio.CancelledError
        answer: _T | None = await self._call  # it is there: this does not wait
        return _decoded(answer)

    def _end(self, response: asyncio.Task[Any]) -> asyncio.Future[None]:
        """Return a future of the call's end, whose cancel does not reach the call's own task."""
        end = asyncio.get_running_loop().create_future()

        def tell(_ended: object) -> None:
            if not end.done():
                end.set_result(None)

        self._call.add_done_callback(tell)  # in the very turn in which its status comes
        # One that core did not accept never has a status.
        response.add_done_callback(tell)
        return end


class StreamCall(Generic[_T]):
    """A call with a stream of answers. Iterate over it once.

    A task of its own reads, up to 64 messages ahead.

    Cancellation:
        Cancelling the task that iterates cancels the call, and so does leaving the iterator.

    Args:
        call: The library's. Nobody else may read or cancel it.
    """

    def __init__(self, call: grpc.aio.UnaryStreamCall[Any, _T]) -> None:
        self._call = call
        self._is_cancelled = False
        self._messages: asyncio.Queue[_T | None] = asyncio.Queue(_READ_AHEAD)
        self._failure: BaseException | None = None
        self._reading = asyncio.get_running_loop().create_task(self._read(), name="read a stream")

    def cancel(self) -> bool:
        """End it, unless it has ended; tell whether it had not. What was not yet read is lost."""
        self._is_cancelled = True
        while not self._messages.empty():  # the reading task may wait for room
            if self._messages.get_nowait() is not None:
                self._failure = asyncio.CancelledError()
        if self._reading.done():
            self._messages.put_nowait(None)
        return _end_in_core(self._call)

    async def __aiter__(self) -> AsyncIterator[_T]:
        """Yield the messages.

        Raises:
            CancelledError: It was cancelled here.
            UndecodableError: A message is not the one that was asked for.
            grpc.aio.AioRpcError: What the server or the transport said.
        """
        try:
            while (message := await self._messages.get()) is not None:
                yield message
        finally:
            self.cancel()
        if self._failure is not None:
            raise self._failure

    async def _read(self) -> None:
        try:
            await self._call.initial_metadata()  # comes with the first message, or with the end
            self._check_wanted()
            async for message in self._call:
                await self._messages.put(_decoded(message))
                self._check_wanted()
        except asyncio.CancelledError as cancelled:
            self._failure = cancelled
            if _is_being_cancelled():  # the event loop ends
                raise
        except Exception as failure:  # noqa: BLE001 - whatever it is, the stream's reader gets it
            self._failure = failure
        await self._messages.put(None)

    def _check_wanted(self) -> None:
        """Stop reading after a cancel: core would refuse the batch, and it would be lost."""
        if self._is_cancelled:
            raise asyncio.CancelledError


def _decoded(message: _T | None) -> _T:
    """Return a message; grpc.aio hands over None where one cannot be decoded."""
    if message is None:
        raise UndecodableError("an answer cannot be decoded")
    return message


def _is_being_cancelled() -> bool:
    """Tell a task that somebody cancels from one that awaits a call that somebody cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _end_in_core(call: Any) -> bool:
    """Do what the library's cancel does first; the task that it would cancel ends by itself."""
    cancel: Callable[[Any], bool] | None = _private(grpc.aio, "_call", "Call", "cancel")
    return call.cancel() if cancel is None else cancel(call)


def _private(owner: Any, *names: str) -> Any:
    """Return what the library keeps under these names; None if it does not, which is logged."""
    value = owner
    for name in names:
        value = getattr(value, name, None)
    if value is None:
        _tell_of_missing(".".join(names))
    return value


@cache
def _tell_of_missing(name: str) -> None:
    """Log it, once for each name."""
    _log.warning(
        "grpcio %s has no private name %s: calls that are cancelled leave up to 1.3 KiB of memory"
        " behind, each for the life of this process",
        grpc.__version__,
        name,
    )
