"""Many requests want the same answer: one question, whoever leaves meanwhile."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from paceline.errors import ConnectionLostError
from paceline_gateway.fleet.shared_answer import SharedAnswer


class Asked:
    """What answers, when it is told to; and a clock that stands."""

    def __init__(self):
        self.count = 0
        self.now = 0.0
        self.may_answer = asyncio.Event()
        self.errors = []

    async def __call__(self):
        self.count += 1
        await self.may_answer.wait()
        if self.errors:
            raise self.errors.pop()
        return self.count


@asynccontextmanager
async def shared(asked):
    async with asyncio.TaskGroup() as tasks:
        yield SharedAnswer(asked, tasks=tasks, fresh_seconds=2, clock=lambda: asked.now), tasks


async def waiting(answer, tasks, *, count):
    found = [tasks.create_task(answer.get()) for _ in range(count)]
    await asyncio.sleep(0)  # all of them have begun
    return found


async def test_one_question_is_asked_for_all_who_wait():
    asked = Asked()
    async with shared(asked) as (answer, tasks):
        found = await waiting(answer, tasks, count=64)
        asked.may_answer.set()
    assert [each.result() for each in found] == [1] * 64
    assert asked.count == 1


async def test_an_answer_is_kept_for_a_while():
    asked = Asked()
    asked.may_answer.set()
    async with shared(asked) as (answer, _):
        assert await answer.get() == 1
        asked.now = 2.0
        assert await answer.get() == 1
        asked.now = 2.1
        assert await answer.get() == 2


async def test_who_leaves_leaves_the_question_to_the_others():
    asked = Asked()
    async with shared(asked) as (answer, tasks):
        first, second = await waiting(answer, tasks, count=2)
        first.cancel()
        await asyncio.wait([first])
        asked.may_answer.set()
    assert first.cancelled()
    assert (second.result(), asked.count) == (1, 1)


@pytest.mark.parametrize("error", [ConnectionLostError("gone"), ValueError("unforeseen")])
async def test_an_error_is_everybodys_and_the_next_one_asks_anew(error):
    asked = Asked()
    asked.errors.append(error)
    async with shared(asked) as (answer, _):
        outcomes = asyncio.gather(answer.get(), answer.get(), return_exceptions=True)
        await asyncio.sleep(0)
        asked.may_answer.set()
        assert await outcomes == [error] * 2
        assert await answer.get() == 2


async def test_a_question_ends_with_who_owns_it():
    asked = Asked()
    async with asyncio.timeout(30):
        async with shared(asked) as (answer, tasks):
            (never,) = await waiting(answer, tasks, count=1)
            await asyncio.sleep(0)  # so has the question
            answer.close()
    assert never.cancelled()
