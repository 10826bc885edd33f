"""Requests share targets: each has a primary one, and speculates only where it disturbs none."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random
from types import SimpleNamespace

import grpc
import pytest

from paceline import errors
from paceline_contract.calls import CallTiming
from paceline_orchestrator.decoding import probe
from paceline_orchestrator.decoding.assigned_servers import AssignedServers
from paceline_orchestrator.decoding.candidates import Candidates
from paceline_orchestrator.decoding.deadline import Deadline
from paceline_orchestrator.decoding.exchange import SessionSpec
from paceline_orchestrator.decoding.session_opener import Opening
from paceline_orchestrator.decoding.slots import ServerNeeds
from paceline_orchestrator.fleet.discovery import Endpoint, Role, StaticDiscovery
from paceline_orchestrator.fleet.latency import ObservedLatency
from paceline_orchestrator.fleet.pool import ServerPool
from paceline_orchestrator.fleet.server import ModelServer
from paceline_orchestrator.fleet.wire import ModelFacts
from paceline_orchestrator.planning.target_scaling import TargetScaling
from support.fake_models import FakeModelServer
from support.orchestrating import orchestrating

MODEL = ModelFacts(
    model_name="it",
    fingerprint="it",
    tokenizer_fingerprint="it",
    vocabulary_size=10,
    eos_token_ids=frozenset(),
    context_length=100,
    rejection_sampling=False,
    forward_latencies=((1, 1000),),
    prefill_fixed_ns=0,
    prefill_ns_per_token=0,
)


class KnownTargets(ServerPool):
    """A pool of targets that are ready, and that nobody calls."""

    def __init__(self, count, **options):
        super().__init__(
            StaticDiscovery(()), open_channel=lambda _: None, probe=probe.answers, **options
        )
        for _ in range(count):
            self.add(Role.TARGET)

    def add(self, role, *, step_ns=1000, ready_since=0.0):
        endpoint = Endpoint(f"{role}-{len(self._servers)}", "127.0.0.1:1", role)
        server = ModelServer(endpoint, grpc.aio.insecure_channel("127.0.0.1:1"))
        server.adopt(replace(MODEL, forward_latencies=((1, step_ns),)))
        server.health_status = None
        server.ready_since = ready_since
        self._servers[endpoint] = server
        self._in_order[role].append(server)
        self.latest_ready_at = max(self.latest_ready_at, ready_since)

    @property
    def primaries(self):
        return [it.primary_count for it in self.servers]


async def some_servers(pool, target_count=1, **options):
    """Return a request's servers, whose sessions have opened."""
    servers = servers_to_be(pool, target_count, **options)
    await arrivals()
    return servers


def servers_to_be(pool, target_count=1, *, drafter_count=0, growth=None, text=()):
    return AssignedServers(
        Candidates(pool, MODEL, text=pool.familiarity.text(text, share="")),
        pool=pool,
        make_spec=lambda _: SessionSpec(fingerprint="it", reserve_length=1),
        needs=needs(target_count, drafter_count=drafter_count, growth=growth),
        opener=SimpleNamespace(open=opened_at_once, close=lambda *_: None),
        deadline=Deadline.after(60),
        note_fallback=lambda _: None,
    )


def needs(target_count, *, drafter_count=0, growth=None):
    return ServerNeeds(
        target_count=target_count,
        drafter_count=drafter_count,
        growth=growth,
        drafts=drafter_count > 0,
    )


def opened_at_once(*_):
    opening = asyncio.get_running_loop().create_future()
    opening.set_result(Opening(session_id="it"))
    return opening


async def arrivals():
    """Let the sessions take their slots: that is one turn of the loop away."""
    await asyncio.sleep(0)


async def test_alone_a_request_has_one_primary_target_and_uses_all():
    pool = KnownTargets(3)
    servers = await some_servers(pool, 3)
    assert servers.capacity.targets == (0, 1, 2)
    assert pool.primaries == [1, 0, 0]


async def test_a_request_begins_nothing_at_the_primary_target_of_another_one():
    pool = KnownTargets(3)
    secondary = await some_servers(pool, 3)
    primary = await some_servers(pool)
    assert pool.primaries == [1, 1, 0]
    assert secondary.fill()
    assert (secondary.capacity.targets, secondary.capacity.leaving) == ((0, 2), (1,))
    assert not secondary.fill()
    primary.close()
    assert secondary.fill()
    assert (secondary.capacity.targets, secondary.capacity.leaving) == ((0, 1, 2), ())


async def test_a_request_that_needs_one_target_stays_at_its_primary_target_of_then():
    pool = KnownTargets(3)
    servers = await some_servers(pool, 3)
    servers.vacate(
        servers.target(0), errors.OverloadedError("full", retry_after_seconds=60), reach=0
    )
    servers.fill()
    primaries = pool.primaries
    assert servers.capacity.targets == (1, 2)
    servers.resize(needs(1))
    await arrivals()
    assert (servers.capacity.targets, pool.primaries) == ((1,), primaries)
    assert [it.session_count for it in pool.servers] == primaries, "the others are given back"
    servers.widen(needs(2))
    await arrivals()
    assert (servers.capacity.targets, pool.primaries) == ((1, 2), primaries)


async def test_where_every_target_is_a_primary_each_request_has_its_own():
    pool = KnownTargets(3)
    all_requests = [await some_servers(pool, 3) for _ in range(3)]
    for servers in all_requests:
        servers.fill()
    primaries = [servers.target(0).server.name for servers in all_requests]
    assert sorted(primaries) == ["target-0", "target-1", "target-2"]
    assert [servers.capacity.targets for servers in all_requests] == [(0,), (0,), (0,)]


async def test_more_requests_than_targets_spread_evenly():
    pool = KnownTargets(3)
    all_requests = [await some_servers(pool) for _ in range(8)]
    assert sorted(pool.primaries) == [2, 3, 3]
    for servers in all_requests:
        assert servers.capacity.targets == (0,)
        servers.close()
    assert pool.primaries == [0, 0, 0]


def lots(*of_targets, put_off=0.0):
    """Return what draws these for three targets at a time, each time after `put_off`."""
    drawn = []
    for index in range(0, len(of_targets), 3):
        drawn += [put_off, *of_targets[index : index + 3]]
    return iter(drawn).__next__


async def test_where_others_calls_wait_nobody_moves_in():
    pool = KnownTargets(2)
    timing = CallTiming(queue_ns=3000, forward_ns=1000, forward_count=1, row_count=1)
    for _ in range(30):
        pool.servers[0].latency.observe(timing, elapsed_ns=4000)
    all_requests = [await some_servers(pool) for _ in range(2)]
    assert pool.primaries == [0, 2]
    assert all_requests[0].capacity.targets == (0,)


async def test_among_targets_that_are_alike_the_lot_decides():
    pool = KnownTargets(3, draw_lot=lots(0.5, 0.9, 0.1, 0.2, 0.1, 0.3))
    assert (await some_servers(pool)).target(0).server.name == "target-2"
    # Load comes first: the third is a primary by now.
    assert (await some_servers(pool)).target(0).server.name == "target-1"


@pytest.mark.parametrize(
    ("put_off", "calls", "chosen"),
    [(0.4, 1, "target-1"), (0.6, 1, "target-0"), (0.6, 2, "target-1")],
)
async def test_half_of_the_requests_are_not_put_off_by_one_call(put_off, calls, chosen):
    pool = KnownTargets(3, draw_lot=lots(0.1, 0.2, 0.3, put_off=put_off))
    waited = CallTiming(queue_ns=calls * 1000, forward_ns=1000, forward_count=1, row_count=1)
    for _ in range(30):
        pool.servers[0].latency.observe(waited, elapsed_ns=calls * 1000 + 1100)
    assert (await some_servers(pool)).target(0).server.name == chosen


@pytest.mark.parametrize("seed", range(20))
async def test_requests_of_two_orchestrators_that_meet_part_and_stay_apart(seed):
    """Each has two requests at a time, and all of them begin and end at the same moments."""
    clock = SimpleNamespace(now=0.0)
    pools = [KnownTargets(4, draw_lot=Random(seed + 100 * index).random) for index in range(2)]
    for server in (server for pool in pools for server in pool.servers):
        server.latency = ObservedLatency(clock=lambda: clock.now)
        server.latency.adopt(((1, 1000),), prefill_fixed_ns=0, prefill_ns_per_token=0)

    async def homes_of_a_round():
        all_requests = [(pool, await some_servers(pool)) for pool in pools for _ in range(2)]
        primaries = [sum(pair) for pair in zip(*(pool.primaries for pool in pools), strict=True)]
        clock.now += 2
        for pool, servers in all_requests:
            server = servers.target(0).server
            others = primaries[pool.servers.index(server)] - 1
            waited = CallTiming(others * 1000, forward_ns=1000, forward_count=1, row_count=1)
            for _ in range(24):
                server.latency.observe(waited, elapsed_ns=1100 + others * 1000)
        for _, servers in all_requests:
            servers.close()
        return primaries

    rounds = [await homes_of_a_round() for _ in range(60)]
    assert all(primaries == [1, 1, 1, 1] for primaries in rounds[-10:]), rounds


async def test_what_is_left_of_an_old_queue_does_not_overrule_the_lot():
    pool = KnownTargets(3, draw_lot=lots(0.5, 0.9, 0.1))
    waited = CallTiming(queue_ns=150, forward_ns=1000, forward_count=1, row_count=1)
    for _ in range(30):
        pool.servers[2].latency.observe(waited, elapsed_ns=1200)
    assert 0.1 < pool.servers[2].latency.other_calls < 0.2
    assert (await some_servers(pool)).target(0).server.name == "target-2"


async def test_a_target_that_was_free_a_moment_ago_is_kept():
    """Another orchestrator's requests can be anywhere else."""
    pool = KnownTargets(3, draw_lot=lots(0.5, 0.9, 0.1, 0.1, 0.2, 0.9))
    answered = CallTiming(queue_ns=10, forward_ns=1000, forward_count=1, row_count=1)
    first = await some_servers(pool)
    primary = first.target(0).server
    assert primary.name == "target-2"
    primary.latency.observe(answered, elapsed_ns=1200)
    first.close()
    assert (await some_servers(pool)).target(0).server is primary


@pytest.mark.parametrize("role", [Role.TARGET, Role.DRAFTER])
async def test_among_equals_a_text_goes_to_who_had_most_of_it(role):
    pool = KnownTargets(0, draw_lot=Random(1).random)
    for _ in range(4):
        pool.add(Role.TARGET)
        pool.add(Role.DRAFTER)

    async def server_of(text):
        servers = await some_servers(pool, drafter_count=1, text=text)
        session = servers.target(0) if role is Role.TARGET else servers.drafter(0)
        servers.close()
        return session.server

    texts = [[start, *range(200)] for start in range(10)]
    first = [await server_of(text) for text in texts]
    assert len(set(first)) > 1
    assert [await server_of([*text, 1, 2, 3]) for text in texts] == first


async def test_load_comes_before_what_a_server_had():
    pool = KnownTargets(3, draw_lot=lots(*[0.1, 0.5, 0.9] * 3))
    (await some_servers(pool, text=range(100))).close()
    busy = await some_servers(pool, text=range(100))
    assert busy.target(0).server.name == "target-0"
    assert (await some_servers(pool, text=range(100))).target(0).server.name == "target-1"


async def test_what_a_server_had_comes_before_whether_it_was_free_a_moment_ago():
    pool = KnownTargets(3, draw_lot=lots(*[0.9, 0.1, 0.5] * 2))
    (await some_servers(pool, text=range(100))).close()
    answered = CallTiming(queue_ns=10, forward_ns=1000, forward_count=1, row_count=1)
    pool.servers[0].latency.observe(answered, elapsed_ns=1200)
    assert (await some_servers(pool, text=range(100))).target(0).server.name == "target-1"


async def test_targets_that_come_later_shorten_the_blocks_and_the_servers_say_so():
    pool = KnownTargets(0)
    pool.add(Role.TARGET, step_ns=4000)
    pool.add(Role.DRAFTER, step_ns=1000)
    servers = await some_servers(
        pool, drafter_count=1, growth=TargetScaling(lookahead=4, is_fixed=False)
    )
    assert servers.lookahead is None
    for _ in range(5):
        pool.add(Role.TARGET, step_ns=4000, ready_since=float("inf"))
    servers.fill()
    await arrivals()
    assert len(servers.capacity.targets) == 4, "with lookahead 1 Equation 1 has no use for more"
    assert servers.lookahead == servers.capacity.lookahead == 1


async def test_a_request_whose_primary_target_is_lost_moves():
    pool = KnownTargets(2)
    servers = await some_servers(pool, 2)
    pause = servers.vacate(
        servers.target(0), errors.OverloadedError("full", retry_after_seconds=60), reach=0
    )
    assert pause == 60
    servers.fill()
    assert pool.primaries == [0, 1]
    assert servers.capacity.targets == (1,)
    servers.close()
    assert pool.primaries == [0, 0]


async def test_listeners_are_told_soon_when_a_target_becomes_a_primary_or_ceases_to_be():
    pool, told = KnownTargets(1), []
    turn = asyncio.Event()

    async def next_turn():
        asyncio.get_running_loop().call_soon(turn.set)
        await turn.wait()
        turn.clear()

    with pool.listening(lambda: told.append(pool.primaries)):
        first = servers_to_be(pool)
        assert not told
        await next_turn()
        second = servers_to_be(pool)
        first.close()
        await next_turn()
        assert told == [[1]]
        second.close()
        await next_turn()
        assert told == [[1], [0]]


async def test_who_listens_hears_once_of_all_that_changed_in_a_turn_of_the_loop():
    pool, calls = KnownTargets(3), []
    with pool.listening(lambda: calls.append(pool.primaries)):
        for server in pool.servers:
            pool.move_primary(None, server)
        assert not calls, "whoever moves is in the middle of something"
        await arrivals()
        assert calls == [[1, 1, 1]]
        pool.move_primary(pool.servers[0], None)
        await arrivals()
        assert calls == [[1, 1, 1], [0, 1, 1]]


async def test_a_request_that_needs_no_server_looks_at_none(monkeypatch):
    pool = KnownTargets(4)
    pool.add(Role.DRAFTER)
    servers = await some_servers(pool, 2, drafter_count=1)
    asked = []
    monkeypatch.setattr(pool, "_ready", lambda role, *_, **__: asked.append(role) or [])
    assert not servers.fill()
    assert not asked
    servers.vacate(servers.target(1), errors.CacheExhaustedError("full"), reach=0)
    servers.fill()
    assert asked == [Role.TARGET]


async def test_as_many_requests_as_targets_of_a_whole_system_have_one_each():
    targets = [FakeModelServer("target", stalls=lambda _: True) for _ in range(3)]
    async with orchestrating(targets=targets) as system:

        async def read():
            async for _ in system.call():
                pass

        reading = [asyncio.create_task(read()) for _ in targets]
        for target in targets:
            await target.until(lambda it: it.running == 1)
        for task in reading:
            task.cancel()
        await asyncio.wait(reading)
        await system.settled()
