"""Whatever is cancelled leaves nothing behind: at every moment of a stream, on every server."""

from __future__ import annotations

import asyncio

import pytest

from paceline_engine.sessions.host import HostLimits, ModelHost
from paceline_engine.simulated import SimulatedBackend, SimulatedModel
from support.in_process import in_process_system
from support.streams import PROMPT
from support.waiting import until

TOKENS = 12
# On a busy machine a forward may end before the cancel comes.
ATTEMPTS = 4
OPTIONS = {"max_tokens": TOKENS, "targets": 2, "lookahead": 2, "stream_timeline": True}


def host(seconds, *, acceptance_rate=1.0):
    model = SimulatedModel(
        ttft_seconds=seconds, tpot_seconds=seconds, acceptance_rate=acceptance_rate
    )
    return ModelHost(lambda: SimulatedBackend(model), limits=HostLimits(warm_up_rounds=0))


def system():
    drafter = host(0.001, acceptance_rate=0.6)
    return in_process_system(drafters=[drafter], targets=[host(0.004), host(0.004)])


async def read(generation, count):
    """Read so many events, and leave the stream; return how many there were."""
    seen = 0
    events = generation.events()
    try:
        async for _ in events:
            seen += 1
            if seen == count:
                break
    finally:
        await events.aclose()
    return seen


def stream_tasks():
    """Return the tasks that exist for requests; those of servers and channels come and go."""
    words = ("verify", "draft", "run", "renew", "open a session", "close a session")
    return [task for task in asyncio.all_tasks() if task.get_name().startswith(words)]


@pytest.mark.parametrize("strategy", ["autoregressive", "distributed"])
async def test_a_client_that_leaves_at_any_event_leaves_nothing_behind(strategy):
    async with system() as whole:
        expected = await whole.client.generate(PROMPT, strategy=strategy, **OPTIONS).collect()
        count, seen = 0, 0
        while seen == count:
            generation = whole.client.generate(PROMPT, strategy=strategy, **OPTIONS)
            count += 1
            seen = await read(generation, count)
            received = [id_ for chunk in generation.transcript.chunks for id_ in chunk.token_ids]
            assert tuple(received) == expected.token_ids[: len(received)]
            await whole.settled()
            await until(lambda: not stream_tasks(), what="the request's tasks are gone")
        assert count > TOKENS
        for each in whole.hosts:
            statistics = each.statistics()
            assert statistics.sessions_opened == statistics.sessions_released
            assert statistics.sessions_expired == 0
        assert sum(each.statistics().sessions_opened for each in whole.targets) >= count
        assert (await whole.client.info()).running_request_count == 0


async def test_after_a_rejection_the_servers_see_what_it_made_worthless_cancelled():
    async with system() as whole:
        options = {**OPTIONS, "max_tokens": 100, "strategy": "distributed"}
        for _ in range(ATTEMPTS):
            done = await whole.client.generate(PROMPT, **options).collect()
            await whole.settled()
            statistics = done.finished.statistics
            assert statistics.rejected_token_count > 0
            assert statistics.cancelled_rpc_count > 0
            seen = [withdrawn(servers) for servers in (whole.drafters, whole.targets)]
            if all(map(all, seen)):
                break
        assert all(map(all, seen)), seen


def withdrawn(hosts):
    """Return how many calls ended before their answer, and how many forwards."""
    seen = [each.statistics() for each in hosts]
    return (
        sum(each.calls_cancelled + each.calls_superseded for each in seen),
        sum(each.forwards_interrupted for each in seen),
    )
