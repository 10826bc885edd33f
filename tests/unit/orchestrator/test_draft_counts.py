"""Every draft token is accepted, rejected or discarded, and counted so, however a request ends."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from paceline import errors
from paceline.v1 import orchestrator_service_pb2 as pb
from support.virtual_servers import drafters, targets
from support.virtual_system import virtual_system
from support.virtual_time import virtually


async def leave(system, reading):
    await asyncio.sleep(0.5)
    reading.cancel()


async def wait_for_the_deadline(system, reading):
    """Do nothing."""


async def lose_the_targets(system, reading):
    await asyncio.sleep(0.5)
    for server in system.models[1:]:
        await server.kill()


@pytest.mark.parametrize("strategy", [pb.STRATEGY_DISTRIBUTED, pb.STRATEGY_SPECULATIVE])
@pytest.mark.parametrize(
    ("end", "seconds"), [(leave, 60), (wait_for_the_deadline, 2), (lose_the_targets, 60)]
)
@virtually
async def test_what_a_request_leaves_when_it_ends_early_counts_as_discarded(
    strategy, end, seconds, monkeypatch
):
    learnt = []
    async with virtual_system(*drafters(1, latency_seconds=0.002), *targets(2)) as system:
        planning = system.planning
        monkeypatch.setattr(planning.experience, "learn", lambda drafts, **_: learnt.append(drafts))
        request = system.generate(
            strategy=strategy, lookahead=4, target_count=2, max_tokens=999, seconds=seconds
        )
        reading = asyncio.ensure_future(request)
        await end(system, reading)
        with suppress(errors.PacelineError, asyncio.CancelledError):
            await reading
        await system.settle()
    (counted,) = learnt
    assert counted.drafted == counted.accepted + counted.rejected + counted.discarded
    assert counted.discarded > 0
