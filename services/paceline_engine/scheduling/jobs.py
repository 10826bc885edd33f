"""Jobs in front of a model, the outlets where callers wait, and the results of steps."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import KW_ONLY, dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from paceline_engine.terms.backend import Interrupt
from paceline_engine.terms.items import Item

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


_Value = TypeVar("_Value")


class Rank(IntEnum):
    """The first criterion of a job's place in the queue: the smallest comes first."""

    ERRAND = 0
    CALL = 1
    ANTICIPATED = 2


@dataclass(eq=False, slots=True)
class Errand(Generic[_Value]):
    """Work of the thread that is no item, and comes before all items."""

    do: Callable[[Interrupt], _Value]
    share: str = ""
    patience_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Step(Generic[_Value]):
    """The result of one step of a job.

    Attributes:
        outcome: An item's `Outcome`, or an errand's return value.
        queue_ns: How long the job had waited in the queue before the step.
        forward_ns: How long the forward took, with the rows of other jobs.
        shared_row_count: The forward's rows, other jobs' included.
        shared_job_count: The forward's jobs, this one included.
    """

    outcome: _Value
    _: KW_ONLY
    queue_ns: int
    forward_ns: int
    shared_row_count: int = 0
    shared_job_count: int = 1


class Outlet(AsyncIterator[Step[_Value]]):
    """Where one caller waits for the steps of a job. Used on the event loop only.

    A normal end comes after all steps; an error comes before steps that were not fetched yet.
    """

    def __init__(self) -> None:
        self._steps: deque[Step[_Value]] = deque()
        self._error: BaseException | None = None
        self._ended = False
        self._due_at = 0.0
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def failed(self) -> bool:
        """Whether it ended with an error."""
        return self._error is not None

    @property
    def ended(self) -> bool:
        """Whether no more steps will come."""
        return self._ended

    def put(self, steps: Iterable[Step[_Value]]) -> None:
        """Hand over steps, unless the end was announced."""
        if not self._ended:
            self._steps.extend(steps)
            self._wake_if_due()

    def end(self, error: BaseException | None = None) -> None:
        """Announce the end. An error counts even after a normal end; the first one stays."""
        self._error = self._error or error
        self._ended = True
        self._wake_if_due()

    def check(self) -> None:
        """Raise the error that it ended with, if it ended with one."""
        if self._error is not None:
            raise self._error

    async def __anext__(self) -> Step[_Value]:
        await self._until_due(self._due_at)
        if not self._steps:
            raise StopAsyncIteration
        return self._steps.popleft()

    async def parcels(self, *, interval_seconds: float) -> AsyncGenerator[list[Step[_Value]]]:
        """Yield lists of steps with at least an interval between two lists.

        The last list does not wait for the interval.
        """
        loop = asyncio.get_running_loop()
        due_at = loop.time()
        while True:
            await self._until_due(due_at)
            if not self._steps:
                return
            parcel = list(self._steps)
            self._steps.clear()
            due_at = loop.time() + interval_seconds
            yield parcel

    async def _until_due(self, due_at: float) -> None:
        """Wait for a step and for a time, or for the end; raise the error that it ended with."""
        self._due_at = due_at
        while not self._is_due:
            self._waiter = asyncio.get_running_loop().create_future()
            self._wake_if_due()
            try:
                await self._waiter
            finally:
                self._waiter = None
                if self._timer is not None:
                    self._timer.cancel()
                    self._timer = None
        self.check()

    @property
    def _is_due(self) -> bool:
        if self._ended or not self._steps:
            return self._ended
        return asyncio.get_running_loop().time() >= self._due_at

    def _wake_if_due(self) -> None:
        """Wake the caller only if it has something to do: a wake-up costs as much as a step."""
        if self._waiter is None or self._waiter.done():
            return
        if self._is_due:
            self._waiter.set_result(None)
        elif self._steps:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._waiter.get_loop().call_at(self._due_at, self._wake_if_due)


@dataclass(eq=False, slots=True)
class Job:
    """Work in the queue; made by `ModelWorker.submit` and moved about by it.

    Attributes:
        work: An item or an errand.
        outlet: Where its caller waits; the event loop can replace it.
        share: The tenant whose work it is.
        arrival: Its turn among equally urgent jobs of one share.
        queued_ns: The time at which it was put into the queue.
        withdrawn_ns: The time at which it was withdrawn; None: it was not.
        was_passed_over: Whether a forward has gone without it since it was put into the queue.
        successor: The job that the model goes on with by itself after this one.
        was_cut: Whether a forward has computed a part of its prefix, and not the rest.
        ns_per_row: What a row of its long prefix took in its last forward; None: not known.
        unclaimed_ns: How long it was computed before a call asked for it.
        kept_steps: The steps of an answer that is not complete yet.
    """

    work: Item | Errand[Any]
    outlet: Outlet[Any]
    share: str
    arrival: int = 0
    queued_ns: int = 0
    withdrawn_ns: int | None = None
    was_passed_over: bool = False
    was_cut: bool = False
    ns_per_row: float | None = None
    unclaimed_ns: int = 0
    kept_steps: list[Step[Any]] = field(default_factory=list)
    successor: Job | None = None

    def take(self, step: Step[Any], *, is_last: bool) -> list[Step[Any]]:
        """Take in a step, and return the steps of complete answers.

        A withdrawn job keeps no step: nobody would be told of it later.
        """
        self.kept_steps.append(step)
        is_open = isinstance(self.work, Item) and not self.work.completes_answer()
        if is_open and not is_last and self.withdrawn_ns is None:
            return []
        steps, self.kept_steps = self.kept_steps, []
        return steps

    @property
    def urgency(self) -> tuple[Rank, int]:
        """Its place in the queue, the smallest first: its rank, and among calls its depth."""
        if isinstance(self.work, Errand):
            return Rank.ERRAND, 0
        rank = Rank.ANTICIPATED if self.work.is_anticipated else Rank.CALL
        return rank, self.work.depth

    @property
    def is_anticipated(self) -> bool:
        """Whether no caller has asked for it yet."""
        return self.urgency[0] is Rank.ANTICIPATED


@dataclass(eq=False, slots=True)
class Batch:
    """The jobs of one forward, or one errand.

    Attributes:
        jobs: Items of different sequences; or an errand alone.
        row_limit: The forward's most rows, if the last item's prefix is cut to fit; else None.
        interrupt: Set when no caller waits for any of the jobs.
        started_ns: The time at which it began.
        expected_ns: How long it should take, if it gives way to a job that arrives; else None.
    """

    jobs: list[Job]
    row_limit: int | None = None
    interrupt: Interrupt = field(default_factory=Interrupt)
    started_ns: int = 0
    expected_ns: int | None = None

    @property
    def is_unwanted(self) -> bool:
        """Whether all of its jobs were withdrawn."""
        return all(job.withdrawn_ns is not None for job in self.jobs)

    @property
    def is_anticipated(self) -> bool:
        """Whether no caller has asked for any of its jobs yet."""
        return all(job.is_anticipated for job in self.jobs)

    @property
    def patience_ns(self) -> int | None:
        """How long it may take before it counts as hung; None: for ever."""
        patiences = [each for job in self.jobs if (each := job.work.patience_ns) is not None]
        return max(patiences) if len(patiences) == len(self.jobs) else None
