"""The tests' own clock: it passes only while everybody waits."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest

from support.virtual_time import StuckError, run_virtually, virtually


@virtually
async def test_every_clock_tells_the_time_of_the_loop():
    loop = asyncio.get_running_loop()
    began = [loop.time(), time.monotonic(), time.perf_counter()]
    began_ns = [time.monotonic_ns(), time.perf_counter_ns()]
    await asyncio.sleep(12.5)
    assert [
        now - then
        for now, then in zip(
            [loop.time(), time.monotonic(), time.perf_counter()], began, strict=True
        )
    ] == [12.5] * 3
    assert [time.monotonic_ns() - began_ns[0], time.perf_counter_ns() - began_ns[1]] == [
        12_500_000_000
    ] * 2


def test_hours_pass_at_once_and_the_real_clock_is_back_afterwards():
    began = time.monotonic()
    run_virtually(asyncio.sleep(3000))
    assert 0 <= time.monotonic() - began < 60


@virtually
async def test_timers_come_in_the_order_of_their_times():
    loop, called = asyncio.get_running_loop(), []
    for seconds in (3.0, 1.0, 2.0):
        loop.call_later(seconds, lambda it=seconds: called.append((it, loop.time() - began)))
    began = loop.time()
    await asyncio.sleep(5)
    assert called == [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]


@virtually
async def test_what_is_given_to_a_thread_is_done_at_once():
    assert await asyncio.to_thread(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await asyncio.to_thread(lambda: 1 // 0)


def test_who_waits_for_nothing_is_named():
    async def wait_for_nothing():
        await asyncio.Event().wait()

    async def deadlock():
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(wait_for_nothing(), name="the hanging one")

    with pytest.raises(StuckError, match=r"ever happen again[\s\S]*the hanging one: .* in wait"):
        run_virtually(deadlock())


def test_who_waits_for_longer_than_the_limit_is_named():
    async def forever():
        for _ in itertools.count():
            await asyncio.sleep(60)

    with pytest.raises(StuckError, match=r"too long[\s\S]*in sleep"):
        run_virtually(forever(), limit_seconds=600)


def test_who_never_waits_is_named():
    async def busy():
        for _ in itertools.count():
            await asyncio.sleep(0)

    with pytest.raises(StuckError, match="stands still"):
        run_virtually(busy())
