"""Long texts are handed on one after the other, each client's in its turn."""

from __future__ import annotations

import asyncio

from paceline_orchestrator.decoding.session_opener import LongTextQueue
from support.virtual_time import run_virtually

LONG = 100_000
REST_SECONDS = 0.02


async def passing(texts):
    """When each text passed, in seconds since all of them came, in the order of passing."""
    queue, began, passed = LongTextQueue(), asyncio.get_running_loop().time(), []

    async def go(name, length, share):
        await queue.wait_turn(length, share=share)
        passed.append((name, round(asyncio.get_running_loop().time() - began, 3)))

    async with asyncio.TaskGroup() as tasks:
        for text in texts:
            tasks.create_task(go(*text))
    return passed


def test_after_a_long_text_the_way_is_free_for_a_while_and_short_ones_need_not_wait():
    texts = [("first", LONG, "a"), ("second", LONG, "a"), ("short", 1000, "a")]
    assert run_virtually(passing(texts)) == [
        ("first", 0.0),
        ("short", 0.0),
        ("second", REST_SECONDS),
    ]


def test_another_client_need_not_wait_for_all_the_long_texts_of_one():
    texts = [*((f"greedy {n}", LONG, "greedy") for n in range(3)), ("modest", LONG, "modest")]
    order = [name for name, _ in run_virtually(passing(texts))]
    assert order == ["greedy 0", "greedy 1", "modest", "greedy 2"], "it waits for one in the way"


def test_who_leaves_while_waiting_leaves_the_way_free():
    async def scene():
        queue = LongTextQueue()
        await queue.wait_turn(LONG, share="a")
        leaving = [asyncio.create_task(queue.wait_turn(LONG, share=each)) for each in "aab"]
        await asyncio.sleep(0)
        for task in leaving:
            task.cancel()
        await asyncio.wait(leaving)
        began = asyncio.get_running_loop().time()
        await queue.wait_turn(LONG, share="a")
        return asyncio.get_running_loop().time() - began

    assert run_virtually(scene()) <= REST_SECONDS
