"""AUTO within a request: it stops drafting where its own verdicts say that this does not pay, and
tries again now and then. Times are simulated: nothing here depends on how fast the tests run."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace

import pytest

from paceline.v1 import orchestrator_service_pb2 as pb
from paceline_orchestrator.planning.evidence import Evidence
from paceline_orchestrator.planning.hit_rates import Pair
from paceline_protocol.draft_shape import CHAIN
from paceline_protocol.draft_statistics import DraftStatistics
from paceline_protocol.methods import METHODS, Strategy
from support.fake_text import continuation
from support.orchestrating import PROMPT
from support.virtual_servers import drafters, targets
from support.virtual_system import virtual_system
from support.virtual_time import run_virtually, virtually

PLAIN, SI, DSI = pb.STRATEGY_AUTOREGRESSIVE, pb.STRATEGY_SPECULATIVE, pb.STRATEGY_DISTRIBUTED
STEP_SECONDS = 0.03
BAD_PAIR = Pair("target-model", "drafter-model")


def always(_position):
    return True


def never(_position):
    return False


def often(rate, *, seed=1):
    """Return that a drafter is right at so many places, drawn at random."""
    draw = random.Random(seed).random
    places = [draw() < rate for _ in range(4096)]
    return lambda position: places[position]


def code_and_prose(count, *, code_first=True):
    """Return that a drafter is right in code, of so many tokens, and wrong in prose."""
    right = often(0.9)
    begin = len(PROMPT) + count
    return lambda position: right(position) and (position < begin) is code_first


def learn(system, drafts):
    """Have the planner learn what became of an earlier request's drafts."""
    plan = SimpleNamespace(method=METHODS[Strategy.SPECULATIVE], shape=CHAIN, pair=BAD_PAIR)
    system.planning.experience.learn(drafts, plan=plan, verification_count=0)


async def decode(agrees, count, *, part=1 / 3, target_count=1, is_bad=False, **request):
    """Decode at new servers, with a drafter whose step is that part of a target's.

    Args:
        is_bad: Whether the drafter has always been wrong so far.
    """
    drafter = drafters(1, latency_seconds=part * STEP_SECONDS, agrees=agrees)
    models = [*drafter, *targets(target_count, latency_seconds=STEP_SECONDS)]
    async with virtual_system(*models) as system:
        if is_bad:
            wrong = DraftStatistics(drafted=2000, rejected=2000)
            learn(system, wrong)
        stream = await system.generate(max_tokens=count, **request)
        await system.settle()
        assert system.leftovers() == []
    assert stream.token_ids == continuation(PROMPT, count)
    return stream


def seconds(*arguments, until=None, since=0, **options):
    """Return how long it takes until so many tokens, and since so many, are there."""
    stream = run_virtually(decode(*arguments, **options))
    times = [at - stream.began for at, token_ids in stream.arrivals for _ in token_ids]
    return times[(until or len(times)) - 1] - (times[since - 1] if since else 0.0)


@pytest.mark.parametrize("part", [1 / 10, 1 / 3, 1 / 2])
@pytest.mark.parametrize("target_count", [1, 3])
def test_a_useless_drafter_costs_the_first_request_next_to_nothing(target_count, part):
    auto = seconds(never, 100, until=50, target_count=target_count, part=part)
    plain = seconds(never, 100, until=50, strategy=PLAIN)
    assert auto <= 1.05 * plain


@pytest.mark.parametrize("target_count", [1, 3])
def test_code_that_becomes_prose_is_decoded_plainly_from_soon_after_on(target_count):
    text = code_and_prose(100)
    auto = seconds(text, 200, target_count=target_count)
    fastest = DSI if target_count > 1 else SI
    in_code = min(
        seconds(text, 200, until=100, target_count=target_count, strategy=fastest, lookahead=it)
        for it in (1, 2, 3)
    )
    in_prose = seconds(text, 200, since=100, strategy=PLAIN)
    assert auto <= 1.1 * (in_code + in_prose)


@pytest.mark.parametrize("target_count", [1, 3])
def test_prose_that_becomes_code_is_drafted_again(target_count):
    text = code_and_prose(100, code_first=False)
    auto = seconds(text, 400, since=300, target_count=target_count)
    plain = seconds(text, 400, since=300, strategy=PLAIN)
    assert auto < 0.6 * plain


@virtually
async def test_what_began_plainly_for_wrong_drafts_drafts_again_where_they_are_right():
    stream = await decode(always, 300, is_bad=True)
    assert stream.started.strategy == PLAIN
    times = [at for at, token_ids in stream.arrivals for _ in token_ids]
    assert times[-1] - times[199] < 0.6 * 100 * STEP_SECONDS
    assert stream.fallbacks == {"load_changed": 1}


@virtually
async def test_what_began_plainly_in_a_crowd_tries_when_it_is_alone():
    drafter = drafters(1, latency_seconds=STEP_SECONDS / 3)
    async with virtual_system(*drafter, *targets(1, latency_seconds=STEP_SECONDS)) as system:
        learn(system, DraftStatistics(drafted=2000, rejected=2000))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(system.generate(max_tokens=10), name="a crowd")
            asked = tasks.create_task(system.generate(max_tokens=400), name="a client")
    stream = asked.result()
    assert stream.started.strategy == PLAIN
    assert stream.finished.statistics.accepted_token_count > 100


def test_trying_in_vain_costs_two_in_a_hundred_and_ever_less():
    auto = seconds(never, 1500, is_bad=True)
    plain = seconds(never, 1500, strategy=PLAIN)
    assert plain < auto <= 1.02 * plain, "it tries, and it costs something"


@virtually
async def test_where_most_drafts_are_right_nothing_changes():
    for target_count in (1, 3):
        stream = await decode(often(0.8), 200, part=1 / 6, target_count=target_count)
        assert stream.fallbacks == {}


@virtually
async def test_blocks_become_longer_where_drafts_are_always_right():
    stream = await decode(always, 200, part=1 / 10)
    assert stream.started.strategy == SI
    assert stream.finished.lookahead > stream.started.lookahead


@virtually
async def test_a_lookahead_that_a_request_names_stays():
    stream = await decode(always, 200, part=1 / 10, lookahead=3)
    assert stream.finished.lookahead == stream.started.lookahead == 3


@pytest.mark.parametrize(
    "wish",
    [{"strategy": SI}, {"strategy": DSI}, {"strategy": PLAIN}, {"drafter": pb.DRAFTER_KIND_SERVER}],
)
@virtually
async def test_a_request_that_says_how_it_is_decoded_keeps_to_that(wish):
    bad, good = await decode(never, 60, **wish), await decode(always, 60, is_bad=True, **wish)
    for stream in (bad, good):
        assert stream.fallbacks == {}
    assert (bad.finished.statistics.rejected_token_count > 40) is (wish != {"strategy": PLAIN})


@virtually
async def test_what_a_trial_shows_the_next_request_begins_with():
    drafter = drafters(1, latency_seconds=STEP_SECONDS / 3)
    async with virtual_system(*drafter, *targets(1, latency_seconds=STEP_SECONDS)) as system:
        learn(system, DraftStatistics(drafted=300, rejected=300))
        first = await system.generate(max_tokens=600)
        second = await system.generate(max_tokens=60)
    assert first.started.strategy == PLAIN
    assert second.started.strategy == SI


def test_a_few_verdicts_outweigh_what_is_known_and_the_latest_outweigh_those_before():
    evidence = Evidence(0.7)
    assert evidence.rate == 0.7
    evidence.judged(accepted=0, rejected=4)
    assert evidence.rate == 0.3
    evidence.judged(accepted=100, rejected=0)
    assert evidence.rate == 1.0
    evidence.judged(accepted=0, rejected=16)
    assert evidence.rate == 0.4


def rest_of(evidence, at):
    """Return after how many tokens it tries again."""
    return next(n for n in range(10_000) if evidence.has_rested(at + n))


def test_it_rests_twice_as_long_after_each_trial_in_vain_and_not_after_drafts_that_were_right():
    evidence, at, rests = Evidence(0.7), 0, []
    for accepted in (0, 0, 0, 0, 30, 0, *[0] * 9):
        evidence.judged(accepted=accepted, rejected=3)
        evidence.retreat(at=at, trial_tokens=3)
        rests.append(rest_of(evidence, at))
        at += rests[-1]
        evidence.forget()
    assert rests[:6] == [100, 200, 400, 800, 100, 200]
    assert rests[-2:] == [1024, 1024], "on a long text it tries every thousand tokens or so"


def test_a_trial_that_costs_more_comes_later():
    evidence = Evidence(0.0)
    evidence.retreat(at=7, trial_tokens=60)
    assert rest_of(evidence, 7) == 2000
    evidence.rest(at=7, trial_tokens=0.1)
    assert rest_of(evidence, 7) == 32
