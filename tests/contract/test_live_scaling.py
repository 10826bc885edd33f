"""Servers that come and go while streams run: used at once, left in good order."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from paceline.v1 import orchestrator_service_pb2 as pb
from paceline.v1.target_service_pb2 import VerifyRequest
from paceline_orchestrator.fleet.discovery import Availability, Endpoint, Role
from support.fake_models import FakeModelServer
from support.fake_text import continuation
from support.orchestrating import PROMPT, orchestrating
from support.waiting import until

STRATEGIES = (pb.STRATEGY_AUTOREGRESSIVE, pb.STRATEGY_SPECULATIVE, pb.STRATEGY_DISTRIBUTED)
TERMINATING = Availability.TERMINATING
# More than any of these tests waits for; each ends its streams itself.
ENDLESS = 4000


class Cluster:
    """A discovery that says what a test wants."""

    def __init__(self):
        self._known = {}
        self._changed = asyncio.Event()

    async def endpoints(self):
        while True:
            self._changed.clear()
            yield frozenset(self._known.values())
            await self._changed.wait()

    def add(self, *servers):
        for server in servers:
            name = f"{server.role}-{server.address}"
            self._known[server.address] = Endpoint(name, server.address, Role(server.role), name)
        self._changed.set()

    def mark(self, server, availability):
        known = self._known[server.address]
        self._known[server.address] = replace(known, availability=availability)
        self._changed.set()

    def remove(self, server):
        del self._known[server.address]
        self._changed.set()


class Stream:
    """An endless stream, read on a task."""

    def __init__(self, system, **request):
        request = {"timeout": 200, "max_tokens": ENDLESS, **request}
        self._system, self._strategy = system, request["strategy"]
        self._call = system.call(**request)
        self._reading = asyncio.create_task(self._read())
        self.token_ids = []
        self.started = self.finished = None

    async def _read(self):
        async for message in self._call:
            self.token_ids += message.chunk.token_ids
            if message.HasField("started"):
                self.started = message.started
            if message.HasField("finished"):
                self.finished = message.finished

    async def more(self, count=20):
        """Return once so many more tokens have come."""
        wanted = len(self.token_ids) + count
        await until(
            lambda: len(self.token_ids) >= wanted or self._reading.done(), what="tokens come"
        )
        assert not self._reading.done(), self._reading

    async def end(self):
        """Check what has come, and leave."""
        assert not self._reading.done(), self._reading
        self._call.cancel()
        await asyncio.wait((self._reading,))
        assert self.token_ids == continuation(PROMPT, len(self.token_ids))
        # It was what was asked for, and no silent fallback.
        assert self.started.strategy == self._strategy
        if self._strategy != pb.STRATEGY_AUTOREGRESSIVE:
            assert any(map(proposes, (it for each in self._system.targets for it in each.calls)))


def proposes(call):
    return isinstance(call, VerifyRequest) and bool(call.proposal.token_ids)


def is_cut_short(target):
    """Whether a call lost its answer there; one that goes on ends between two tokens."""
    return any(isinstance(call, VerifyRequest) for call in target.cut_short)


@asynccontextmanager
async def a_system(*, targets, drafters=()):
    """Run all of these; the orchestrator knows the drafters and the first target."""
    cluster = Cluster()
    known = asyncio.create_task(_announce(cluster, targets[0], *drafters))
    async with orchestrating(
        targets=list(targets), drafters=list(drafters), discovery=cluster
    ) as system:
        await known
        yield system, cluster


async def _announce(cluster, *servers):
    await until(lambda: all(it.address for it in servers), what="the servers listen")
    cluster.add(*servers)


def a_target(**options):
    return FakeModelServer("target", latency_seconds=0.004, **options)


def a_drafter(**options):
    return FakeModelServer("drafter", latency_seconds=0.001, **options)


async def test_a_new_target_serves_a_running_stream():
    targets = [a_target() for _ in range(3)]
    async with a_system(targets=targets, drafters=[a_drafter()]) as (system, cluster):
        stream = Stream(system, strategy=pb.STRATEGY_DISTRIBUTED)
        await stream.more()
        for newcomer in targets[1:]:
            cluster.add(newcomer)
            await until(lambda it=newcomer: len(it.calls) > 5, what="it verifies")
        await stream.end()


@pytest.mark.parametrize(
    "asked",
    [{}, {"target_count": 1}, {"dispatch_policy": pb.DISPATCH_POLICY_BLOCKS}],
    ids=["nothing", "target_count", "blocks"],
)
async def test_a_stream_that_asked_for_what_cannot_grow_takes_no_more_targets(asked):
    targets = [a_target() for _ in range(2)]
    async with a_system(targets=targets, drafters=[a_drafter()]) as (system, cluster):
        stream = Stream(system, strategy=pb.STRATEGY_DISTRIBUTED, lookahead=1, **asked)
        await stream.more()
        cluster.add(targets[1])
        await until(lambda: _is_ready(system, targets[1]), what="it is known")
        await stream.more(50)
        assert bool(targets[1].specs) == (not asked)
        await stream.end()


@pytest.mark.parametrize("lookahead", [None, 4])
async def test_more_targets_shorten_the_blocks_unless_their_length_was_asked_for(lookahead):
    targets = [a_target() for _ in range(3)]
    asked = {} if lookahead is None else {"lookahead": lookahead}
    drafters = [FakeModelServer("drafter", latency_seconds=0.002)]
    async with a_system(targets=targets, drafters=drafters) as (system, cluster):
        stream = Stream(
            system, strategy=pb.STRATEGY_DISTRIBUTED, max_tokens=400, stream_timeline=False, **asked
        )
        await stream.more()
        cluster.add(*targets)
        await until(lambda: stream.finished, what="it is decoded")
        before, after = stream.started.lookahead, stream.finished.lookahead
        assert after == lookahead if lookahead else after <= before


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_session_that_opens_at_a_target_about_to_end_moves_on(strategy):
    first, second, third = (a_target() for _ in range(3))
    servers = {"targets": [first, second, third], "drafters": [a_drafter()]}
    async with a_system(**servers) as (system, cluster):
        stream = Stream(system, strategy=strategy, target_count=1)
        await stream.more()
        second.opens.clear()
        cluster.add(second)
        await until(lambda: _is_ready(system, second), what="it is known")
        cluster.mark(first, TERMINATING)
        await until(lambda: second.waiting, what="its session is being opened")
        cluster.mark(second, TERMINATING)
        cluster.add(third)
        await until(lambda: _is_ready(system, third), what="it is known")
        second.opens.set()
        await until(lambda: third.sessions and not second.sessions, what="it has moved on")
        await stream.more()
        await stream.end()


def _is_ready(system, target):
    servers = system.application.pool.servers
    return any(it.ready for it in servers if it.endpoint.address == target.address)


@pytest.mark.parametrize("role", ["target", "drafter"])
async def test_a_server_that_is_removed_in_mid_stream_ends_nothing_else(role):
    """As when its node's object is deleted: without notice, and with sessions open."""
    targets, drafters = [a_target() for _ in range(2)], [a_drafter() for _ in range(2)]
    async with a_system(targets=targets, drafters=drafters) as (system, cluster):
        cluster.add(*targets)
        streams = [Stream(system, strategy=strategy) for strategy in STRATEGIES * 2]
        for stream in streams:
            await stream.more()
        cluster.remove({"target": targets, "drafter": drafters}[role][0])
        for stream in streams:
            await stream.more()
            await stream.end()
        assert (await system.generate(max_tokens=4)).finished


@pytest.mark.parametrize("strategy", [pb.STRATEGY_AUTOREGRESSIVE, pb.STRATEGY_SPECULATIVE])
async def test_streams_that_share_a_target_divide_over_a_new_one(strategy):
    targets = [a_target() for _ in range(2)]
    async with a_system(targets=targets, drafters=[a_drafter()]) as (system, cluster):
        streams = [Stream(system, strategy=strategy) for _ in range(4)]
        for stream in streams:
            await stream.more()
        cluster.add(targets[1])
        await until(
            lambda: [len(it.sessions) for it in targets] == [2, 2], what="each has two sessions"
        )
        for stream in streams:
            await stream.more()
        assert not is_cut_short(targets[0])
        for stream in streams:
            await stream.end()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("by_health", [False, True])
async def test_sessions_leave_a_target_that_is_about_to_end(strategy, by_health):
    targets = [a_target() for _ in range(2)]
    async with a_system(targets=targets, drafters=[a_drafter()]) as (system, cluster):
        stream = Stream(system, strategy=strategy)
        await stream.more()
        cluster.add(targets[1])
        await stream.more()
        if by_health:
            await targets[0].set_serving(False)
        else:
            cluster.mark(targets[0], TERMINATING)
        await until(lambda: not targets[0].sessions, what="its session is closed")
        calls, faults = len(targets[0].calls), is_cut_short(targets[0])
        await stream.more()
        assert len(targets[0].calls) == calls, "it gets nothing new"
        assert not faults or strategy == pb.STRATEGY_DISTRIBUTED, "it finished what it had"
        cluster.remove(targets[0])
        await stream.more()
        await stream.end()


async def test_a_verification_under_way_at_a_target_that_leaves_is_finished_and_used():
    targets = [a_target(), FakeModelServer("target", latency_seconds=0.5)]
    async with a_system(targets=targets, drafters=[a_drafter()]) as (system, cluster):
        stream = Stream(system, strategy=pb.STRATEGY_DISTRIBUTED, target_count=2, lookahead=2)
        # Or both would begin with the prompt, and the slower one's verdict could be worthless.
        await stream.more()
        slow = targets[1]
        cluster.add(slow)
        await until(lambda: slow.running, what="it verifies")
        answered = len(slow.calls)
        cluster.mark(slow, TERMINATING)
        await until(lambda: not slow.sessions, what="its session is closed")
        assert not slow.cut_short
        assert len(slow.calls) == answered, "it gets nothing new"
        await stream.end()


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_the_last_target_is_left_only_for_another(strategy):
    targets = [a_target() for _ in range(2)]
    async with a_system(targets=targets, drafters=[a_drafter()]) as (system, cluster):
        stream = Stream(system, strategy=strategy)
        await stream.more()
        cluster.mark(targets[0], TERMINATING)
        await stream.more()
        cluster.add(targets[1])
        await until(lambda: not targets[0].sessions, what="the session has moved")
        await stream.more()
        assert not is_cut_short(targets[0]) or strategy == pb.STRATEGY_DISTRIBUTED
        await stream.end()


async def test_a_drafter_that_is_about_to_end_is_replaced():
    drafters = [a_drafter() for _ in range(2)]
    async with a_system(targets=[a_target()], drafters=drafters) as (system, cluster):
        stream = Stream(system, strategy=pb.STRATEGY_DISTRIBUTED)
        await until(lambda: any(it.calls for it in drafters), what="one drafts")
        busy, idle = sorted(drafters, key=lambda it: -len(it.calls))
        cluster.mark(busy, TERMINATING)
        await until(lambda: not busy.sessions and idle.calls, what="the other one drafts")
        await stream.more()
        await stream.end()


async def test_a_target_with_another_model_is_not_mixed_into_a_stream():
    targets = [a_target(), a_target(fingerprint="the next model")]
    async with a_system(targets=targets, drafters=[a_drafter()]) as (system, cluster):
        stream = Stream(system, strategy=pb.STRATEGY_DISTRIBUTED)
        await stream.more()
        cluster.add(targets[1])
        pool = system.application.pool
        await until(lambda: sum(it.ready for it in pool.servers) == 3, what="it is ready")
        await stream.more(100)
        assert not targets[1].sessions
        await stream.end()


async def test_a_pod_that_is_not_ready_yet_gets_nothing_though_it_says_that_it_serves():
    targets = [a_target() for _ in range(2)]
    async with a_system(targets=targets, drafters=[a_drafter()]) as (system, cluster):
        stream = Stream(system, strategy=pb.STRATEGY_DISTRIBUTED)
        await stream.more()
        cluster.add(targets[1])
        cluster.mark(targets[1], Availability.NOT_READY)
        pool = system.application.pool
        await until(lambda: all(it.facts for it in pool.servers), what="it was reached")
        await stream.more(50)
        assert not targets[1].opened
        cluster.mark(targets[1], Availability.READY)
        await until(lambda: targets[1].calls, what="it verifies")
        await stream.end()


async def test_a_cluster_that_loses_sight_of_every_server_costs_nothing():
    targets, drafters = [a_target() for _ in range(2)], [a_drafter()]
    async with a_system(targets=targets, drafters=drafters) as (system, cluster):
        stream = Stream(system, strategy=pb.STRATEGY_DISTRIBUTED)
        await stream.more()
        cluster.add(targets[1])
        await until(lambda: targets[1].calls, what="both verify")
        for server in (*targets, *drafters):
            cluster.remove(server)
        pool = system.application.pool
        await until(lambda: len(pool._unlisted) == 3, what="the orchestrator heard of it")
        newcomer = Stream(system, strategy=pb.STRATEGY_DISTRIBUTED)
        for each in (stream, newcomer):
            await each.more(50)
            await each.end()
