"""The one thread that owns a model, and the queue in front of it.

The event loop submits items and receives what their steps give; both of its ends live on the loop,
the forwards on the thread. An item that is not done goes back to the end of the queue after each
step: so drafts take turns forward by forward, and so do shares. What is no item, such as loading
the model, is an errand.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from paceline.errors import DrainingError, OverloadedError
from paceline.shares import FairShares
from paceline_engine.backends.base import DeviceLostError, ForwardInterrupted, Interrupt
from paceline_engine.items import Item
from paceline_engine.turns import Turns

if TYPE_CHECKING:
    from paceline_engine.backends.base import Backend
    from paceline_engine.items import Outcome

__all__ = ["Errand", "Job", "ModelWorker", "Outlet", "Step", "Waste"]

_Value = TypeVar("_Value")

_RETRY_SECONDS = 0.5
_STOP_SECONDS = 10.0
"""How long a running forward may take to notice that it was interrupted."""


@dataclass(eq=False, slots=True)
class Errand(Generic[_Value]):
    """What the thread has to do besides items, ahead of all of them."""

    do: Callable[[Interrupt], _Value]
    depth: int = -1
    share: str = ""
    patience_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Step(Generic[_Value]):
    """What one step of a job gave.

    Attributes:
        outcome: Of an item its `Outcome`, of an errand what it returned.
        queue_ns: How long the job had waited for it.
        forward_ns: How long it took.
    """

    outcome: _Value
    queue_ns: int
    forward_ns: int


@dataclass(slots=True)
class Waste:
    """The forwards so far that nobody waited for when they ended, given up or not.

    Attributes:
        forward_count: How many.
        forward_ns: How long they ran.
        freeing_ns: How long they went on after they were withdrawn.
    """

    forward_count: int = 0
    forward_ns: int = 0
    freeing_ns: int = 0


class Outlet(AsyncIterator[Step[_Value]]):
    """Where one caller waits for the steps of a job. Used on the event loop only.

    A normal end comes after all steps; an error overtakes steps that were not fetched yet.
    """

    def __init__(self) -> None:
        # Bounded by what the job is asked for: a window has a limit.
        self._steps: asyncio.Queue[Step[_Value] | None] = asyncio.Queue()
        self._error: BaseException | None = None
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether nothing more will be put in."""
        return self._ended

    def put(self, step: Step[_Value]) -> None:
        """Hand over a step, unless the end was announced."""
        if not self._ended:
            self._steps.put_nowait(step)

    def end(self, error: BaseException | None = None) -> None:
        """Announce the end. An error counts even after a normal end; the first one stays."""
        self._error = self._error or error
        if not self._ended:
            self._ended = True
            self._steps.put_nowait(None)

    async def __anext__(self) -> Step[_Value]:
        step = await self._steps.get()
        if self._error is not None:
            raise self._error
        if step is None:
            raise StopAsyncIteration
        return step


@dataclass(eq=False, slots=True)
class Job:
    """Work in the queue; made by `ModelWorker.submit` and moved about by it.

    Attributes:
        work: What is to be done.
        outlet: Who waits for it now: another one if the loop says so.
        share: Whose work it is.
        interrupt: Set when nobody waits any more.
        arrival: Its turn among equal depths of one share.
        queued_ns: When it was put into the queue.
        started_ns: When its last step began.
        withdrawn_ns: When it was withdrawn, if it was.
    """

    work: Item | Errand[Any]
    outlet: Outlet[Any]
    share: str
    interrupt: Interrupt = field(default_factory=Interrupt)
    arrival: int = 0
    queued_ns: int = 0
    started_ns: int = 0
    withdrawn_ns: int | None = None


class ModelWorker:
    """A thread that runs jobs: the smallest depth first, then by fair turns, then first come.

    Shares take turns by the time of their forwards (`Turns`), however many jobs each has. So at its
    depth a job waits for the forward that runs, and then for at most one of each other share, as
    long as its own share has had no longer forwards than they; a share that had a long one waits
    until the others had as much.

    Concurrency: `start`, `submit`, `promote`, `withdraw` and `stop` belong to one event loop.

    Cancellation: a withdrawn job leaves the queue at once; the interrupt of a running one is set.

    Attributes:
        backend: What runs items. Set it before the first is submitted.
        waste: Added up on the thread; read it anywhere.
    """

    def __init__(
        self,
        *,
        queue_limit: int,
        on_step: Callable[[Step[Outcome]], None] = lambda _: None,
        on_device_lost: Callable[[DeviceLostError], None] = lambda _: None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Build it.

        Args:
            queue_limit: Jobs that can wait; shares compete for these places (`FairShares`).
            on_step: Called on the loop for every item's step that ran to its end, wanted or not.
            on_device_lost: Called on the loop, once. No job runs after that: they all end with
                DrainingError.
            clock_ns: Nanoseconds that never go back; measures forwards and waiting.
        """
        self._places = FairShares(queue_limit)
        self._turns = Turns()
        self._clock_ns = clock_ns
        self._on_step = on_step
        self._on_device_lost = on_device_lost
        self._arrivals = itertools.count()
        self._queue: list[Job] = []
        self._changed = threading.Condition()
        self._running: Job | None = None
        self._stopping = False
        self._refusal: DrainingError | None = None
        self._interrupted_count = 0
        self.backend: Backend | None = None
        self.waste = Waste()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ended = asyncio.Event()

    @property
    def queue_length(self) -> int:
        """Jobs waiting."""
        return len(self._queue)

    @property
    def busy(self) -> bool:
        """Whether a forward runs."""
        return self._running is not None

    @property
    def overdue_ns(self) -> int:
        """How long the running forward has taken, if that is past its patience; else 0."""
        with self._changed:
            job = self._running
            if job is None or job.work.patience_ns is None:
                return 0
            running_ns = self._clock_ns() - job.started_ns
            return running_ns if running_ns > job.work.patience_ns else 0

    @property
    def interrupted_count(self) -> int:
        """Forwards that were given up so far."""
        return self._interrupted_count

    def start(self) -> None:
        """Start the thread."""
        self._loop = asyncio.get_running_loop()
        # A daemon, so that a forward that never returns does not keep the process alive.
        self._thread = threading.Thread(target=self._work, name="paceline-model", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Drop what waits, interrupt what runs, and wait until the thread has ended.

        A forward that never returns is left behind after a while: its thread is a daemon.
        """
        stopped = DrainingError("the server is shutting down")
        with self._changed:
            self._stopping, self._refusal = True, self._refusal or stopped
            dropped = self._drop_all()
            if self._running is not None:
                self._running.interrupt.set()
            self._changed.notify()
        _fail(dropped, stopped)
        if self._thread is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_STOP_SECONDS):
                    await self._ended.wait()

    def submit(self, work: Item | Errand[Any], *, outlet: Outlet[Any]) -> Job:
        """Queue some work.

        Raises:
            OverloadedError: the queue is full, or the share has too much of it.
            DrainingError: nothing can run any more.
        """
        share = work.share
        with self._changed:
            if self._refusal is not None:
                raise self._refusal
            if not self._places.allows(share):
                raise OverloadedError(
                    f"{len(self._queue)} calls wait for this model already,"
                    f" {self._places.held_by(share)} of them this client's",
                    retry_after_seconds=_RETRY_SECONDS,
                )
            job = Job(work, outlet, share)
            self._enqueue(job)
        return job

    async def run(self, errand: Callable[[Interrupt], _Value]) -> _Value:
        """Run an errand, ahead of everything that waits."""
        outlet: Outlet[_Value] = Outlet()
        self.submit(Errand(errand), outlet=outlet)
        return (await anext(outlet)).outcome

    def promote(self, job: Job, *, depth: int) -> None:
        """Move a waiting job to another depth; it keeps its turn there."""
        with self._changed:
            job.work.depth = depth

    def withdraw(self, job: Job) -> None:
        """Take a job out of the queue, or interrupt it. Its outlet is left alone."""
        with self._changed:
            job.interrupt.set()
            job.withdrawn_ns = job.withdrawn_ns or self._clock_ns()
            if job in self._queue:
                self._remove(job)

    def _enqueue(self, job: Job) -> None:
        job.arrival = next(self._arrivals)
        job.queued_ns = self._clock_ns()
        self._queue.append(job)
        self._places.take(job.share)
        self._changed.notify()

    def _remove(self, job: Job) -> Job:
        self._queue.remove(job)
        self._places.give_back(job.share)
        return job

    def _drop_all(self) -> list[Job]:
        return [self._remove(job) for job in self._queue[:]]

    def _rank(self, job: Job) -> tuple[int, int, int]:
        return job.work.depth, self._turns.of(job.share), job.arrival

    # --- on the thread ------------------------------------------------------------------------

    def _work(self) -> None:
        while (job := self._take()) is not None:
            started_ns = job.started_ns
            queue_ns = started_ns - job.queued_ns
            try:
                outcome, is_last = self._step(job)
            except DeviceLostError as error:
                self._give_up(job, error)
            except BaseException as error:  # noqa: BLE001 - the caller's, and raised there
                self._interrupted_count += isinstance(error, ForwardInterrupted)
                self._finish(job, again=False)
                self._tell(_fail, [job], error)
            else:
                forward_ns = self._clock_ns() - started_ns
                self._finish(job, again=not is_last)
                self._tell(self._deliver, job, Step(outcome, queue_ns, forward_ns), is_last)
        self._tell(self._ended.set)

    def _step(self, job: Job) -> tuple[Any, bool]:
        """Return what a step gives, and whether it is the last."""
        work = job.work
        if isinstance(work, Errand):
            return work.do(job.interrupt), True
        assert self.backend is not None, "items come after the model"
        (outcome,) = self.backend.run([work], job.interrupt)
        return outcome, work.take(outcome)

    def _take(self) -> Job | None:
        with self._changed:
            while not self._queue and not self._stopping:
                self._turns.rest()
                self._changed.wait()
            if self._stopping:
                return None
            job = self._running = self._remove(min(self._queue, key=self._rank))
            self._turns.begin(job.share)
            job.started_ns = self._clock_ns()
            return job

    def _finish(self, job: Job, *, again: bool) -> None:
        with self._changed:
            self._running = None
            now_ns = self._clock_ns()
            self._turns.charge(job.share, now_ns - job.started_ns)
            if job.withdrawn_ns is not None:
                self.waste.forward_count += 1
                self.waste.forward_ns += now_ns - job.started_ns
                self.waste.freeing_ns += now_ns - max(job.started_ns, job.withdrawn_ns)
            if again and self._stopping:
                self._tell(_fail, [job], DrainingError("the server is shutting down"))
            elif again and not job.interrupt.is_set():
                self._enqueue(job)

    def _give_up(self, job: Job, error: DeviceLostError) -> None:
        lost = DrainingError("the model's device failed")
        lost.__cause__ = error
        with self._changed:
            self._refusal, self._running = lost, None
            jobs = [job, *self._drop_all()]
        # Who hears of it through a job finds that it has been told.
        self._tell(self._on_device_lost, error)
        self._tell(_fail, jobs, lost)

    def _tell(self, callback: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None
        # A loop that is closed has nobody left to tell.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *arguments)

    # --- on the loop again --------------------------------------------------------------------

    def _deliver(self, job: Job, step: Step[Any], is_last: bool) -> None:
        job.outlet.put(step)
        if is_last:
            job.outlet.end()
        if isinstance(job.work, Item):
            # Last, so that a failure in there leaves no caller waiting.
            self._on_step(step)


def _fail(jobs: list[Job], error: BaseException) -> None:
    for job in jobs:
        job.outlet.end(error)
