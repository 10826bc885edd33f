"""Which requests the metrics count, and from when on they measure; on virtual time."""

from __future__ import annotations

import asyncio

import pytest

from support.virtual_servers import targets
from support.virtual_system import virtual_system
from support.virtual_time import virtually

HOPS_SECONDS = 0.01


@virtually
async def test_the_time_of_a_request_counts_from_its_arrival():
    (target,) = targets(1)
    async with virtual_system(target) as system, asyncio.TaskGroup() as tasks:
        await target.kill()
        await system.until(lambda: not system.server("target-0").ready)
        running = tasks.create_task(system.generate(max_tokens=8))
        await asyncio.sleep(2)
        await target.start()
        stream = await running
        took_seconds = stream.ended - stream.began
        assert took_seconds > 2
        told = system.registry.get_sample_value("paceline_request_duration_seconds_sum")
        assert told == pytest.approx(took_seconds, abs=HOPS_SECONDS)
