from __future__ import annotations

import asyncio
import threading
import time
import weakref
from array import array
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from paceline.errors import DrainingError, OverloadedError
from paceline_engine.scheduling.accounting import Waste
from paceline_engine.scheduling.jobs import Outlet, Step
from paceline_engine.scheduling.latencies import LatencyMeter
from paceline_engine.scheduling.worker import ModelWorker
from paceline_engine.terms.backend import DeviceLostError, ForwardInterrupted
from paceline_engine.terms.calls import SessionSpec
from paceline_engine.terms.items import Draft, Item, Outcome
from unit.engine.conftest import chain, until


class Steps:
    """A backend whose items have, for a cache, what a step of theirs does and finds."""

    def __init__(self, *, shares_forwards=False):
        self.description = SimpleNamespace(
            shares_forwards=shares_forwards, cancels_between_layers=True, layer_count=30
        )

    def run(self, items, interrupt, *, row_limit=None):
        answers = []
        for each in items:
            try:
                found = each.cache(interrupt)
                drafted = chain([0] if found is None else found)
                answers.append(Outcome(1, drafted=drafted, is_inner=not drafted))
            except ZeroDivisionError as error:
                answers.append(error)
        return answers


class Text:
    """What an item has for a cache: what its steps do."""

    def __init__(self, step):
        self._step = step

    def __call__(self, interrupt):
        return self._step(interrupt)

    def missing_length(self, prefix):
        return 1

    def stage(self, prefix, *, draft_count):
        return 0


def item(
    step=lambda _: None, *, steps=1, chunk_tokens=1, depth=0, share="", patience_ns=None
) -> Item:
    """A draft that is done after so many tokens: steps, unless a step finds something else."""
    step = Text(step)
    return Item(
        step,
        SessionSpec(1, share=share),
        prefix=array("I"),
        task=Draft(steps, chunk_tokens=chunk_tokens),
        depth=depth,
        patience_ns=patience_ns,
    )


@asynccontextmanager
async def working(**settings):
    worker = ModelWorker(**{"queue_limit": 100, **settings})
    worker.backend = Steps()
    worker.start()
    try:
        yield worker
    finally:
        await worker.stop()


class Blocker:
    """A job that runs until it is let go or interrupted, so that others queue up behind it."""

    def __init__(self, worker: ModelWorker) -> None:
        self.entered, self.let_go = threading.Event(), threading.Event()
        self.outlet = Outlet()
        self.job = worker.submit(item(self._run), outlet=self.outlet)

    def _run(self, interrupt):
        self.entered.set()
        while not self.let_go.wait(0.0005):
            if interrupt.is_set():
                raise ForwardInterrupted


async def blocked(worker: ModelWorker) -> Blocker:
    blocker = Blocker(worker)
    await until(blocker.entered.is_set)
    return blocker


async def queued(worker: ModelWorker, items: list[Item]) -> list[list[Step]]:
    """Run items that were queued behind a running job; return the steps of each."""
    blocker = await blocked(worker)
    outlets = [worker.submit(each, outlet=Outlet()).outlet for each in items]
    blocker.let_go.set()
    return [[step async for step in outlet] for outlet in outlets]


async def test_the_smallest_depth_runs_first_and_equals_in_order():
    async with working() as worker:
        order, depths = [], {"a": 2, "b": 0, "c": 1, "d": 0}
        await queued(
            worker,
            [
                item(lambda _, name=name: order.append(name), depth=depth)
                for name, depth in depths.items()
            ],
        )
        assert order == ["b", "d", "c", "a"]


async def test_a_promoted_job_keeps_its_turn_at_its_new_depth():
    async with working() as worker:
        blocker, order, jobs = await blocked(worker), [], {}
        for name, depth in [("a", 5), ("b", 1), ("c", 1)]:
            jobs[name] = worker.submit(
                item(lambda _, name=name: order.append(name), depth=depth), outlet=Outlet()
            )
        worker.ask_for(jobs["a"], item(depth=1))
        blocker.let_go.set()
        await until(lambda: len(order) == 3)
        assert order == ["a", "b", "c"]


async def test_jobs_of_many_steps_take_turns():
    async with working() as worker:
        order = []
        drafts = [item(lambda _, name=name: order.append(name), steps=3) for name in "xy"]
        assert [len(steps) for steps in await queued(worker, drafts)] == [3, 3]
        assert order == list("xyxyxy")


async def test_a_job_keeps_its_turn_until_it_has_found_something():
    async with working() as worker:
        order = []
        finds = {name: [[], [5], []] for name in "xy"}  # a stack's inner steps find none
        drafts = [
            item(lambda _, name=name: (order.append(name), finds[name].pop(0))[1]) for name in "xy"
        ]
        assert [len(steps) for steps in await queued(worker, drafts)] == [2, 2]
        assert order == list("xxyy")


async def test_a_draft_is_done_when_it_has_its_tokens_however_many_a_step_finds():
    async with working() as worker:
        outlet, finds = Outlet(), [[5], [], [6, 7], [8], [9]]
        draft = item(lambda _: finds.pop(0), steps=4)
        worker.submit(draft, outlet=outlet)
        assert [step.outcome.drafted async for step in outlet] == [
            chain(found) for found in ([5], [], [6, 7], [8])
        ]
        assert finds == [[9]]
        assert draft.prefix.tolist() == [5, 6, 7, 8]


@pytest.mark.parametrize("finds", [[1] * 7, [2, 0, 1, 3, 1], [7]])
async def test_steps_are_handed_over_once_their_answer_is_complete(finds):
    async with working() as worker:
        outlet, found, seen = Outlet(), 0, []
        tokens = iter(finds)

        def step(_):
            nonlocal found
            seen.append((found, len(handed)))
            found += (count := next(tokens))
            return [5] * count

        handed: list[int] = []
        worker.submit(item(step, steps=7, chunk_tokens=3), outlet=outlet)
        put = outlet.put
        outlet.put = lambda steps: (
            handed.append(sum(len(each.outcome.chain) for each in steps)),
            put(steps),
        )
        assert sum([len(each.outcome.chain) async for each in outlet]) == 7
        assert all(sum(handed[:count]) >= 3 * count for count in range(len(handed)))
        assert len(handed) <= 3, "the loop is woken once for an answer"


async def test_forwards_are_counted_one_by_one_however_many_an_answer_takes():
    counted = []
    async with working(on_forward=counted.append) as worker:
        outlet = Outlet()
        worker.submit(item(steps=5, chunk_tokens=4), outlet=outlet)
        assert len([step async for step in outlet]) == 5
    assert [len(outcomes) for outcomes in counted] == [1] * 5


async def test_the_steps_of_a_draft_that_was_withdrawn_are_counted_too():
    counted = []
    async with working(on_forward=counted.append) as worker:
        entered, let_go, begun = threading.Event(), threading.Event(), []

        def step(_):
            begun.append(1)
            if len(begun) == 3:
                entered.set()
                let_go.wait(5)

        job = worker.submit(item(step, steps=5, chunk_tokens=5), outlet=Outlet())
        await until(entered.is_set)
        worker.withdraw(job)
        let_go.set()
        await until(lambda: len(counted) == 3)


async def test_an_errand_goes_before_all_items_and_is_no_step_of_one():
    order, seen = [], []
    async with working(on_forward=seen.extend) as worker:
        blocker, outlet = await blocked(worker), Outlet()
        worker.submit(item(lambda _: order.append("item")), outlet=outlet)
        errand = asyncio.create_task(worker.run(lambda _: order.append("errand")))
        await until(lambda: worker.queue_length == 2)
        blocker.let_go.set()
        await anext(outlet)
        await errand
        await until(lambda: len(seen) == 2)
        assert order == ["errand", "item"]
    assert len(seen) == 2, "the blocker's and the item's"


async def test_a_withdrawn_job_leaves_the_queue():
    async with working() as worker:
        blocker, ran = await blocked(worker), []
        job = worker.submit(item(lambda _: ran.append(1)), outlet=Outlet())
        assert worker.queue_length == 1
        worker.withdraw(job)
        assert worker.queue_length == 0
        blocker.let_go.set()
        await worker.run(lambda _: None)
        assert not ran


async def test_a_running_job_is_interrupted_and_the_next_one_runs():
    async with working() as worker:
        blocker = await blocked(worker)
        worker.withdraw(blocker.job)
        assert await worker.run(lambda _: 7) == 7
        assert worker.interrupted_count == 1


@pytest.mark.usefixtures("no_collector")
async def test_an_error_that_a_caller_holds_has_nothing_of_the_forwards_that_failed():
    held, steps = [], []

    class Hidden:
        """A forward's tensor."""

    def fail(error, *, cause=None):
        hidden = Hidden()
        held.append(weakref.ref(hidden))
        raise error from cause

    def step(_):
        caught = []
        for error in (KeyError("cause"), OSError("context")):
            try:
                fail(error)
            except (KeyError, OSError) as found:
                caught.append(found)
        cause, context = caught
        try:
            raise context
        except OSError:
            fail(ZeroDivisionError("told"), cause=cause)

    async with working() as worker:
        outlet = Outlet()
        worker.submit(item(step), outlet=outlet)
        with pytest.raises(ZeroDivisionError) as told:
            steps += [each async for each in outlet]
        await worker.run(lambda _: None)
        assert isinstance(told.value.__cause__, KeyError)
        assert isinstance(told.value.__context__, OSError)
        assert [each() for each in held] == [None] * 3


@pytest.mark.usefixtures("no_collector")
async def test_of_a_forward_that_was_given_up_nothing_stays_until_a_collector_comes():
    entered = threading.Event()

    def step(interrupt):
        entered.set()
        while not interrupt.is_set():
            time.sleep(0.0005)
        raise ForwardInterrupted

    async with working() as worker:
        job = worker.submit(item(step), outlet=Outlet())
        await until(entered.is_set)
        text = weakref.ref(job.work.cache)
        worker.withdraw(job)
        del job
        await until(lambda: worker.interrupted_count == 1)
        await worker.run(lambda _: None)
        assert text() is None


async def test_a_withdrawn_job_of_many_steps_does_not_come_back():
    async with working() as worker:
        ran, outlet = [], Outlet()
        job = worker.submit(item(lambda _: ran.append(1), steps=1_000_000), outlet=outlet)
        await anext(outlet)
        worker.withdraw(job)
        await worker.run(lambda _: None)
        count = len(ran)
        await worker.run(lambda _: None)
        assert len(ran) == count
        assert worker.queue_length == 0


async def sharing(worker: ModelWorker, *steps) -> list:
    """Jobs that run in one forward."""
    worker.backend = Steps(shares_forwards=True)
    blocker = await blocked(worker)
    jobs = [worker.submit(item(step), outlet=Outlet()) for step in steps]
    blocker.let_go.set()
    return jobs


class Held:
    """A step that lasts until it is let go, or its forward is given up."""

    def __init__(self) -> None:
        self.entered, self.let_go = threading.Event(), threading.Event()

    def __call__(self, interrupt):
        self.entered.set()
        while not self.let_go.wait(0.0005):
            if interrupt.is_set():
                raise ForwardInterrupted


async def test_a_step_tells_who_shared_its_forward():
    async with working() as worker:
        blocker = await blocked(worker)
        jobs = [worker.submit(item(), outlet=Outlet()) for _ in range(3)]
        worker.backend = Steps(shares_forwards=True)
        blocker.let_go.set()
        steps = [await anext(job.outlet) for job in jobs]
        assert [(it.shared_row_count, it.shared_job_count) for it in steps] == [(3, 3)] * 3
        alone = await anext(worker.submit(item(), outlet=Outlet()).outlet)
        assert (alone.shared_row_count, alone.shared_job_count) == (1, 1)


async def test_what_a_forward_found_wakes_the_loop_once(monkeypatch):
    async with working() as worker:
        jobs = await sharing(worker, *[lambda _: [7]] * 20)
        loop, woken = asyncio.get_running_loop(), []
        wake = loop.call_soon_threadsafe
        monkeypatch.setattr(
            loop, "call_soon_threadsafe", lambda *told: woken.append(told[0]) or wake(*told)
        )
        for job in jobs:
            assert [step.outcome.drafted async for step in job.outlet] == [chain([7])]
        # The blocker's forward, if it was not over, and the one of all; each told what it was.
        assert len(woken) <= 4


async def test_a_job_that_is_withdrawn_leaves_those_in_its_forward_alone():
    async with working() as worker:
        held = Held()
        gone, stays = await sharing(worker, held, lambda _: [7])
        await until(held.entered.is_set)
        worker.withdraw(gone)
        held.let_go.set()
        assert (await anext(stays.outlet)).outcome.drafted == chain([7])
        assert worker.interrupted_count == 0
        assert worker.waste.forward_count == 0
        assert worker.waste.forward_ns > 0, "its rows were computed in vain"


async def test_a_forward_is_given_up_when_nobody_waits_for_any_of_it():
    async with working() as worker:
        held = Held()
        jobs = await sharing(worker, held, lambda _: [7])
        await until(held.entered.is_set)
        for job in jobs:
            worker.withdraw(job)
        assert await worker.run(lambda _: 7) == 7
        assert (worker.interrupted_count, worker.waste.forward_count) == (1, 1)


async def test_an_items_own_error_reaches_its_caller_and_not_those_in_its_forward():
    async with working() as worker:
        wrong, right = await sharing(worker, lambda _: 1 / 0, lambda _: [7])
        with pytest.raises(ZeroDivisionError):
            await anext(wrong.outlet)
        assert (await anext(right.outlet)).outcome.drafted == chain([7])


async def test_an_error_reaches_its_caller_and_no_other():
    async with working() as worker:

        def fail(_):
            raise ZeroDivisionError("mine")

        with pytest.raises(ZeroDivisionError, match="mine"):
            await worker.run(fail)
        assert await worker.run(lambda _: 1) == 1


async def test_the_queue_is_bounded():
    async with working(queue_limit=2) as worker:
        blocker = await blocked(worker)
        for _ in range(2):
            worker.submit(item(lambda _: None), outlet=Outlet())
        with pytest.raises(OverloadedError) as caught:
            worker.submit(item(lambda _: None), outlet=Outlet())
        assert caught.value.retry_after_seconds
        blocker.let_go.set()


async def test_one_share_leaves_places_in_the_queue_to_others():
    async with working(queue_limit=20) as worker:
        blocker = await blocked(worker)
        for _ in range(16):
            worker.submit(item(lambda _: None, share="greedy"), outlet=Outlet())
        with pytest.raises(OverloadedError, match="16 of them this client's") as caught:
            worker.submit(item(lambda _: None, share="greedy"), outlet=Outlet())
        assert caught.value.retry_after_seconds
        job = worker.submit(item(lambda _: None, share="modest"), outlet=Outlet())
        worker.withdraw(job)
        assert worker.queue_length == 16
        blocker.let_go.set()
        await worker.run(lambda _: None)
        await until(lambda: worker.queue_length == 0)
        for _ in range(16):  # every place was given back
            worker.submit(item(lambda _: None, share="greedy"), outlet=Outlet())


class Forwards:
    """Forwards that take one unit of a clock of their own, and are remembered."""

    def __init__(self) -> None:
        self.now, self.ran = 0, []

    def __call__(self) -> int:
        return self.now

    def one_of(self, share: str, *, length: int = 1):
        def forward(_):
            time.sleep(0)  # a real one lets the event loop run, too
            self.now += length
            self.ran.append(share)

        return forward


@pytest.mark.parametrize("streams", [1, 16, 128])
async def test_a_stream_waits_for_two_forwards_of_a_client_however_many_streams_that_has(streams):
    forwards = Forwards()
    async with working(queue_limit=1000, clock_ns=forwards) as worker:
        blocker = await blocked(worker)
        for _ in range(streams):
            worker.submit(
                item(forwards.one_of("greedy"), share="greedy", steps=1_000_000), outlet=Outlet()
            )
        blocker.let_go.set()
        # As a stream does: the next call comes when the last one was answered.
        for _ in range(20):
            outlet = Outlet()
            worker.submit(item(forwards.one_of("modest"), share="modest"), outlet=outlet)
            before = len(forwards.ran)
            await anext(outlet)
            place = len(forwards.ran) - 1 - forwards.ran[::-1].index("modest")
            # The forward that ran, and one more.
            assert place - before <= 2


async def test_turns_are_taken_within_a_depth():
    forwards = Forwards()
    async with working(clock_ns=forwards) as worker:
        wanted = [("a", 1), ("a", 0), ("a", 0), ("b", 1), ("b", 1), ("b", 0)]
        await queued(
            worker,
            [item(forwards.one_of(share), share=share, depth=depth) for share, depth in wanted],
        )
        assert forwards.ran == ["a", "b", "a", "b", "a", "b"]


async def test_long_forwards_count_for_more():
    forwards = Forwards()
    async with working(clock_ns=forwards) as worker:
        lengths = [("long", 3), ("long", 3)] + [("short", 1)] * 6
        await queued(
            worker,
            [item(forwards.one_of(share, length=length), share=share) for share, length in lengths],
        )
        assert forwards.ran == ["long", *["short"] * 3, "long", *["short"] * 3]


async def test_a_forward_is_overdue_when_its_patience_is_over_and_until_it_ends():
    now = 0
    async with working(clock_ns=lambda: now) as worker:
        blocker = await blocked(worker)
        entered, let_go, outlet = threading.Event(), threading.Event(), Outlet()

        def hang(_):
            entered.set()
            let_go.wait()

        job = worker.submit(item(hang, patience_ns=100), outlet=outlet)
        now = 10**15
        assert worker.overdue_ns == 0  # nobody said how long the blocker may take
        blocker.let_go.set()
        await until(entered.is_set)
        assert worker.overdue_ns == 0  # its time in the queue does not count
        now += 100
        assert worker.overdue_ns == 0
        now += 1
        assert worker.overdue_ns == 101
        worker.withdraw(job)
        assert worker.overdue_ns == 101  # the thread hangs, whether somebody waits or not
        let_go.set()
        await anext(outlet)
        assert worker.overdue_ns == 0


class Prompt:
    """A job with so many rows that its part takes 500 ms, or less if it is short."""

    def __init__(self, worker, rows):
        self.entered, self.let_go = threading.Semaphore(0), threading.Semaphore(0)
        self.was_interrupted = False
        work = item(self._run)
        work.cache.missing_length = lambda _: rows
        worker.submit(work, outlet=Outlet())

    def _run(self, interrupt):
        self.entered.release()
        self.let_go.acquire()
        if interrupt.is_set():
            self.was_interrupted = True
            raise ForwardInterrupted


@pytest.mark.parametrize(
    ("rows", "elapsed_ms", "gives_way"),
    [(5000, 0, True), (5000, 399, True), (5000, 400, False), (900, 0, False)],
)
async def test_a_long_part_of_a_prompt_gives_way_unless_it_ends_soon(rows, elapsed_ms, gives_way):
    """What arrives waits 100 ms at most, at 0.1 ms a row."""
    now = 0
    meter = LatencyMeter()
    meter.record_prefills((1000, 100_000_000), (2000, 200_000_000))
    async with working(clock_ns=lambda: now, meter=meter) as worker:
        worker.backend = Steps(shares_forwards=True)
        prompt, outlet = Prompt(worker, rows), Outlet()
        await until(lambda: prompt.entered.acquire(blocking=False))
        now = elapsed_ms * 1_000_000
        worker.submit(item(), outlet=outlet)
        for _ in range(3):
            prompt.let_go.release()
        await anext(outlet)
        assert prompt.was_interrupted == gives_way
        assert worker.interrupted_count == gives_way


async def test_a_lost_device_ends_every_job_and_is_told_once():
    told = []
    async with working(on_device_lost=told.append) as worker:
        blocker, outlet = await blocked(worker), Outlet()
        error = DeviceLostError("illegal access")

        def lose(_):
            raise error

        worker.submit(item(lose, depth=0), outlet=Outlet())
        worker.submit(item(lambda _: None, depth=1), outlet=outlet)
        blocker.let_go.set()
        with pytest.raises(DrainingError) as caught:
            await anext(outlet)
        assert caught.value.__cause__ is error
        with pytest.raises(DrainingError):
            await worker.run(lambda _: None)
        assert told == [error]


@pytest.mark.parametrize("breaks", ["most_rows", "record"])
async def test_a_thread_that_breaks_is_a_lost_device_and_leaves_nobody_waiting(breaks, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError("a prompt")

    meter, told, outlet = LatencyMeter(), [], Outlet()
    monkeypatch.setattr(meter, breaks, fail)
    async with working(meter=meter, on_device_lost=told.append) as worker:
        worker.submit(item(), outlet=outlet)
        async with asyncio.timeout(60):
            with pytest.raises(DrainingError):
                await anext(outlet)
        assert [str(error) for error in told] == ["its thread broke (ZeroDivisionError)"]
        with pytest.raises(DrainingError):
            worker.submit(item(), outlet=Outlet())


async def test_stopping_ends_what_waits_interrupts_what_runs_and_takes_nothing_more():
    async with working() as worker:
        blocker, outlet = await blocked(worker), Outlet()
        worker.submit(item(lambda _: None), outlet=outlet)
        await worker.stop()
        with pytest.raises(DrainingError):
            await anext(outlet)
        with pytest.raises(ForwardInterrupted):
            await anext(blocker.outlet)
        with pytest.raises(DrainingError):
            await worker.run(lambda _: None)


async def test_a_forward_that_never_returns_does_not_hold_up_the_end(monkeypatch):
    monkeypatch.setattr("paceline_engine.scheduling.worker._STOP_SECONDS", 0.01)
    returns, entered = threading.Event(), threading.Event()

    def hang(_):
        entered.set()
        returns.wait()

    async with working() as worker:
        worker.submit(item(hang), outlet=Outlet())
        await until(entered.is_set)
        await worker.stop()
        assert worker.busy
        returns.set()


async def test_a_failure_to_count_a_step_leaves_no_caller_waiting():
    async with working(on_forward=lambda _: 1 / 0) as worker:
        failures = []
        asyncio.get_running_loop().set_exception_handler(lambda _, seen: failures.append(seen))
        outlet = Outlet()
        worker.submit(item(), outlet=outlet)
        assert len([step async for step in outlet]) == 1
        assert isinstance(failures[0]["exception"], ZeroDivisionError)


async def test_stopping_ends_a_job_of_many_steps():
    async with working() as worker:
        outlet = Outlet()
        worker.submit(item(lambda _: None, steps=1_000_000), outlet=outlet)
        await anext(outlet)
        await worker.stop()
        with pytest.raises(DrainingError):
            async for _ in outlet:
                pass


@pytest.mark.parametrize("notices", [True, False])
async def test_a_forward_that_nobody_waits_for_any_more_is_waste(notices):
    async with working() as worker:
        blocker = await blocked(worker)
        if notices:
            worker.withdraw(blocker.job)
        else:  # as where layers are not looked between
            worker._running.interrupt.is_set = lambda: False
            worker.withdraw(blocker.job)
            blocker.let_go.set()
        await worker.run(lambda _: None)
    assert worker.waste.forward_count == 1
    assert worker.waste.forward_ns > worker.waste.freeing_ns > 0


async def test_an_answer_is_no_waste_and_neither_is_what_never_ran():
    async with working() as worker:
        blocker, outlet = await blocked(worker), Outlet()
        waiting = worker.submit(item(lambda _: None), outlet=outlet)
        worker.withdraw(waiting)
        blocker.let_go.set()
        await anext(blocker.outlet)
        worker.withdraw(blocker.job)
        await worker.run(lambda _: None)
    assert worker.waste == Waste()


@pytest.mark.parametrize("ended_before", [False, True])
async def test_an_error_overtakes_steps_that_were_not_fetched(ended_before):
    outlet = Outlet()
    outlet.put(["step"])
    if ended_before:
        outlet.end()
    outlet.end(DrainingError("now"))
    outlet.end(OverloadedError("later"))
    with pytest.raises(DrainingError):
        await anext(outlet)


async def test_a_normal_end_comes_after_the_steps():
    outlet = Outlet()
    outlet.put(["step"])
    outlet.end()
    outlet.put(["late"])
    assert [step async for step in outlet] == ["step"]
