"""How it is found out that a server is alive and does not answer.

Connections, pings and health can all be well while a model is stuck. So every call is watched: it
waits for as long as it may be expected to take, several times over. Then its server is asked
whether it still has the call: it may be busy with others, or with a long prompt. A call that is not
in sight is given up.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.errors import DeadlineError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["SilenceError", "SilenceWatch", "Waiting"]


class SilenceError(DeadlineError):
    """A server did not answer in the time that its answers take, and does not have the call."""


@dataclass(slots=True, eq=False)
class Waiting:
    """A call that waits for an answer, or for the next one of a stream.

    Attributes:
        rpc: What is cancelled when it is given up: its session's newest call.
        patience_seconds: How long it waits before its server is asked.
        heard_at: When it was sent, or its server last answered or had it in sight; the loop's time.
        is_in_sight: Asks the server whether it has the call, in bounded time.
        is_given_up: Whether it has waited in vain.
    """

    rpc: Any
    patience_seconds: float
    heard_at: float
    is_in_sight: Callable[[], Awaitable[bool]]
    is_given_up: bool = False

    @property
    def due_at(self) -> float:
        """When its server is asked."""
        return self.heard_at + self.patience_seconds


class SilenceWatch:
    """Gives up the calls of one server that it leaves unanswered and has not in sight.

    Cost: no timer for a call, one for all of them.
    """

    def __init__(self) -> None:
        self._waiting: set[Waiting] = set()
        self._inquiries: dict[Waiting, asyncio.Task[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._silent_seconds = 0.0
        self._counted_until = 0.0

    def begin(
        self,
        rpc: Any,
        *,
        patience_seconds: float,
        is_in_sight: Callable[[], Awaitable[bool]],
        instead_of: Waiting | None = None,
    ) -> Waiting:
        """Watch a call from now on. Whoever begins one ends it.

        Args:
            rpc: What is cancelled when it is given up.
            patience_seconds: How long it waits before its server is asked.
            is_in_sight: Asks the server whether it has the call, or a newer one of its session.
            instead_of: The call of its session that it replaces. While that one is unanswered it
                goes on waiting as this one: a server that is asked anew again and again, and never
                answers, is no less silent.
        """
        if instead_of is not None and instead_of in self._waiting:
            waiting = instead_of
            waiting.rpc, waiting.patience_seconds = rpc, patience_seconds
            waiting.is_in_sight = is_in_sight
        else:
            now = asyncio.get_running_loop().time()
            waiting = Waiting(rpc, patience_seconds, now, is_in_sight)
            self._waiting.add(waiting)
        self._look_at(waiting.due_at)
        return waiting

    def heard(self, answered: Waiting, *, patience_seconds: float | None = None) -> None:
        """Note an answer; a call with more to come may say how long the next one may take."""
        now = answered.heard_at = asyncio.get_running_loop().time()
        self._silent_seconds, self._counted_until = 0.0, now
        if patience_seconds is not None and answered in self._waiting:
            answered.patience_seconds = patience_seconds
            self._look_at(answered.due_at)

    def end(self, waiting: Waiting, *, rpc: Any) -> None:
        """Watch a call no longer, unless another one has taken its place; again is fine."""
        if waiting.rpc is not rpc:
            return
        self._waiting.discard(waiting)
        inquiry = self._inquiries.pop(waiting, None)
        if inquiry is not None:
            inquiry.cancel()

    def end_unanswered(self, waiting: Waiting) -> bool:
        """Watch a call no longer whose request ended before its answer came.

        Returns:
            Whether the server has left such calls waiting, without any answer between them, for
            longer than the patience of this one: requests that end early must not hide what is
            wrong. Time in which several of them waited counts once.
        """
        if waiting not in self._waiting:
            return False
        self.end(waiting, rpc=waiting.rpc)
        now = asyncio.get_running_loop().time()
        self._silent_seconds += now - max(waiting.heard_at, self._counted_until)
        self._counted_until = now
        return self._silent_seconds >= waiting.patience_seconds

    def forget(self) -> None:
        """Hold no silence of calls that have ended against the server: it is another process."""
        self._silent_seconds = 0.0

    def _look_at(self, at: float) -> None:
        """Look after the calls at this time, or earlier if that was said before."""
        if self._timer is not None:
            if self._timer.when() <= at:
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(at, self._look)

    def _look(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        for waiting in self._waiting - self._inquiries.keys():
            if waiting.due_at <= loop.time():
                self._inquiries[waiting] = loop.create_task(
                    self._inquire(waiting), name="ask a server that is late"
                )
        if patient := self._waiting - self._inquiries.keys():
            self._look_at(min(it.due_at for it in patient))

    async def _inquire(self, waiting: Waiting) -> None:
        heard_at = waiting.heard_at
        try:
            is_in_sight = await waiting.is_in_sight()
        finally:
            self._inquiries.pop(waiting, None)
        if is_in_sight:
            waiting.heard_at = asyncio.get_running_loop().time()
        if is_in_sight or waiting.heard_at != heard_at:  # or it was answered meanwhile
            self._look_at(waiting.due_at)
        else:
            self._waiting.discard(waiting)
            waiting.is_given_up = True
            waiting.rpc.cancel()
