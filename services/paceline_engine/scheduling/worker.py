"""The one thread that owns a model, behind the queue of `job_queue.py`.

Theory of operation
-------------------

Two threads touch this file. The event loop owns sessions, callers and outlets. The model's thread
owns the model and every cache. They share the queue (`job_queue.py`) and the running batch, both
under `_changed`, a condition.

    event loop                                    model's thread
    ----------                                    --------------
    submit(item) --> queue ----- _take() -------> batch of jobs
                       ^                            | backend.run(items, interrupt)
                       |                            v
                       +---- not done yet ------- _finish(batch, answers)
    outlet <----------- _tell(_hand_over, ...) ------+

A *job* is an item (or an errand, such as loading the model) with its outlet. `Batching.choose`
picks the jobs of the next forward. After the forward each job is in one of three states:

- It is done. Its last step and its end go to the outlet.
- It has more steps, as a draft of several tokens has. The steps that complete an answer go to the
  outlet, and the job goes back into the queue: to the end if the step found tokens, so that drafts
  take turns; to its old place if it computed a part of a prompt or was interrupted.
- It failed. Its error goes to the outlet.

Four rules keep this fast and right; a change has to keep them.

1. The thread never waits for the loop. It hands results over with `call_soon_threadsafe`, once for
   all jobs of a forward, and not for a step that no caller can use yet, because to wake the loop
   costs more than the rest of `_finish`.
2. A withdrawn job is never delivered to. `withdraw` takes it out of the queue. If its forward runs
   already, the forward is interrupted only when *every* job in it is withdrawn: other callers'
   rows are in it, too. An interrupted job that nobody withdrew is put back into the queue.
3. Anticipated work gives way. After a verdict `_anticipate` queues the forward that the caller
   asks for next if it goes on from this answer. Such a job comes after all others, and its forward
   is interrupted when a requested job arrives. `ask_for` makes it a requested job; `waste` counts
   forwards that were computed in vain.
4. A long part of a prompt that was alone gives way, too: when a job arrives, it is interrupted,
   unless it should end within the time that a job may have to wait (`ALONE_NS`). The prompt then
   goes on beside the job, in short parts.

Fairness: forwards are charged to the shares of their jobs, by rows (`Turns`), so a client with many
jobs has no more of the model's time than one with few. The queue limits and divides its places in
the same way.

The end: a lost device, or a bug on the thread, gives up all jobs with DrainingError and refuses
later ones; the process then ends. `stop` waits `_STOP_SECONDS` for the running forward, and leaves
a forward that never returns behind: the thread is a daemon.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from paceline.errors import DrainingError
from paceline_engine.scheduling.accounting import Waste
from paceline_engine.scheduling.batching import ALONE_NS, Batching
from paceline_engine.scheduling.fair_queue import Turns
from paceline_engine.scheduling.job_queue import JobQueue
from paceline_engine.scheduling.jobs import Errand, Job, Outlet, Step
from paceline_engine.scheduling.latencies import LatencyMeter
from paceline_engine.terms.backend import DeviceLostError, ForwardInterrupted, forget_locals
from paceline_engine.terms.items import Item, Judge, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline_engine.scheduling.jobs import Batch
    from paceline_engine.terms.backend import Backend, Interrupt

_log = logging.getLogger(__name__)

_Value = TypeVar("_Value")

_STOP_SECONDS = 10.0
"""How long a running forward may take to notice that it was interrupted."""


class ModelWorker:
    """A thread that runs jobs, as many in a forward as `Batching` says.

    Shares take turns by their part of the time of forwards (`Turns`), however many jobs each has.

    Args:
        queue_limit: Jobs that can wait; shares compete for these places (`FairShares`).
        meter: Learns what forwards cost, and decides how many rows a forward should have.
        on_forward: Called on the loop with the outcomes of every forward that ran to its end,
            also of a withdrawn one.
        on_device_lost: Called on the loop, once. No job runs after that: they all end with
            DrainingError.
        clock_ns: Nanoseconds that never go back; measures forwards and waiting.

    Concurrency: `start`, `submit`, `ask_for`, `withdraw` and `stop` belong to one event loop.

    Cancellation: a withdrawn job leaves the queue at once; a forward is given up when all of its
    jobs are withdrawn.

    Attributes:
        backend: Runs the items. Set it before the first item is submitted.
        interrupted_count: Forwards that were given up so far.
        waste: Added up on the thread and the loop, under a lock; read it anywhere.
    """

    def __init__(
        self,
        *,
        queue_limit: int,
        meter: LatencyMeter | None = None,
        on_forward: Callable[[Sequence[Outcome]], None] = lambda _: None,
        on_device_lost: Callable[[DeviceLostError], None] = lambda _: None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._queue = JobQueue(queue_limit)
        self._turns = Turns()
        self._clock_ns = clock_ns
        self._batching = Batching(meter or LatencyMeter(), self._turns)
        self._on_forward = on_forward
        self._on_device_lost = on_device_lost
        self._changed = threading.Condition()
        self._running: Batch | None = None
        self._uncounted: list[Sequence[Outcome]] = []  # by forward
        self._stopping = False
        self._refusal: DrainingError | None = None
        self.interrupted_count = 0
        self.backend: Backend | None = None
        self.waste = Waste()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ended = asyncio.Event()

    @property
    def queue_length(self) -> int:
        """Jobs waiting."""
        return len(self._queue.jobs)

    @property
    def busy(self) -> bool:
        """Whether a forward runs."""
        return self._running is not None

    @property
    def overdue_ns(self) -> int:
        """How long the running forward has taken; 0 while that is within its patience."""
        with self._changed:
            batch = self._running
            if batch is None or batch.patience_ns is None:
                return 0
            running_ns = self._clock_ns() - batch.started_ns
            return running_ns if running_ns > batch.patience_ns else 0

    def start(self) -> None:
        """Start the thread."""
        self._loop = asyncio.get_running_loop()
        # A daemon, so that a forward that never returns does not keep the process alive.
        self._thread = threading.Thread(target=self._work, name="paceline-model", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Drop waiting jobs, interrupt the running forward, and wait until the thread has ended.

        A forward that never returns is left behind after `_STOP_SECONDS`: its thread is a daemon.
        """
        stopped = DrainingError("the server is shutting down")
        with self._changed:
            self._stopping, self._refusal = True, self._refusal or stopped
            dropped = self._queue.clear()
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
            OverloadedError: the queue is full, or the share has too many of its places.
            DrainingError: no job can run any more.
        """
        share = work.share
        with self._changed:
            if self._refusal is not None:
                raise self._refusal
            self._queue.check_room(share)
            job = Job(work, outlet, share)
            self._enqueue(job)
            self._give_way()
        return job

    async def run(self, errand: Callable[[Interrupt], _Value]) -> _Value:
        """Run an errand, ahead of everything that waits."""
        outlet: Outlet[_Value] = Outlet()
        self.submit(Errand(errand), outlet=outlet)
        return (await anext(outlet)).outcome

    def ask_for(self, job: Job, item: Item) -> None:
        """Let a queued or running job stand for an item that asks the same.

        The job gets the item's depth and `goes_on`, and keeps its turn in the queue.
        """
        with self._changed:
            work = cast("Item", job.work)
            work.depth, work.is_anticipated, work.goes_on = item.depth, False, item.goes_on

    def withdraw(self, job: Job) -> None:
        """Take a job out of the queue, or out of its forward. Its outlet is left alone.

        A forward is given up when all of its jobs are withdrawn.
        """
        with self._changed:
            job.withdrawn_ns = job.withdrawn_ns or self._clock_ns()
            if job.is_anticipated:
                self.waste.add_unclaimed(job)
            if job in self._queue.jobs:
                self._queue.remove(job)
            elif (batch := self._running) and job in batch.jobs and batch.is_unwanted:
                batch.interrupt.set()
            successor, job.successor = job.successor, None
        if successor is not None:
            self.withdraw(successor)

    def _enqueue(self, job: Job, *, keeps_turn: bool = False) -> None:
        self._queue.add(job, now_ns=self._clock_ns(), keeps_turn=keeps_turn)
        self._changed.notify()

    def _give_way(self) -> None:
        """Interrupt a forward that a new job should not wait for; it restarts beside the job.

        Such a forward has anticipated jobs only, or is a part of a prompt that ends too late.
        """
        if (batch := self._running) is None:
            return
        left_ns = 0
        if batch.expected_ns is not None:
            left_ns = batch.started_ns + batch.expected_ns - self._clock_ns()
        if batch.is_anticipated or left_ns > ALONE_NS:
            batch.interrupt.set()

    def _anticipate(self, job: Job, outcome: Outcome) -> None:
        """Queue the item that the caller asks for next if it goes on from this answer."""
        assert outcome.judgement is not None
        assert self.backend is not None
        if self._stopping or self._refusal or not self._queue.has_room_for(job.share):
            return
        if outcome.judgement.next_token in self.backend.description.eos_token_ids:
            return
        ahead = cast("Item", job.work).ahead(outcome.judgement)
        if ahead is not None:
            job.successor = Job(ahead, Outlet(), job.share)
            self._enqueue(job.successor)

    # --- on the thread ------------------------------------------------------------------------

    def _work(self) -> None:
        batch: Batch | None = None
        try:
            while (batch := self._take()) is not None:
                self._compute(batch)
                batch = None
        except Exception as bug:  # noqa: BLE001 - after any bug no other thread computes
            # Without this the server would look healthy and answer no call.
            _log.exception("the model's thread broke")
            lost = DeviceLostError(f"its thread broke ({type(bug).__name__})")
            self._give_up(batch.jobs if batch is not None else (), lost)
        self._tell(self._ended.set)

    def _compute(self, batch: Batch) -> None:
        try:
            answers = self._run(batch)
        except DeviceLostError as error:
            self._give_up(batch.jobs, error)
        except ForwardInterrupted as interrupted:
            self.interrupted_count += 1
            # The traceback would keep alive all objects of the forward.
            self._finish(batch, [interrupted.with_traceback(None)] * len(batch.jobs))
        except BaseException as error:  # noqa: BLE001 - the callers', and raised there
            forget_locals(error)
            self._finish(batch, [error] * len(batch.jobs))
        else:
            for each in answers:
                if isinstance(each, Exception):  # one item's alone: it holds the scores of all
                    forget_locals(each)
            self._finish(batch, answers)

    def _run(self, batch: Batch) -> Sequence[Any]:
        """Return each job's outcome or error."""
        work = batch.jobs[0].work
        if isinstance(work, Errand):
            return [work.do(batch.interrupt)]
        assert self.backend is not None, "items come after the model"
        items = [cast("Item", job.work) for job in batch.jobs]
        return self.backend.run(items, batch.interrupt, row_limit=batch.row_limit)

    def _take(self) -> Batch | None:
        with self._changed:
            while not self._queue.jobs and not self._stopping:
                self._turns.rest()
                self._changed.wait()
            if self._stopping:
                return None
            now_ns = self._clock_ns()
            batch = self._choose(now_ns)
            for job in batch.jobs:
                self._queue.remove(job)
            self._turns.begin(batch.jobs[0].share)
            self._running = batch
            batch.started_ns = self._clock_ns()
            return batch

    def _choose(self, now_ns: int) -> Batch:
        model = None if self.backend is None else self.backend.description
        return self._batching.choose(
            self._queue.jobs,
            now_ns=now_ns,
            shares_forwards=model is not None and model.shares_forwards,
            layer_count=model.layer_count if model and model.cancels_between_layers else 0,
        )

    def _finish(self, batch: Batch, answers: Sequence[Any]) -> None:
        """Account for a forward, and hand out what it gave."""
        ended_ns = self._clock_ns()
        forward_ns = ended_ns - batch.started_ns
        row_counts = [each.row_count if isinstance(each, Outcome) else 0 for each in answers]
        self._learn(batch, answers, row_counts=row_counts, forward_ns=forward_ns)
        with self._changed:
            self._running = None
            self.waste.add(batch, row_counts=row_counts, ended_ns=ended_ns)
            self._turns.charge_forward(batch, row_counts, forward_ns=forward_ns)
            deliveries = []
            for job, answer in zip(batch.jobs, answers, strict=True):
                if isinstance(answer, BaseException):
                    self._fail_or_repeat(job, answer)
                    continue
                step = Step(
                    answer,
                    queue_ns=batch.started_ns - job.queued_ns,
                    forward_ns=forward_ns,
                    shared_row_count=sum(row_counts),
                    shared_job_count=len(batch.jobs),
                )
                is_last = self._advance(job, answer)
                if steps := job.take(step, is_last=is_last):
                    deliveries.append(_Delivery(job, steps, is_last))
            if deliveries or not any(job.kept_steps for job in batch.jobs):
                # One call for all jobs: to wake the loop for each would cost more than the rest.
                forwards, self._uncounted = self._uncounted, []
                self._tell(self._hand_over, forwards, deliveries)

    def _hand_over(
        self, forwards: Sequence[Sequence[Outcome]], deliveries: Sequence[_Delivery]
    ) -> None:
        """Deliver steps, and count forwards before the callers run."""
        for each in deliveries:
            each.job.outlet.put(each.steps)
            if each.is_last:
                each.job.outlet.end()
        for outcomes in forwards:
            self._on_forward(outcomes)

    def _learn(
        self, batch: Batch, answers: Sequence[Any], *, row_counts: Sequence[int], forward_ns: int
    ) -> None:
        """Learn from a forward what forwards cost, and keep its outcomes to be counted."""
        if not any(row_counts):  # a stack may find the tokens that it copies without a forward
            return
        outcomes = [each for each in answers if isinstance(each, Outcome)]
        # What a stack's smaller models take says nothing about the largest.
        if not any(outcome.stage for outcome in outcomes):
            self._batching.learn(batch, row_counts, forward_ns=forward_ns)
        self._uncounted.append(outcomes)

    def _fail_or_repeat(self, job: Job, error: BaseException) -> None:
        """Queue a job again if it was interrupted for another job's sake; else end it."""
        is_wanted = isinstance(error, ForwardInterrupted) and job.withdrawn_ns is None
        if is_wanted and not self._stopping:
            self._enqueue(job, keeps_turn=True)
        else:
            job.kept_steps = []
            self._tell(_fail, [job], error)

    def _advance(self, job: Job, answer: Any) -> bool:
        """Take a step into a job, queue what follows, and tell whether the step was the last."""
        if not isinstance(job.work, Item):
            return True
        is_last = job.work.take(answer)
        if job.withdrawn_ns is not None:
            return is_last
        if is_last:
            if isinstance(job.work.task, Judge):
                self._anticipate(job, answer)
        elif self._stopping:
            self._tell(_fail, [job], DrainingError("the server is shutting down"))
        else:
            found = answer.judgement is not None or len(answer.drafted) > 0
            self._enqueue(job, keeps_turn=not found)
        return is_last

    def _give_up(self, running: Sequence[Job], error: DeviceLostError) -> None:
        lost = DrainingError("the model's device failed")
        lost.__cause__ = error
        with self._changed:
            self._refusal, self._running = lost, None
            jobs = [*running, *self._queue.clear()]
        # First, so that `on_device_lost` has run when a caller gets its job's error.
        self._tell(self._on_device_lost, error)
        self._tell(_fail, jobs, lost)

    def _tell(self, callback: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None
        # A closed loop raises RuntimeError: no caller is left.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *arguments)


@dataclass(frozen=True, slots=True)
class _Delivery:
    """The steps of an answer, for the caller that waits for a job."""

    job: Job
    steps: Sequence[Step[Any]]
    is_last: bool


def _fail(jobs: list[Job], error: BaseException) -> None:
    for job in jobs:
        job.outlet.end(error)
