"""Requests beyond what is worked on at once wait in a fair and bounded queue; on virtual time."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry

from paceline import errors
from paceline.v1 import orchestrator_service_pb2 as pb
from paceline_orchestrator.decoding.deadline import Deadline
from paceline_orchestrator.decoding.metrics import RequestMetrics
from paceline_orchestrator.fleet import shortage
from paceline_orchestrator.front.request_queue import RequestQueue
from paceline_orchestrator.settings import OrchestratorSettings
from support.fake_text import continuation
from support.orchestrating import PROMPT
from support.virtual_servers import targets
from support.virtual_system import now, virtual_system
from support.virtual_time import virtually

GREEDY, MODEST = "10.0.0.1", "10.0.0.2"


class Ends(list):
    """Whose request ended, in that order."""

    async def note(self, name, request):
        await request
        self.append(name)


def request(system, **options):
    options.setdefault("max_tokens", 4)
    return system.generate(strategy=pb.STRATEGY_AUTOREGRESSIVE, **options)


def a_queue(request_limit):
    settings = OrchestratorSettings(targets=("127.0.0.1:1",), request_limit=request_limit)
    return RequestQueue(settings, metrics=RequestMetrics(CollectorRegistry()))


def entering(queue, share="a"):
    """Ask for a place, with a minute's time."""
    return queue.enter(share, size=1, deadline=Deadline.after(60))


async def begun(tasks, *requests):
    """Begin these one after the other; a millisecond later those that get a place have it."""
    begun = []
    for each in requests:
        begun.append(tasks.create_task(each))
        await asyncio.sleep(0.001)
    return begun


@virtually
async def test_a_thousand_requests_at_once_half_of_them_one_clients_are_all_answered():
    async with virtual_system(*targets(4)) as system:
        clients = [GREEDY] * 500 + [f"10.0.1.{number % 10}" for number in range(500)]
        streams = await asyncio.gather(
            *(request(system, max_tokens=1, seconds=600, client=each) for each in clients)
        )
        assert {tuple(it.token_ids) for it in streams} == {tuple(continuation(PROMPT, 1))}
        await system.settle()
        assert not system.leftovers()


@virtually
async def test_a_modest_client_is_not_behind_a_greedy_ones_backlog():
    ends = Ends()
    async with (
        virtual_system(*targets(1), request_limit=1) as system,
        asyncio.TaskGroup() as tasks,
    ):
        await begun(tasks, *(ends.note("greedy", request(system)) for _ in range(20)))
        await begun(tasks, ends.note("modest", request(system, client=MODEST)))
    assert ends.index("modest") == 1
    assert len(ends) == 21


@virtually
async def test_a_place_is_free_for_a_client_that_has_none():
    async with (
        virtual_system(*targets(1), request_limit=10) as system,
        asyncio.TaskGroup() as tasks,
    ):
        await begun(tasks, *(request(system) for _ in range(20)))
        assert system.servicer.running_count == 8, "one client gets four fifths"
        await begun(tasks, request(system, client=MODEST))
        assert (system.servicer.running_count, system.servicer.waiting_count) == (9, 12)


@virtually
async def test_the_clients_of_a_proxy_take_turns_within_its_share():
    ends = Ends()
    async with (
        virtual_system(*targets(1), request_limit=1) as system,
        asyncio.TaskGroup() as tasks,
    ):
        greedy = (ends.note("greedy", request(system, lane="a")) for _ in range(6))
        modest = (ends.note("modest", request(system, lane="b")) for _ in range(2))
        other = (ends.note("other", request(system, client=MODEST)) for _ in range(2))
        await begun(tasks, *greedy, *modest, *other)
    # The proxy and the other client take turns, and within the proxy its clients do.
    assert ends[:6] == ["greedy", "other", "greedy", "other", "modest", "greedy"]
    assert ends[6:] == ["modest", "greedy", "greedy", "greedy"]


def with_adapter():
    """Return a target without a LoRA adapter, and one with it."""
    plain, able = targets(2)
    able.lora_fingerprints = {"law": "a"}
    return plain, able


@asynccontextmanager
async def adapter_away(**limits):
    """Run a system whose target with the adapter is away; yield the system and this target."""
    plain, able = with_adapter()
    async with virtual_system(plain, able, **limits) as system:
        await able.kill()
        await system.until(lambda: not system.server(able.name).ready)
        yield system, able


@virtually
async def test_who_waits_for_an_adapter_that_is_away_holds_no_place():
    async with (
        adapter_away(request_limit=1) as (system, able),
        asyncio.TaskGroup() as tasks,
    ):
        (waiting,) = await begun(tasks, request(system, lora="law"))
        assert (system.servicer.running_count, system.servicer.waiting_count) == (0, 1)
        for client in (GREEDY, MODEST):
            await request(system, client=client, seconds=1)
        assert not waiting.done()
        await able.start()
        assert (await waiting).token_ids == continuation(PROMPT, 4)


@virtually
async def test_a_request_whose_adapter_leaves_before_its_turn_gives_its_place_to_others():
    plain, able = with_adapter()
    ends = Ends()
    async with (
        virtual_system(plain, able, request_limit=1) as system,
        asyncio.TaskGroup() as tasks,
    ):
        await begun(tasks, ends.note("first", request(system, max_tokens=24)))
        await begun(tasks, ends.note("law", request(system, lora="law", client=MODEST)))
        (last,) = await begun(tasks, ends.note("last", request(system, client="10.0.0.3")))
        assert system.servicer.waiting_count == 2
        await able.kill()
        await last
        assert ends == ["first", "last"]
        assert (system.servicer.running_count, system.servicer.waiting_count) == (0, 1)
        await able.start()
    assert ends == ["first", "last", "law"]


@virtually
async def test_a_request_whose_adapter_is_gone_at_its_turn_keeps_no_place():
    plain, able = with_adapter()
    async with (
        virtual_system(plain, able, request_limit=1) as system,
        asyncio.TaskGroup() as tasks,
    ):
        await begun(tasks, request(system, max_tokens=24))
        (waiting,) = await begun(tasks, given_up(request(system, lora="law", client=MODEST)))
        await able.kill()
        able.lora_fingerprints = {}
        await able.start()
        assert isinstance(await waiting, errors.ModelNotFoundError)
        assert (system.servicer.running_count, system.servicer.waiting_count) == (0, 0)


@virtually
async def test_streams_whose_adapter_leaves_hold_places_for_seconds_and_none_of_others():
    """They may go on at once where it is back. A client has four fifths of the places at most."""
    plain, able = with_adapter()
    async with (
        virtual_system(plain, able, request_limit=10) as system,
        asyncio.TaskGroup() as tasks,
    ):
        streams = (given_up(request(system, lora="law", max_tokens=400)) for _ in range(8))
        running = await begun(tasks, *streams)
        (behind,) = await begun(tasks, request(system))
        await asyncio.sleep(0.2)
        await able.kill()
        began = now()
        await request(system, client=MODEST)
        assert now() - began < 1, "another client finds a place at once"
        assert system.servicer.running_count == 8
        for each in running:
            assert isinstance(await each, errors.NoTargetError)
        assert now() - began < shortage.WAIT_SECONDS + 1
        await behind
        await system.settle()
        assert not system.leftovers()


@virtually
async def test_streams_without_any_target_hold_places_as_long():
    (only,) = targets(1)
    async with virtual_system(only, request_limit=10) as system, asyncio.TaskGroup() as tasks:
        streams = (given_up(request(system, max_tokens=400)) for _ in range(8))
        running = await begun(tasks, *streams)
        await asyncio.sleep(0.2)
        await only.kill()
        began = now()
        for each in running:
            assert isinstance(await each, errors.NoTargetError)
        assert now() - began < shortage.WAIT_SECONDS + 1
        assert system.servicer.running_count == 0


@virtually
async def test_requests_for_an_adapter_that_is_away_are_bounded_and_given_up():
    async with (
        adapter_away(request_limit=1, queue_limit=5) as (system, _),
        asyncio.TaskGroup() as tasks,
    ):
        waiting = [tasks.create_task(given_up(request(system, lora="law"))) for _ in range(4)]
        await asyncio.sleep(0.001)
        with pytest.raises(errors.OverloadedError, match="0 requests are running and 4 wait"):
            await request(system, lora="law")
        with pytest.raises(errors.ModelNotFoundError):
            await request(system, lora="verse", client=MODEST)
        began = now()
        for each in waiting:
            assert isinstance(await each, errors.NoTargetError)
        assert now() - began < shortage.WAIT_SECONDS + 0.1
        await system.settle()
        assert not system.leftovers()


@virtually
async def test_an_adapter_that_does_not_exist_is_said_to_be_none_however_many_requests_wait():
    async with virtual_system(*with_adapter(), queue_limit=0) as system:
        with pytest.raises(errors.ModelNotFoundError):
            await request(system, lora="verse")


@virtually
async def test_who_waits_for_an_adapter_while_it_drains_is_not_begun_when_the_adapter_is_back():
    async with (
        adapter_away(request_limit=1) as (system, able),
        asyncio.TaskGroup() as tasks,
    ):
        waiting = tasks.create_task(given_up(request(system, lora="law")))
        await asyncio.sleep(0.001)
        assert system.servicer.waiting_count == 1
        system.servicer.drain()
        await able.start()
        assert isinstance(await waiting, errors.DrainingError)


async def given_up(generation):
    """Return the error that a request ends with."""
    with pytest.raises(errors.PacelineError) as ended:
        await generation
    return ended.value


@virtually
async def test_requests_of_one_client_keep_their_order():
    ends = Ends()
    async with (
        virtual_system(*targets(1), request_limit=1) as system,
        asyncio.TaskGroup() as tasks,
    ):
        await begun(tasks, *(ends.note(number, request(system)) for number in range(8)))
    assert ends == sorted(ends)


@virtually
async def test_one_more_than_may_wait_is_refused_at_once_and_told_when_to_come_again():
    async with (
        virtual_system(*targets(1), request_limit=1, queue_limit=5) as system,
        asyncio.TaskGroup() as tasks,
    ):
        await begun(tasks, *(request(system) for _ in range(5)))
        assert system.servicer.waiting_count == 4, "one client gets four fifths"
        with pytest.raises(errors.OverloadedError, match="1 requests are running and 4 wait") as it:
            await request(system)
        assert it.value.retry_after_seconds
        await begun(tasks, request(system, client=MODEST))
        assert system.servicer.waiting_count == 5


@virtually
async def test_long_messages_fill_the_queue_by_their_bytes():
    long = pb.TokenIds(ids=[7] * 300_000)
    async with (
        virtual_system(
            *targets(1), request_limit=1, queue_limit_bytes=1 << 20, message_limit_bytes=1 << 20
        ) as system,
        asyncio.TaskGroup() as tasks,
    ):
        first, *waiting = await begun(
            tasks, request(system, max_tokens=200), request(system), request(system)
        )
        beyond = [request(system, token_ids=long, seconds=1) for _ in range(3)]
        outcomes = await asyncio.gather(*beyond, return_exceptions=True)
        assert [type(it) for it in outcomes] == [
            errors.DeadlineError,
            errors.DeadlineError,
            errors.OverloadedError,
        ]
        assert system.servicer.waiting_count == len(waiting)
        assert not first.done()
        # What those took that wait no longer is free again.
        beyond = [request(system, token_ids=long, seconds=1) for _ in range(2)]
        outcomes = await asyncio.gather(*beyond, return_exceptions=True)
        assert [type(it) for it in outcomes] == 2 * [errors.DeadlineError]


@virtually
async def test_a_request_that_waits_for_too_long_is_told_when_to_come_again():
    async with (
        virtual_system(*targets(1), request_limit=1, queue_seconds=2) as system,
        asyncio.TaskGroup() as tasks,
    ):
        await begun(tasks, request(system, max_tokens=1000))
        with pytest.raises(errors.OverloadedError, match="has waited for 2 s") as refused:
            await request(system)
        assert refused.value.retry_after_seconds
        assert system.servicer.waiting_count == 0


@virtually
async def test_a_deadline_counts_while_a_request_waits():
    async with (
        virtual_system(
            *targets(1), request_limit=1, default_deadline_seconds=3, queue_seconds=300
        ) as system,
        asyncio.TaskGroup() as tasks,
    ):
        await begun(tasks, request(system, max_tokens=1000))
        with pytest.raises(errors.DeadlineError, match="before its turn"):
            await request(system, seconds=None)
        assert system.servicer.waiting_count == 0


@virtually
async def test_a_request_that_is_cancelled_while_it_waits_leaves_nothing():
    ends = Ends()
    async with (
        virtual_system(*targets(1), request_limit=1) as system,
        asyncio.TaskGroup() as tasks,
    ):
        _, second, _ = await begun(
            tasks, *(ends.note(number, request(system)) for number in range(3))
        )
        calls = len(system.records())
        second.cancel()
        await asyncio.wait((second,))
        assert system.servicer.waiting_count == 1
        assert system.registry.get_sample_value("paceline_num_requests_waiting") == 1
        assert len(system.records()) == calls, "it had no session to close"
    assert ends == [0, 2]


@virtually
async def test_a_place_that_is_given_to_a_request_as_it_is_cancelled_goes_to_the_next():
    queue = a_queue(1)
    await entering(queue)
    async with asyncio.TaskGroup() as tasks:
        second, third = await begun(tasks, entering(queue), entering(queue))
        queue.leave("a")  # to the second one, which goes in this turn of the loop
        second.cancel()
        await third
    assert (queue.running_count, queue.waiting_count) == (1, 0)
    queue.leave("a")
    assert queue.running_count == 0


@virtually
async def test_of_clients_with_as_many_places_the_one_served_longest_ago_is_next():
    queue, ends = a_queue(4), Ends()
    for share in ("first", "second", "second"):
        await entering(queue, share)
    queue.leave("second")  # which keeps the other one of its places
    for share in ("third", "fourth"):
        await entering(queue, share)
    async with asyncio.TaskGroup() as tasks:
        await begun(tasks, *(ends.note(it, entering(queue, it)) for it in ("second", "first")))
        assert queue.waiting_count == 2
        queue.leave("third")
        queue.leave("fourth")
    assert ends == ["first", "second"]


@virtually
async def test_draining_sends_requests_that_wait_elsewhere_and_lets_running_ones_end():
    async with (
        virtual_system(*targets(1), request_limit=1) as system,
        asyncio.TaskGroup() as tasks,
    ):
        first, *_ = await begun(tasks, request(system))
        waiting = [asyncio.ensure_future(request(system)) for _ in range(3)]
        await begun(tasks)
        await asyncio.sleep(0)
        system.servicer.drain()
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert {type(it) for it in outcomes} == {errors.DrainingError}
        assert not first.done()
        await system.servicer.idle()
        assert first.done()
        assert (await first).token_ids == continuation(PROMPT, 4)


@virtually
async def test_the_time_in_the_queue_is_told():
    async with (
        virtual_system(*targets(1), request_limit=1) as system,
        asyncio.TaskGroup() as tasks,
    ):

        def told(name):
            return system.registry.get_sample_value(f"paceline_{name}")

        first, second = await begun(tasks, request(system), request(system))
        assert told("num_requests_waiting") == 1
        took = (await first).finished.statistics
        waited = (await second).finished.statistics
        assert told("num_requests_waiting") == 0
        assert told("queue_seconds_count") == 2
        assert took.queue_ns == 0
        assert waited.queue_ns == pytest.approx(took.total_ns, rel=0.1)
        assert waited.time_to_first_token_ns > waited.queue_ns
        assert told("queue_seconds_sum") == pytest.approx(waited.queue_ns / 1e9)


@virtually
async def test_the_autoscaler_counts_requests_that_wait():
    async with (
        virtual_system(*targets(1), request_limit=1) as system,
        asyncio.TaskGroup() as tasks,
    ):
        await begun(tasks, *(request(system) for _ in range(7)))
        assert system.servicer.waiting_count == 6
        assert system.demand.demand().stream_verifiers >= 6


@virtually
async def test_a_flood_is_let_in_before_it_begins_and_then_begins_step_by_step():
    async with (
        virtual_system(*targets(1)) as system,
        asyncio.TaskGroup() as tasks,
    ):
        servicer, running = system.servicer, []
        for _ in range(100):  # one in four turns of the loop, as gRPC accepts them
            running.append(tasks.create_task(request(system, max_tokens=50)))
            for _ in range(4):
                await asyncio.sleep(0)
        assert (servicer.running_count, servicer.waiting_count) == (1, 99)
        await asyncio.sleep(0.025)
        assert servicer.running_count == 32
        await asyncio.sleep(0.02)
        assert servicer.running_count == 40
        for each in running:
            each.cancel()


@virtually
async def test_a_client_without_a_place_does_not_wait_for_a_flood_to_be_let_in():
    queue = a_queue(100)
    async with asyncio.TaskGroup() as tasks:
        await entering(queue, "greedy")
        await asyncio.sleep(1)
        flood = [tasks.create_task(entering(queue, "greedy")) for _ in range(60)]
        await asyncio.sleep(0)
        assert (queue.running_count, queue.waiting_count) == (1, 60)
        assert await entering(queue, "modest") == 0
        more = [tasks.create_task(entering(queue, f"client {number}")) for number in range(20)]
        await asyncio.sleep(0)
        assert queue.running_count == 2, "clients that come together may be a flood, too"
        for each in (*flood, *more):
            each.cancel()


def hold_the_loop_up():
    """Let this turn of the event loop take 20 ms."""
    time.sleep(0.02)


async def test_a_flood_of_clients_is_one_however_long_a_turn_of_the_loop_takes():
    """gRPC accepts one call in some four turns: on a late loop that is more than any moment."""
    queue, running = a_queue(100), []
    async with asyncio.TaskGroup() as tasks:
        entered = []
        for number in range(10):
            entered.append(tasks.create_task(entering(queue, f"client {number}")))
            for _ in range(4):
                hold_the_loop_up()
                await asyncio.sleep(0)
            running.append(queue.running_count)
        assert running[0] == 1
        assert running[3] < 4, "they wait until no other one has come"
        await asyncio.gather(*entered)
    assert queue.running_count == 10


@virtually
async def test_two_clients_that_come_a_moment_after_each_other_begin_at_once():
    queue = a_queue(100)
    for name in ("one", "other", "third"):
        await asyncio.sleep(0.001)
        assert await entering(queue, name) == 0
    assert queue.running_count == 3


@virtually
async def test_arrivals_without_end_do_not_hold_requests_back_for_ever():
    queue, waiting = a_queue(100), []
    async with asyncio.TaskGroup() as tasks:

        def arrive():
            waiting.append(tasks.create_task(entering(queue)))

        for _ in range(40):
            arrive()
        began = asyncio.get_running_loop().time()
        while queue.running_count < 2:
            arrive()
            await asyncio.sleep(0.002)
        assert asyncio.get_running_loop().time() - began == pytest.approx(3, abs=0.1)
        for each in waiting:
            each.cancel()


@virtually
async def test_a_place_that_becomes_free_is_given_at_once_however_many_arrive():
    queue, waiting = a_queue(40), []
    async with asyncio.TaskGroup() as tasks:

        def arrive():
            waiting.append(tasks.create_task(entering(queue)))

        for _ in range(100):
            arrive()
        await asyncio.sleep(1)
        most = queue.running_count
        assert most >= 32
        for _ in range(200):  # as many end as arrive
            arrive()
            queue.leave("a")
            await asyncio.sleep(0.002)
            assert queue.running_count == most
        for each in waiting:
            each.cancel()
