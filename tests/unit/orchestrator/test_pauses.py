"""What happens after how long: pauses, giving up, renewals, deadlines; on virtual time."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise

import pytest

from paceline import errors
from paceline.v1 import orchestrator_service_pb2 as pb
from support.fake_text import continuation
from support.orchestrating import PROMPT, STRATEGIES
from support.virtual_servers import drafters, targets
from support.virtual_system import VirtualDiscovery, now, virtual_system
from support.virtual_time import virtually

HOPS_SECONDS = 0.01
STEP_SECONDS = 0.03
INSTANT = 1e-6
GIVEN_UP_SECONDS = 5.0


def openings(system, server):
    return [it.sent_at for it in system.records("OpenSession", server=server)]


def a_drafter():
    """One that is right half of the time, so that a text takes its time with every strategy."""
    return drafters(1, latency_seconds=0.04, agrees=lambda it: it % 2 == 0)[0]


def pauses(system, server):
    """Return how long after each failure of a call the server was asked again."""
    opened = openings(system, server)
    failed = [
        it.ended_at
        for it in system.records("Verify", "Decode", "Draft", server=server)
        if it.end == "DRAINING"
    ]
    return [min(at for at in opened if at >= since) - since for since in failed]


def gaps(times):
    return [later - earlier for earlier, later in pairwise(times)]


async def decode_with_two_targets(system, *, max_tokens, seconds=120):
    return await system.generate(
        strategy=pb.STRATEGY_DISTRIBUTED,
        lookahead=2,
        target_count=2,
        max_tokens=max_tokens,
        seconds=seconds,
    )


# --- pauses ------------------------------------------------------------------------------------


@virtually
async def test_a_server_whose_calls_fail_is_tried_again_after_longer_and_longer_pauses():
    well, failing = targets(2, latency_seconds=0.1)
    async with virtual_system(a_drafter(), well, failing) as system:
        failing.faults.extend(["fail"] * 7)
        stream = await decode_with_two_targets(system, max_tokens=1000)
        assert stream.token_ids == continuation(PROMPT, 1000)
        expected = [0.5, 1, 2, 4, 8, 10, 10]
        assert pauses(system, "target-1") == pytest.approx(expected, abs=INSTANT)
        assert stream.fallbacks == {"target_lost": 7}


@virtually
async def test_after_an_answer_a_failure_is_a_first_one_again():
    well, failing = targets(2, latency_seconds=0.1)
    async with virtual_system(a_drafter(), well, failing) as system:
        failing.faults.extend(["fail", "fail", *[""] * 10, "fail", "fail"])
        await decode_with_two_targets(system, max_tokens=300)
        assert pauses(system, "target-1") == pytest.approx([0.5, 1, 0.5, 1], abs=INSTANT)


@virtually
async def test_after_drafts_a_drafters_failure_is_a_first_one_again():
    (drafter,) = drafters(1, latency_seconds=0.02)
    async with virtual_system(drafter, *targets(1, latency_seconds=0.1)) as system:
        drafter.faults.extend(["fail", "fail", *[""] * 10, "fail", "fail"])
        await system.generate(
            strategy=pb.STRATEGY_SPECULATIVE,
            dispatch_policy=pb.DISPATCH_POLICY_BLOCKS,
            lookahead=2,
            max_tokens=300,
        )
        assert pauses(system, "drafter-0") == pytest.approx([0.5, 1, 0.5, 1], abs=INSTANT)


@pytest.mark.parametrize(("said_seconds", "pause_seconds"), [(3.0, 3.0), (None, 1.0)])
@virtually
async def test_a_server_without_room_is_asked_again_when_it_said(said_seconds, pause_seconds):
    well, full = targets(2, latency_seconds=0.1)
    async with (
        virtual_system(a_drafter(), well, full) as system,
        asyncio.TaskGroup() as tasks,
    ):
        full.open_error = errors.CacheExhaustedError("full", retry_after_seconds=said_seconds)
        running = tasks.create_task(decode_with_two_targets(system, max_tokens=500))
        await asyncio.sleep(2.5 * pause_seconds)
        full.open_error = None
        stream = await running
        asked_after = gaps(openings(system, "target-1"))
        assert asked_after == pytest.approx([pause_seconds] * 3, abs=HOPS_SECONDS)
        assert stream.fallbacks == {"session_refused": 3}


@pytest.mark.parametrize("stream_count", [1, 5, 20])
@virtually
async def test_a_connection_that_breaks_costs_no_pause_however_many_streams_were_on_it(
    stream_count,
):
    (target,) = targets(1)
    async with virtual_system(target) as system, asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(
                system.generate(strategy=pb.STRATEGY_AUTOREGRESSIVE, max_tokens=100, seconds=100)
            )
            for _ in range(stream_count)
        ]
        await asyncio.sleep(1)
        await target.kill()
        await target.start()
        # Its health is asked again after 0.1 s. A step is lost, and each waits for all the others'.
        longest = 0.1 + 2 * stream_count * STEP_SECONDS + HOPS_SECONDS
        for stream in [await it for it in running]:
            assert stream.token_ids == continuation(PROMPT, 100)
            assert max(gaps([at for at, _ in stream.arrivals])) < longest


def fail(system, error, *, asked_at=None):
    """Report that a call failed that was made then, or just now."""
    server = system.server("target-0")
    asked_at = time.monotonic() if asked_at is None else asked_at
    system.pool.report_failure(server, error, asked_at=asked_at)
    return server


@virtually
async def test_a_failure_during_a_pause_does_not_prolong_it():
    async with virtual_system(*targets(1)) as system:
        server = fail(system, errors.DrainingError("it fails"))
        await asyncio.sleep(0.3)
        fail(system, errors.DrainingError("another call fails"))
        assert await system.until(lambda: server.ready) == pytest.approx(0.2, abs=INSTANT)
        assert server.failure_count == 1


@virtually
async def test_a_call_that_was_on_its_way_when_a_failure_was_counted_counts_no_more():
    async with virtual_system(*targets(1)) as system:
        asked_at = time.monotonic()
        await asyncio.sleep(0.1)
        server = fail(system, errors.DrainingError("it fails"))
        await system.until(lambda: server.ready)
        fail(system, errors.DrainingError("an older call fails, too"), asked_at=asked_at)
        assert server.ready
        fail(system, errors.DrainingError("it fails again"))
        assert not server.ready


@virtually
async def test_a_single_refused_connection_costs_no_pause():
    async with virtual_system(*targets(1)) as system:
        server = fail(system, errors.ConnectionLostError("nobody is there"))
        assert server.ready
        fail(system, errors.ConnectionLostError("nobody is there"))
        assert not server.ready


@virtually
async def test_who_could_not_be_reached_works_again_as_soon_as_its_health_says_so():
    (target,) = targets(1)
    async with virtual_system(target) as system:
        fail(system, errors.ConnectionLostError("nobody is there"))
        server = fail(system, errors.ConnectionLostError("nobody is there"))  # for 1 s
        assert server.status == "CONNECTION_LOST"
        await target.kill()
        await target.start()
        assert await system.until(lambda: server.ready) == pytest.approx(0.1, abs=HOPS_SECONDS)


@virtually
async def test_the_end_of_a_pause_that_was_cut_short_ends_no_later_one():
    (target,) = targets(1)
    async with virtual_system(target) as system:
        fail(system, errors.ConnectionLostError("nobody is there"))
        fail(system, errors.ConnectionLostError("nobody is there"))  # for 1 s
        await target.kill()
        await target.start()
        await asyncio.sleep(0.5)
        server = fail(system, errors.DrainingError("it fails"))  # for 2 s
        assert await system.until(lambda: server.ready) == pytest.approx(2.0, abs=INSTANT)


# --- examinations ------------------------------------------------------------------------------


def examine(system, name="target-0"):
    return system.pool.examine(system.server(name), errors.InternalError("the model has a bug"))


@virtually
async def test_a_target_is_asked_for_one_token_however_many_requests_fail_there():
    async with virtual_system(*targets(1)) as system:
        examinations = [examine(system) for _ in range(20)]
        assert all(await asyncio.gather(*examinations))
        assert len(openings(system, "target-0")) == 1


@virtually
async def test_an_orchestrator_that_ends_waits_for_no_examination():
    (target,) = targets(1)
    async with virtual_system(target) as system:
        target.link.hold("Verify")
        examine(system)
        await asyncio.sleep(0.1)
        began = now()
    assert now() - began < 1


@virtually
async def test_a_target_that_is_removed_is_examined_no_more():
    removed, other = targets(2)
    discovery = VirtualDiscovery(removed, other)
    async with virtual_system(removed, other, discovery=discovery) as system:
        await system.until(lambda: len(system.pool.servers) == 2)
        server = system.server("target-0")
        await system.until(lambda: server.ready)
        removed.link.hold("Verify")
        examination = examine(system)
        await asyncio.sleep(0.1)
        discovery.list(other)
        await system.until(lambda: server not in system.pool.servers)
        await asyncio.sleep(1)
        assert examination.cancelled()
        assert not server.failure_count


def hold_its_sessions(model):
    model.link.hold("OpenSession")


def refuse_sessions(model):
    model.open_error = errors.CacheExhaustedError("full", retry_after_seconds=30)


def refuse_calls(model):
    model.is_full = True


@pytest.mark.parametrize(
    ("fault", "seconds"), [(hold_its_sessions, 2.0), (refuse_sessions, 0.0), (refuse_calls, 0.0)]
)
@pytest.mark.parametrize("strategy", STRATEGIES)
@virtually
async def test_where_another_target_is_free_a_request_goes_there_at_once(fault, seconds, strategy):
    unfit, free = targets(2)
    fault(unfit)
    async with virtual_system(*drafters(1), unfit, free) as system:
        stream = await system.generate(strategy=strategy, lookahead=1, target_count=1)
        first = stream.arrivals[0][0] - stream.began
        assert first == pytest.approx(seconds, abs=2 * STEP_SECONDS + HOPS_SECONDS)
        assert sum(stream.fallbacks.values()) == 1


# --- giving up ---------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@virtually
async def test_who_has_a_target_again_in_time_is_not_given_up_later(strategy):
    (target,) = targets(1)
    async with (
        virtual_system(a_drafter(), target) as system,
        asyncio.TaskGroup() as tasks,
    ):
        running = tasks.create_task(
            system.generate(strategy=strategy, lookahead=2, max_tokens=600, seconds=200)
        )
        for _ in range(2):
            await asyncio.sleep(1)
            await target.kill()
            await asyncio.sleep(GIVEN_UP_SECONDS - 1)
            await target.start()
        assert not running.done()
        stream = await running
        assert stream.token_ids == continuation(PROMPT, 600)
        assert stream.ended - stream.began > 3 * GIVEN_UP_SECONDS


@pytest.mark.parametrize("strategy", STRATEGIES)
@virtually
async def test_who_has_no_target_is_given_up_after_five_seconds(strategy):
    drafter, (target,) = a_drafter(), targets(1)
    async with virtual_system(drafter, target) as system, asyncio.TaskGroup() as tasks:
        stream = asyncio.ensure_future(system.generate(strategy=strategy, max_tokens=1000))
        running = tasks.create_task(asyncio.wait([stream]))
        await asyncio.sleep(0.1)
        await target.kill()
        killed = now()
        ((failed,), _) = await running
        assert isinstance(failed.exception(), errors.NoTargetError)
        assert now() - killed == pytest.approx(GIVEN_UP_SECONDS, abs=2 * STEP_SECONDS)
        asked = now()
        with pytest.raises(errors.NoTargetError):
            await system.generate(strategy=strategy)
        assert now() - asked == pytest.approx(GIVEN_UP_SECONDS, abs=INSTANT), "as one that began"
        await system.settle()
        assert not system.leftovers()
        assert not any(it.sessions for it in system.models)


@pytest.mark.parametrize("strategy", STRATEGIES)
@virtually
async def test_who_finds_no_room_is_given_up_after_five_seconds(strategy):
    models = targets(2)
    async with virtual_system(*models) as system:
        for model in models:
            model.open_error = errors.CacheExhaustedError("full", retry_after_seconds=0.7)
        began = now()
        with pytest.raises(errors.OverloadedError, match="full") as caught:
            await system.generate(strategy=strategy, target_count=2)
        assert now() - began == pytest.approx(GIVEN_UP_SECONDS, abs=0.7)
        assert caught.value.retry_after_seconds == 0.7


@virtually
async def test_who_is_refused_at_each_call_is_given_up_after_five_seconds():
    (target,) = targets(1)
    async with virtual_system(target) as system:
        target.is_full = True
        began = now()
        with pytest.raises(errors.OverloadedError):
            await system.generate(strategy=pb.STRATEGY_AUTOREGRESSIVE)
        assert now() - began == pytest.approx(GIVEN_UP_SECONDS, abs=0.5)


@virtually
async def test_a_verdict_shows_that_there_is_room():
    """Refused for two seconds every four: never for as long as five at a time."""
    (target,) = targets(1)
    async with virtual_system(target) as system, asyncio.TaskGroup() as tasks:
        running = tasks.create_task(
            system.generate(strategy=pb.STRATEGY_AUTOREGRESSIVE, max_tokens=400)
        )
        for _ in range(4):
            await asyncio.sleep(2)
            target.is_full = True
            await asyncio.sleep(2)
            target.is_full = False
        assert (await running).token_ids == continuation(PROMPT, 400)


# --- renewals ----------------------------------------------------------------------------------


@virtually
async def test_a_session_that_is_idle_for_longer_than_its_lease_is_renewed_every_five_seconds():
    (drafter,), (target,) = drafters(1), targets(1, latency_seconds=42.0)
    async with virtual_system(drafter, target) as system:
        stream = await system.generate(
            strategy=pb.STRATEGY_SPECULATIVE, lookahead=2, max_tokens=6, seconds=600
        )
        assert stream.token_ids == continuation(PROMPT, 6)
        assert not stream.fallbacks, "the drafter's session has ended meanwhile"
        times = [it.sent_at for it in system.records("RenewSession", server="drafter-0")]
        assert len(times) >= 14
        assert all(gap == pytest.approx(5) or gap > 5 for gap in gaps(times))


@virtually
async def test_a_session_that_is_in_use_is_not_renewed():
    async with virtual_system(*targets(1)) as system:
        await system.generate(strategy=pb.STRATEGY_AUTOREGRESSIVE, max_tokens=700)
        assert not system.records("RenewSession")


# --- deadlines ---------------------------------------------------------------------------------


def hold_everything(model):
    model.link.hold("OpenSession", "Verify", "Decode", "Draft")


def be_slow(model):
    model.slowdown = 1000.0


def refuse(model):
    model.open_error = errors.CacheExhaustedError("full", retry_after_seconds=10)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("fault", [be_slow, hold_everything, refuse, lambda _: None])
@virtually
async def test_a_request_ends_at_its_deadline_and_leaves_nothing(strategy, fault):
    models = [*drafters(1), *targets(2)]
    async with virtual_system(*models) as system:
        for model in models:
            fault(model)
        began = now()
        with pytest.raises(errors.DeadlineError):
            await system.generate(strategy=strategy, lookahead=2, max_tokens=4000, seconds=2.5)
        assert now() - began == pytest.approx(2.5, abs=1e-6)
        left = [it for it in system.leftovers() if not it.startswith(("open ", "close "))]
        assert not left
        for model in models:
            model.link.release()
        await system.settle()
        assert not system.leftovers()
        assert not any(it.running for it in models)
        opened = [it for it in system.records("OpenSession") if it.end == "answered"]
        assert len(opened) == len(system.records("CloseSession"))
