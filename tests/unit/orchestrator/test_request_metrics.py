"""Which requests the metrics count, and from when on they measure; on virtual time."""

from __future__ import annotations

import asyncio

import pytest

from paceline import errors
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


@virtually
async def test_every_request_is_counted_once_whatever_becomes_of_it():
    (target,) = targets(1)
    async with virtual_system(target) as system:

        def told():
            return system.registry.get_sample_value("paceline_incoming_requests_total")

        await system.generate()
        assert told() == 1
        with pytest.raises(errors.InvalidFieldError):
            await system.generate(lookahead=0)
        assert told() == 2
        await target.kill()
        with pytest.raises(errors.NoTargetError):
            await system.generate()
        assert told() == 3
        system.servicer.drain()
        with pytest.raises(errors.DrainingError):
            await system.generate()
        assert told() == 4
