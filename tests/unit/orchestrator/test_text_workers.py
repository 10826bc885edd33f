"""Long texts are worked on in threads, one of each client's at a time."""

from __future__ import annotations

import asyncio
import threading

from paceline_orchestrator.front.text_workers import TextWorkers

LONG = 100_000


async def test_short_work_is_done_here_and_now():
    here = threading.current_thread()
    assert await TextWorkers().run(threading.current_thread, size=10, share="a") is here
    assert await TextWorkers().run(threading.current_thread, size=LONG, share="a") is not here


async def test_another_client_need_not_wait_for_all_the_long_texts_of_one():
    workers, release, done = TextWorkers(), threading.Event(), []

    def wait():
        release.wait(30)

    async def run(work, share):
        await workers.run(work, size=LONG, share=share)
        done.append(share)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(5):
            tasks.create_task(run(wait, "greedy"))
        await tasks.create_task(run(lambda: None, "modest"))
        assert done == ["modest"]
        release.set()
    assert done == ["modest", *["greedy"] * 5]


async def test_a_client_that_does_not_wait_gets_no_second_thread():
    workers, release, begun = TextWorkers(), threading.Event(), []

    def wait():
        begun.append(threading.current_thread())
        release.wait(30)

    impatient = [
        asyncio.create_task(workers.run(wait, size=LONG, share="greedy")) for _ in range(3)
    ]
    await asyncio.sleep(0)
    for task in impatient:
        task.cancel()
    await asyncio.wait(impatient)
    again = asyncio.create_task(workers.run(wait, size=LONG, share="greedy"))
    await workers.run(lambda: None, size=LONG, share="modest")
    assert len(begun) == 1
    release.set()
    await again
    assert len(begun) == 2


async def test_what_the_work_raises_is_raised():
    def fail():
        raise LookupError("no such text")

    for size in (1, LONG):
        try:
            await TextWorkers().run(fail, size=size, share="a")
        except LookupError:
            continue
        raise AssertionError("it was lost")
