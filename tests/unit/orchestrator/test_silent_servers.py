"""When a server that does not answer is found out, and when it is used again; on virtual time."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from paceline import errors
from paceline.v1 import orchestrator_service_pb2 as pb
from paceline_orchestrator.fleet.pauses import Pauses, Probed
from paceline_orchestrator.fleet.silence import SilenceError
from support.fake_text import continuation
from support.orchestrating import PROMPT
from support.virtual_servers import drafters, targets
from support.virtual_system import now, virtual_system
from support.virtual_time import virtually

# A call's way, and the question whether its server has it.
HOPS_SECONDS = 0.01
STEP_SECONDS = 0.03
HUNG_AFTER, HUNG_SECONDS, BACK_WITHIN_SECONDS = 1.0, 8.0, 5.0
TOKENS = 600
# Requests that each wait for less than a server's patience, and for more than it together.
EARLY_SECONDS, HOLDOUTS = 0.2, 20
CASES = [
    (pb.STRATEGY_AUTOREGRESSIVE, "target-0"),
    (pb.STRATEGY_SPECULATIVE, "target-0"),
    (pb.STRATEGY_DISTRIBUTED, "target-0"),
    (pb.STRATEGY_DISTRIBUTED, "target-1"),
    (pb.STRATEGY_SPECULATIVE, "drafter-0"),
    (pb.STRATEGY_DISTRIBUTED, "drafter-0"),
]


def longest_gap(stream):
    times = [stream.began, *(at for at, _ in stream.arrivals)]
    return max(later - earlier for earlier, later in pairwise(times))


def is_probe(record):
    return record.request.spec.request_id == "probe"


def asks(system, server, *, since):
    """Return the sessions that were opened there since, and the work begun in them."""
    return [
        it
        for it in system.records("OpenSession", "Verify", "Decode", "Draft", server=server)
        if it.sent_at >= since
    ]


def last_heard(system, server):
    records = system.records("Verify", "Decode", "Draft", server=server)
    return max(at for it in records for at, _ in it.messages)


@pytest.mark.parametrize(("strategy", "name"), CASES)
@virtually
async def test_a_hung_server_is_found_out_left_alone_and_used_again_when_it_is_well(strategy, name):
    models = {it.name: it for it in (*drafters(1), *targets(2))}
    async with virtual_system(*models.values()) as system, asyncio.TaskGroup() as tasks:
        options = {"strategy": strategy, "lookahead": 3, "target_count": 2, "drafter_count": 1}
        running = tasks.create_task(system.generate(max_tokens=TOKENS, **options))
        await asyncio.sleep(HUNG_AFTER)
        server = system.server(name)
        assert server.call_count or server.session_count

        models[name].link.hold("Verify", "Decode", "Draft")
        await system.until(lambda: server.status == "SILENT")
        patience = now() - last_heard(system, name)
        assert 1.0 - STEP_SECONDS <= patience <= 1.0 + STEP_SECONDS + HOPS_SECONDS
        silent_since = now()
        await asyncio.sleep(HUNG_SECONDS)
        other = await system.generate(max_tokens=8, **options)
        assert longest_gap(other) < 3 * STEP_SECONDS, "it waited for the hung server, too"

        since_then = asks(system, name, since=silent_since)
        opened = [it for it in since_then if it.method == "OpenSession"]
        assert all(map(is_probe, opened))
        assert 2 <= len(opened) <= HUNG_SECONDS / 2 + 2, "as often as said"
        probing = {it.messages[0][1].grant.session_id for it in opened if it.messages}
        assert {it.session_id for it in since_then if it.method != "OpenSession"} <= probing

        models[name].link.release()
        assert await system.until(lambda: server.ready) <= BACK_WITHIN_SECONDS
        stream = await running
        assert stream.token_ids == continuation(PROMPT, TOKENS)
        assert longest_gap(stream) <= 1.0 + 2 * STEP_SECONDS + HOPS_SECONDS
        assert stream.fallbacks["deadline"] == 1
        assert stream.fallbacks.keys() <= {"deadline", "no_drafter"}


@pytest.mark.parametrize("ends_by", ["deadline", "cancel"])
@virtually
async def test_requests_that_end_early_do_not_hide_that_a_target_is_silent(ends_by):
    (target,) = targets(1)
    async with virtual_system(target) as system:
        target.link.hold("Verify", "Decode")
        waits = {"seconds": EARLY_SECONDS} if ends_by == "deadline" else {}
        for _ in range(HOLDOUTS):
            request = asyncio.create_task(system.generate(**waits))
            await asyncio.wait((request,), timeout=EARLY_SECONDS + HOPS_SECONDS)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
        await system.until(lambda: system.server("target-0").status == "SILENT")


@virtually
async def test_a_full_target_that_is_suspected_is_full_and_not_silent():
    (model,) = targets(1)
    async with virtual_system(model) as system:
        server = system.server("target-0")
        model.open_error = errors.CacheExhaustedError("full", retry_after_seconds=0.5)
        system.pool.suspect(server)
        await asyncio.sleep(5)
        assert server.ready
        with pytest.raises(errors.OverloadedError, match="full"):
            await system.generate()


@virtually
async def test_a_silent_target_that_is_full_gets_no_work_before_it_has_computed_a_token():
    (model,) = targets(1)
    async with virtual_system(model) as system:
        server = system.server("target-0")
        model.link.hold("Verify")
        system.pool.suspect(server)
        await system.until(lambda: server.status == "SILENT")
        model.open_error = errors.CacheExhaustedError("full", retry_after_seconds=0.5)
        model.link.release()
        await asyncio.sleep(20)
        assert server.status == "SILENT"
        model.open_error = None
        assert await system.until(lambda: server.ready) <= BACK_WITHIN_SECONDS


@virtually
async def test_a_target_that_falls_silent_just_as_its_probe_ends_is_probed_again_and_once():
    probes, is_well = [], asyncio.Event()

    def fall_silent():
        pauses.after_failure(server, SilenceError("it is silent"), asked_at=now())

    async def answers(server):
        probes.append(server)
        if len(probes) == 1:
            asyncio.get_running_loop().call_soon(fall_silent)  # before any callback of its end
        else:
            await is_well.wait()
        return Probed.TOKEN

    async with virtual_system(*targets(1)) as system, asyncio.TaskGroup() as tasks:
        server = system.server("target-0")
        pauses = Pauses(tasks, answers=answers, tell=lambda _: None)
        for _ in range(3):
            pauses.probe(server)
            await asyncio.sleep(1)
            assert probes == [server, server]
            assert server.status == "SILENT"
        is_well.set()
        await asyncio.sleep(1)
        assert server.ready


@virtually
async def test_what_is_well_again_works_for_those_that_run():
    models = targets(2)
    async with virtual_system(*drafters(1), *models) as system, asyncio.TaskGroup() as tasks:
        running = tasks.create_task(
            system.generate(
                strategy=pb.STRATEGY_DISTRIBUTED, lookahead=3, target_count=2, max_tokens=800
            )
        )
        await asyncio.sleep(1)
        models[1].link.hold("Verify", "Decode")
        await system.until(lambda: not system.server("target-1").ready)
        models[1].link.release()
        await system.until(lambda: system.server("target-1").ready)
        back = now()
        await running
        answered = [
            it
            for it in system.records("Verify", "Decode", server="target-1")
            if it.sent_at > back and it.end == "answered"
        ]
        assert len(answered) > 10


async def decode_at_one_that_tells_of_no_call(target, *, prompt_length, max_tokens=3):
    """A server that is asked whether it has a call is given up: so the patience shows."""
    target.renew = lambda _: 0
    async with virtual_system(target) as system:
        return await system.generate(
            strategy=pb.STRATEGY_AUTOREGRESSIVE,
            token_ids=pb.TokenIds(ids=[1] * prompt_length),
            max_tokens=max_tokens,
            seconds=600,
        )


@pytest.mark.parametrize(
    ("says_latencies", "prefill_seconds"),
    [
        (True, 0.5),
        (True, 8.0),  # what its rows should take, and not what a step does
        (True, 40.0),
        (False, 9.0),  # nothing is known yet
    ],
)
@virtually
async def test_a_prompt_takes_its_time(says_latencies, prefill_seconds):
    rows = 1000
    (target,) = targets(
        1, says_latencies=says_latencies, row_seconds=prefill_seconds / rows, latency_seconds=0.01
    )
    stream = await decode_at_one_that_tells_of_no_call(target, prompt_length=rows)
    assert not stream.fallbacks
    assert stream.arrivals[0][0] - stream.began > 0.99 * prefill_seconds


@pytest.mark.parametrize(
    ("says_latencies", "prefill_seconds", "patience_seconds"),
    [
        (True, 1.0, 4.0),  # four times as long as it should take
        (True, 0.1, 2.0),  # where a session begins, no less than this
        (False, 0.1, 10.0),
    ],
)
@virtually
async def test_a_prompt_that_takes_too_long_is_given_up(
    says_latencies, prefill_seconds, patience_seconds
):
    rows = 1000
    (target,) = targets(
        1, says_latencies=says_latencies, row_seconds=prefill_seconds / rows, latency_seconds=0.01
    )
    async with virtual_system(target) as system, asyncio.TaskGroup() as tasks:
        target.link.hold("Verify", "Decode")
        running = tasks.create_task(
            system.generate(
                strategy=pb.STRATEGY_AUTOREGRESSIVE,
                token_ids=pb.TokenIds(ids=[1] * rows),
                max_tokens=1,
            )
        )
        took = await system.until(lambda: system.server("target-0").status == "SILENT")
        assert patience_seconds <= took <= 1.01 * patience_seconds + HOPS_SECONDS
        target.link.release()
        assert (await running).fallbacks == {"deadline": 1}


@virtually
async def test_after_its_prompt_a_session_is_waited_for_as_long_as_a_step_takes():
    (target,) = targets(1, row_seconds=0.01)
    async with virtual_system(target) as system, asyncio.TaskGroup() as tasks:
        running = tasks.create_task(
            system.generate(
                strategy=pb.STRATEGY_DISTRIBUTED,
                token_ids=pb.TokenIds(ids=[1] * 800),
                max_tokens=40,
            )
        )
        await asyncio.sleep(8.5)
        target.link.hold("Verify", "Decode")
        took = await system.until(lambda: system.server("target-0").status == "SILENT")
        assert took <= 1.0 + STEP_SECONDS + HOPS_SECONDS
        target.link.release()
        assert (await running).fallbacks == {"deadline": 1, "no_drafter": 1}


@virtually
async def test_a_target_that_is_slow_and_says_that_it_has_the_call_is_waited_for():
    (target,) = targets(1)
    async with virtual_system(target) as system:
        target.slowdown = 100.0  # a step of 3 s
        stream = await system.generate(strategy=pb.STRATEGY_AUTOREGRESSIVE, max_tokens=4)
        assert not stream.fallbacks
        assert system.records("RenewSession"), "it was asked"


@virtually
async def test_a_frozen_server_is_found_out_and_used_again_when_it_thaws():
    frozen, well = targets(2)
    async with virtual_system(frozen, well) as system, asyncio.TaskGroup() as tasks:
        running = tasks.create_task(
            system.generate(strategy=pb.STRATEGY_AUTOREGRESSIVE, max_tokens=200)
        )
        await asyncio.sleep(1)
        frozen.link.freeze()
        assert await system.until(lambda: not system.server("target-0").ready) <= 2.0 + HOPS_SECONDS
        await asyncio.sleep(20)
        frozen.link.thaw()
        assert await system.until(lambda: system.server("target-0").ready) <= BACK_WITHIN_SECONDS
        stream = await running
        assert stream.token_ids == continuation(PROMPT, 200)
        assert longest_gap(stream) <= 2.0 + 2 * STEP_SECONDS + HOPS_SECONDS
