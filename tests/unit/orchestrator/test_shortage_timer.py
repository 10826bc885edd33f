"""When a request gives up for want of room; on virtual time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from paceline.errors import CacheExhaustedError, OverloadedError
from paceline_orchestrator.decoding.request_servers import ShortageTimer
from paceline_orchestrator.fleet import shortage
from support.virtual_time import virtually

FULL = CacheExhaustedError("full", retry_after_seconds=2.0)


class Server(SimpleNamespace):
    """One of which nothing is asked."""

    __hash__ = object.__hash__


@virtually
async def test_a_refusal_from_before_a_verdict_does_not_count():
    told: list[Exception] = []
    timer, one, other = (
        ShortageTimer(told.append, find_reason=AssertionError),
        Server(name="one"),
        Server(name="other"),
    )
    timer.note_refusal(other, FULL, targets=[one, other])
    timer.note_verdict()
    timer.note_refusal(one, FULL, targets=[one, other])
    await asyncio.sleep(shortage.WAIT_SECONDS)
    timer.note_refusal(one, FULL, targets=[one, other])
    assert not told, "the other one may have room by now"
    timer.note_refusal(other, FULL, targets=[one, other])
    (error,) = told
    assert isinstance(error, OverloadedError)
    assert error.retry_after_seconds == 2


@virtually
async def test_a_request_whose_time_without_room_began_anew_has_all_of_it():
    told: list[Exception] = []
    timer, only = ShortageTimer(told.append, find_reason=AssertionError), Server(name="only")
    timer.note_refusal(only, FULL, targets=[only])
    await asyncio.sleep(shortage.WAIT_SECONDS)
    timer.note_verdict()
    timer.note_refusal(only, FULL, targets=[only])
    assert not told
