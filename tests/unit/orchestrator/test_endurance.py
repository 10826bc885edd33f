"""When a request gives up for want of room; on virtual time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from paceline.errors import CacheExhaustedError, OverloadedError
from paceline_orchestrator.decoding.workforce import Endurance
from paceline_orchestrator.fleet import shortage
from support.virtual_time import virtually

FULL = CacheExhaustedError("full", retry_after_seconds=2.0)


class Server(SimpleNamespace):
    """One of which nothing is asked."""

    __hash__ = object.__hash__


@virtually
async def test_a_refusal_from_before_a_verdict_does_not_count():
    told: list[Exception] = []
    endurance, one, other = Endurance(told.append), Server(name="one"), Server(name="other")
    endurance.note_refusal(other, FULL, targets=[one, other])
    endurance.note_verdict()
    endurance.note_refusal(one, FULL, targets=[one, other])
    await asyncio.sleep(shortage.WAIT_SECONDS)
    endurance.note_refusal(one, FULL, targets=[one, other])
    assert not told, "the other one may have room by now"
    endurance.note_refusal(other, FULL, targets=[one, other])
    (error,) = told
    assert isinstance(error, OverloadedError)
    assert error.retry_after_seconds == 2


@virtually
async def test_a_request_whose_time_without_room_began_anew_has_all_of_it():
    told: list[Exception] = []
    endurance, only = Endurance(told.append), Server(name="only")
    endurance.note_refusal(only, FULL, targets=[only])
    await asyncio.sleep(shortage.WAIT_SECONDS)
    endurance.note_verdict()
    endurance.note_refusal(only, FULL, targets=[only])
    assert not told
