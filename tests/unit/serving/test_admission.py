"""Requests are counted, refused once a process ends, and cut at its end."""

from __future__ import annotations

import asyncio

import pytest

from paceline.errors import DrainingError
from paceline_serving.admission import Admission

CLOSED = "this server is shutting down"


class Request:
    """One that waits until it is told to end.

    Attributes:
        has_begun: Set once it was let in.
        may_end: Lets it end.
    """

    def __init__(self, admission):
        self.has_begun, self.may_end = asyncio.Event(), asyncio.Event()
        self.task = asyncio.create_task(self._run(admission))

    async def _run(self, admission):
        with admission.admitted(), admission.cuttable():
            self.has_begun.set()
            await self.may_end.wait()


async def begun(admission):
    request = Request(admission)
    await request.has_begun.wait()
    return request


async def test_requests_are_counted_while_they_are_here():
    admission = Admission(CLOSED)
    first, second = await begun(admission), await begun(admission)
    assert admission.present_count == 2
    first.may_end.set()
    await first.task
    assert admission.present_count == 1
    second.may_end.set()
    await second.task
    assert admission.present_count == 0


async def test_it_is_idle_before_the_first_request_and_after_the_last_one():
    admission = Admission(CLOSED)
    await admission.idle()
    first, second = await begun(admission), await begun(admission)
    idle = asyncio.create_task(admission.idle())
    first.may_end.set()
    await first.task
    assert not idle.done()
    second.may_end.set()
    await idle


async def test_a_request_that_fails_is_here_no_more():
    admission = Admission(CLOSED)
    with pytest.raises(ValueError, match="a bug"), admission.admitted():
        raise ValueError("a bug")
    assert admission.present_count == 0
    await admission.idle()


async def test_once_closed_it_refuses_new_requests_and_lets_others_end():
    admission = Admission(CLOSED)
    request = await begun(admission)
    admission.close()
    with pytest.raises(DrainingError, match=CLOSED), admission.admitted():
        pass
    assert admission.present_count == 1
    request.may_end.set()
    await request.task
    await admission.idle()


async def test_a_cut_ends_all_requests_with_the_reason():
    admission = Admission(CLOSED)
    requests = [await begun(admission) for _ in range(3)]
    assert not admission.has_cut.is_set()
    admission.cut()
    outcomes = await asyncio.gather(*(it.task for it in requests), return_exceptions=True)
    assert [(type(it), it.message) for it in outcomes] == [(DrainingError, CLOSED)] * 3
    assert admission.has_cut.is_set()
    await admission.idle()


async def test_a_cut_leaves_alone_what_runs_outside():
    admission = Admission(CLOSED)
    may_end = asyncio.Event()

    async def run():
        with admission.admitted():
            with admission.cuttable():
                pass
            await may_end.wait()

    running = asyncio.create_task(run())
    await asyncio.sleep(0)
    admission.cut()
    may_end.set()
    await running


@pytest.mark.parametrize("is_cut", [False, True])
async def test_a_request_whose_client_leaves_is_cancelled_whether_it_is_cut_or_not(is_cut):
    admission = Admission(CLOSED)
    request = await begun(admission)
    if is_cut:
        admission.cut()
    request.task.cancel()
    await asyncio.wait([request.task])
    assert request.task.cancelled()
    await admission.idle()


async def test_a_request_that_was_cut_can_await_its_farewell():
    admission = Admission(CLOSED)
    has_begun = asyncio.Event()

    async def run():
        try:
            with admission.cuttable():
                has_begun.set()
                await asyncio.Event().wait()
        except DrainingError:
            await asyncio.sleep(0)
            return "told"

    running = asyncio.create_task(run())
    await has_begun.wait()
    admission.cut()
    assert await running == "told"
    assert not running.cancelling()
