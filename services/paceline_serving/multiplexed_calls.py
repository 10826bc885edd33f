"""A call on a stream of calls, as its caller sees it: with the methods of grpc.aio's calls."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc.status_pb2 import Status

from paceline.status import DETAILS_KEY

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from paceline.v1.call_service_pb2 import AnswerMessage

# So long after the end of its time a call is withdrawn: the server's own clock comes first.
_EXPIRED_SECONDS = 1.0
# An orchestrator reads at once, so more unread answers than this are a server's flood. An answer in
# the queue takes some bytes more than its content.
_MOST_UNREAD_BYTES = 8 << 20
_ANSWER_BYTES = 64
# The limit of an RPC's trailers.
_MOST_STATUS_BYTES = 8 << 10
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class MultiplexedCall:
    """A call on a stream, with the methods of grpc.aio's calls that are in use.

    Args:
        deserialize: Makes an answer of its bytes; None of bytes that are no answer.
        seconds: How long the call may take.
    """

    def __init__(self, deserialize: Callable[[bytes], Any], *, seconds: float) -> None:
        self._deserialize = deserialize
        self._loop = asyncio.get_running_loop()
        self._ends_at = self._loop.time() + seconds
        self._timer = self._loop.call_at(self._ends_at, self._expire)
        self._forget: Callable[[], None] = lambda: None
        self._answers: deque[bytes | None] = deque()
        self._unread_bytes = 0
        self._end: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def seconds_left(self) -> float:
        """How long the call may still take."""
        return self._ends_at - self._loop.time()

    def when_given_up(self, forget: Callable[[], None]) -> None:
        """Set the function that takes the call off its stream."""
        self._forget = forget

    async def next(self) -> Any:
        """Wait for the next answer, and return it; None if it cannot be decoded.

        Raises:
            StopAsyncIteration: The call has ended, and all answers are read.
            AioRpcError: What the server or the transport said.
            CancelledError: The call was withdrawn.
        """
        while not self._answers:
            if self._end is not None:
                raise self._end
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:  # of the task that waits
                self.cancel()
                raise
            finally:
                self._waiter = None
        raw = self._answers.popleft()
        if raw is None:
            return None
        self._unread_bytes -= len(raw) + _ANSWER_BYTES
        return self._deserialize(raw)

    def done(self) -> bool:
        """Whether no more answers come."""
        return self._end is not None

    def cancel(self) -> bool:
        """Withdraw the call; return False if it had ended."""
        if self._end is not None:
            return False
        self._forget()
        self._answers.clear()
        self.finish(asyncio.CancelledError())
        return True

    def take(self, answer: AnswerMessage) -> None:
        """Take in an answer, or the call's end. Nothing follows the first end."""
        if self._end is not None:
            return
        if answer.HasField("response"):
            self._answers.append(answer.response)
            self._unread_bytes += len(answer.response) + _ANSWER_BYTES
        if self._unread_bytes > _MOST_UNREAD_BYTES:
            self._forget()
            self.finish(failure(grpc.StatusCode.INTERNAL, "answers come faster than any is read"))
        elif not answer.ended:
            self._wake()
        elif answer.status:
            self.finish(_read_failure(answer.status))
        else:
            self.finish(StopAsyncIteration())

    def spoil(self) -> None:
        """End the call with an answer that cannot be decoded."""
        self._answers.append(None)
        self.finish(StopAsyncIteration())

    def _expire(self) -> None:
        if self._end is None:
            self._loop.call_later(_EXPIRED_SECONDS, self._forget)
            self.finish(failure(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    def finish(self, end: BaseException) -> None:
        """End the call with what `next` raises after the last answer."""
        self._end = end
        self._timer.cancel()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class UnaryUnaryCall(MultiplexedCall):
    """A call of a method that answers once."""

    def __await__(self) -> Generator[Any, None, Any]:
        return self._only().__await__()

    async def _only(self) -> Any:
        try:
            return await self.next()
        except StopAsyncIteration:
            return None  # an end without an answer is a bad answer
        finally:
            self.cancel()  # does nothing if the server has ended the call, as it has to


class UnaryStreamCall(MultiplexedCall):
    """A call of a method that answers with a stream."""

    def __aiter__(self) -> UnaryStreamCall:
        return self

    async def __anext__(self) -> Any:
        return await self.next()


def _read_failure(raw: bytes) -> grpc.aio.AioRpcError:
    if len(raw) > _MOST_STATUS_BYTES:
        return failure(grpc.StatusCode.INTERNAL, "a status is larger than any may be")
    try:
        status = Status.FromString(raw)
    except DecodeError:
        return failure(grpc.StatusCode.INTERNAL, "a status cannot be decoded")
    code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    return failure(code, status.message, (DETAILS_KEY, raw))


def failure(
    code: grpc.StatusCode, details: str, *trailers: tuple[str, bytes]
) -> grpc.aio.AioRpcError:
    """Make the error with which a call or its stream has failed."""
    none, told = grpc.aio.Metadata(), grpc.aio.Metadata(*trailers)
    return grpc.aio.AioRpcError(code, none, told, details=details, debug_error_string=None)
