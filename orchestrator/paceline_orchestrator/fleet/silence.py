"""How a server is found out that is alive and does not answer.

Connections, pings and health can all be well while a model is stuck. So every call is watched: it
waits for as long as it may be expected to take, several times over. Then its server is asked
whether it still has the call: it may be busy with others, or with a long prompt. A call that is not
in sight is given up. One that is in sight waits on, until another server would long have answered
it: whatever a server says of its calls, it cannot keep a request by saying it.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.errors import DeadlineError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from paceline_orchestrator.fleet.wire import ModelFacts


class SilenceError(DeadlineError):
    """A server did not answer in the time that its answers take, and does not have the call."""


class NeglectError(DeadlineError):
    """A server says that it has the call, but another one would long have answered it."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a call asks for, in rows: token positions to compute.

    Attributes:
        row_count: Here, where the session may hold most of the text.
        whole_count: Elsewhere, where a session begins.
        limit_length: The most tokens that the text may have, for which another server needs room.
        sampling_used: The sampling parameters in use, which another server has to apply.
        model: Which has to compute it, with its LoRA adapter if it has one; None: the server's.
    """

    row_count: int = 1
    whole_count: int = 1
    limit_length: int = 0
    sampling_used: frozenset[str] = frozenset()
    model: ModelFacts | None = None


_ONE_ROW = Work()
# Each call is looked at once in so many seconds, or more often.
_LOOK_SECONDS = 10.0


@dataclass(slots=True, eq=False)
class Waiting:
    """A call that waits for an answer, or for the next one of a stream.

    Attributes:
        rpc: What is cancelled when it is given up: its session's newest call.
        patience_seconds: How long it waits before its server is asked.
        heard_at: When it was sent, or its server last answered or had it in sight; the loop's time.
        is_in_sight: Asks the server whether it has the call, in bounded time.
        answered_at: When it was sent, or its server last answered.
        looked_at: When it was last looked after.
        work: What it asks for.
        tolerance: How many times as long as others its server may have it in sight.
        is_given_up: Whether it has waited in vain.
        is_neglected: Whether that is so though its server says that it has it.
    """

    rpc: Any
    patience_seconds: float
    heard_at: float
    is_in_sight: Callable[[], Awaitable[bool]]
    answered_at: float
    looked_at: float
    work: Work
    tolerance: float
    is_given_up: bool = False
    is_neglected: bool = False

    @property
    def asked_at(self) -> float:
        """When its server is asked."""
        return self.heard_at + self.patience_seconds

    @property
    def due_at(self) -> float:
        """When to look after it. Its server may have said that its forwards take for ever."""
        return min(self.asked_at, self.looked_at + _LOOK_SECONDS)


class SilenceWatch:
    """Gives up the calls of one server that it leaves unanswered and has not in sight.

    Cost: no timer for a call, one for all of them.

    Args:
        endured_seconds: For how long a call may be in sight and unanswered, by its work and by how
            long it has waited; by default for ever.
    """

    def __init__(
        self, endured_seconds: Callable[[Work, float], float] = lambda _work, _waited: math.inf
    ) -> None:
        self._endured_seconds = endured_seconds
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
        work: Work = _ONE_ROW,
        tolerance: float = 1.0,
    ) -> Waiting:
        """Watch a call from now on. Whoever begins one ends it.

        Args:
            rpc: What is cancelled when it is given up.
            patience_seconds: How long it waits before its server is asked.
            is_in_sight: Asks the server whether it has the call, or a newer one of its session.
            instead_of: The call of its session that it replaces. While that one is unanswered it
                goes on waiting as this one: a server that is asked anew again and again, and never
                answers, is no less silent.
            work: What it asks for.
            tolerance: How many times as long as others its server may have it in sight.
        """
        if instead_of is not None and instead_of in self._waiting:
            waiting = instead_of
            waiting.rpc, waiting.patience_seconds = rpc, patience_seconds
            waiting.is_in_sight, waiting.work = is_in_sight, work
        else:
            now = asyncio.get_running_loop().time()
            waiting = Waiting(
                rpc=rpc,
                patience_seconds=patience_seconds,
                heard_at=now,
                is_in_sight=is_in_sight,
                answered_at=now,
                looked_at=now,
                work=work,
                tolerance=tolerance,
            )
            self._waiting.add(waiting)
        self._look_at(waiting.due_at)
        return waiting

    def heard(self, answered: Waiting, *, patience_seconds: float | None = None) -> None:
        """Note an answer; a call with more to come may say how long the next one may take."""
        now = asyncio.get_running_loop().time()
        answered.heard_at = answered.answered_at = answered.looked_at = now
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
        """Stop watching a call whose request ended before the answer came.

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

    @property
    def longest_wait_seconds(self) -> float:
        """The longest time that a waiting call has been without an answer; 0 if none waits."""
        now = asyncio.get_running_loop().time()
        return max((now - it.answered_at for it in self._waiting), default=0.0)

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
            if waiting.due_at > loop.time():
                continue
            waiting.looked_at = loop.time()
            if waiting.asked_at > loop.time():
                if self._is_neglected(waiting):
                    self._give_up(waiting, is_neglected=True)
            else:
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
        if waiting.heard_at != heard_at:  # it was answered meanwhile
            self._look_at(waiting.due_at)
            return
        is_neglected = is_in_sight and self._is_neglected(waiting)
        if is_in_sight and not is_neglected:
            waiting.heard_at = asyncio.get_running_loop().time()
            self._look_at(waiting.due_at)
        else:
            self._give_up(waiting, is_neglected=is_neglected)

    def _give_up(self, waiting: Waiting, *, is_neglected: bool) -> None:
        self._waiting.discard(waiting)
        waiting.is_given_up, waiting.is_neglected = True, is_neglected
        waiting.rpc.cancel()

    def _is_neglected(self, waiting: Waiting) -> bool:
        waited = asyncio.get_running_loop().time() - waiting.answered_at
        return waited >= waiting.tolerance * self._endured_seconds(waiting.work, waited)
