"""Whom a request waits for before it begins."""

from __future__ import annotations

import asyncio

import pytest

from paceline_orchestrator.decoding.request_servers import StartBarrier
from support.virtual_system import now
from support.virtual_time import virtually


def looks_later(barrier, seconds, **found):
    asyncio.get_running_loop().call_later(seconds, lambda: barrier.update(**found))


@virtually
async def test_after_the_first_target_the_others_have_a_moment():
    barrier, began = StartBarrier(), now()
    barrier.update(has_target=False, is_whole=False)
    looks_later(barrier, 1, has_target=True, is_whole=False)
    looks_later(barrier, 1.04, has_target=True, is_whole=False)
    await barrier.ended()
    assert now() - began == pytest.approx(1.05)


@virtually
async def test_once_everyone_is_there_nobody_waits():
    barrier, began = StartBarrier(), now()
    barrier.update(has_target=True, is_whole=False)
    looks_later(barrier, 0.01, has_target=True, is_whole=True)
    await barrier.ended()
    assert now() - began == pytest.approx(0.01)
