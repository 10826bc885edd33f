"""Who is to blame for INTERNAL and for bad answers: a server, or a request; on virtual time."""

from __future__ import annotations

import asyncio
import math
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from paceline import errors
from paceline.v1 import orchestrator_service_pb2 as pb
from support.fake_text import continuation
from support.orchestrating import PROMPT, STRATEGIES
from support.virtual_servers import VirtualServer, drafters, targets
from support.virtual_system import VirtualDiscovery, now, virtual_system
from support.virtual_time import virtually
from support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LENGTH = len(PROMPT)


@dataclass
class Failing(VirtualServer):
    """One that answers some calls with INTERNAL.

    Attributes:
        fails: Whether it does so, by the request and the length of its text.
        asked: The requests whose calls it has met.
    """

    fails: Callable[[str, int], bool] = lambda *_: True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.asked: list[str] = []

    @contextmanager
    def call(self, request) -> Iterator:
        session = self.sessions.get(request.call.session_id)
        if session is not None:
            name = session.spec.request_id
            self.asked.append(name)
            if self.fails(name, request.call.base_length + len(request.call.token_ids)):
                raise errors.InternalError("the model's scores are not finite")
        with super().call(request) as it:
            yield it


def failing(role, number, fails):
    latency = 0.03 if role == "target" else 0.005
    return [
        Failing(role, name=f"{role}-{index}", fails=fails, latency_seconds=latency)
        for index in range(number)
    ]


def at_the_bad_request(request_id, _length):
    return request_id.startswith("bad")


def at_requests_only(request_id, _length):
    return request_id != "probe"


def always(*_):
    return True


def statuses(system):
    return {it.name: it.status for it in system.pool.servers if not it.ready}


# --- the request is to blame -------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("target_count", [1, 2, 4])
@virtually
async def test_a_request_at_which_each_target_fails_ends_and_takes_none_from_others(
    target_count, strategy
):
    models = failing("target", target_count, at_the_bad_request)
    async with virtual_system(*drafters(1), *models) as system, asyncio.TaskGroup() as tasks:

        async def be_bad():
            for index in range(20):
                with pytest.raises(errors.InternalError, match=r"target-\d said INTERNAL: the mod"):
                    await system.generate(strategy=strategy, request_id=f"bad-{index}")
                assert not statuses(system)

        bad = tasks.create_task(be_bad())
        while not bad.done():
            began = now()
            good = await system.generate(strategy=strategy, request_id="good", client="10.0.0.2")
            assert good.token_ids == continuation(PROMPT, 24)
            assert now() - began < 2
        for index in range(20):
            calls = sum(it.asked.count(f"bad-{index}") for it in models)
            assert calls <= 3 + target_count, "one is asked again where less than three can be"


@virtually
async def test_a_request_is_not_ended_as_guilty_while_another_target_works_on_it():
    failed = set()

    def once(name):
        def fails(request_id, _length):
            is_first = request_id == "bad" and name not in failed
            failed.add(name) if is_first else None
            return is_first

        return fails

    bad = [Failing("target", name=f"target-{it}", fails=once(it)) for it in range(3)]
    slow = Failing("target", name="target-9", fails=lambda *_: False, latency_seconds=1.0)
    discovery = VirtualDiscovery(*bad, slow)
    async with virtual_system(*bad, slow, discovery=discovery) as system:
        asked = asyncio.create_task(system.generate(request_id="bad"))
        await until(lambda: "bad" in slow.asked, what="the last one works on it")
        await asyncio.sleep(0.3)
        discovery.list(*bad, leaving=[slow])
        assert (await asked).token_ids == continuation(PROMPT, 24)


@virtually
async def test_a_full_target_that_cannot_be_asked_for_a_token_does_not_pause():
    def fails(request_id, _length):
        if request_id == "bad":  # its last place has just gone to somebody else
            full = errors.OverloadedError("too many sessions", retry_after_seconds=1)
            for model in models:
                model.open_error = full
                asyncio.get_running_loop().call_later(0.3, setattr, model, "open_error", None)
        return request_id == "bad"

    models = failing("target", 2, fails)
    async with virtual_system(*models) as system:
        bad = asyncio.create_task(system.generate(request_id="bad"))
        while not bad.done():
            assert not statuses(system)
            await asyncio.sleep(0.05)
        with pytest.raises(errors.InternalError, match="targets fail at this request"):
            await bad


@virtually
async def test_a_busy_target_that_failed_once_is_asked_again_before_it_has_time_for_a_probe():
    failed = []

    def fails(request_id, _length):
        failed.append(request_id)
        return request_id == "bad" and failed.count("bad") == 1

    (model,) = failing("target", 1, fails)
    async with virtual_system(model) as system, asyncio.TaskGroup() as tasks:
        model.slowdown = 300.0
        tasks.create_task(system.generate(request_id="good", max_tokens=1, client="10.0.0.2"))
        await asyncio.sleep(0.1)
        model.slowdown = 1.0
        stream = await system.generate(request_id="bad")
        assert stream.token_ids == continuation(PROMPT, 24)


@virtually
async def test_an_answer_that_no_target_may_give_can_be_the_requests_fault():
    """The model computes no numbers after this prompt, and says so in its log probabilities."""
    models = targets(2)

    def distort(message):
        for index in range(len(message.logprobs)):
            message.logprobs[index] = math.nan

    async with virtual_system(*models) as system:
        for model in models:
            model.distort = distort
        with pytest.raises(errors.InternalError, match="said BAD_ANSWER: logprobs"):
            await system.generate(strategy=pb.STRATEGY_AUTOREGRESSIVE, logprobs=True)
        assert not statuses(system)


@virtually
async def test_a_prompt_that_no_target_can_score_ends_and_pauses_none():
    async with virtual_system(*failing("target", 2, at_the_bad_request)) as system:
        with pytest.raises(errors.InternalError, match="targets fail at this request"):
            await system.generate(request_id="bad", prompt_logprobs=0)
        assert not statuses(system)


@virtually
async def test_drafters_that_fail_at_a_request_are_left_alone_by_it_and_not_taken_from_others():
    models = failing("drafter", 2, at_the_bad_request)
    async with virtual_system(*models, *targets(1)) as system:
        bad = await system.generate(
            strategy=pb.STRATEGY_SPECULATIVE, request_id="bad", max_tokens=300
        )
        assert bad.token_ids == continuation(PROMPT, 300)
        assert not statuses(system)
        assert all(it.asked.count("bad") <= 2 for it in models)
        good = await system.generate(strategy=pb.STRATEGY_SPECULATIVE)
        assert good.finished.statistics.drafter_forward_count


def prompts(count):
    return [pb.TokenIds(ids=(*PROMPT, index)) for index in range(1, count + 1)]


async def speculate(system, *, client="10.0.0.1", **request):
    return await system.generate(
        strategy=pb.STRATEGY_SPECULATIVE, drafter=pb.DRAFTER_KIND_SERVER, client=client, **request
    )


@virtually
async def test_a_drafter_that_fails_each_request_is_tried_less_often_each_time(caplog):
    (broken,) = failing("drafter", 1, at_requests_only)
    async with virtual_system(broken, *targets(1)) as system:
        began = now()
        for token_ids in prompts(60):
            await speculate(system, token_ids=token_ids)
        assert now() - began > 30
        assert len(broken.asked) - broken.asked.count("probe") <= 2 * (3 + 7 + (now() - began) / 10)
        assert not statuses(system), "others may have it: who is to blame is not known"
        assert caplog.text.count("drafter-0 fails a client's requests, one after the other") == 1
        broken.fails = lambda *_: False
        await asyncio.sleep(10)
        for token_ids in prompts(4):
            stream = await speculate(system, token_ids=token_ids)
            assert stream.finished.statistics.drafter_forward_count


@virtually
async def test_a_drafter_that_fails_each_request_is_not_tried_before_a_good_one():
    broken, good = failing("drafter", 2, always)
    good.fails = lambda *_: False
    broken.fails = at_requests_only
    async with virtual_system(broken, good, *targets(1)) as system:
        for token_ids in prompts(20):
            await speculate(system, token_ids=token_ids, max_tokens=4)
        assert broken.asked.count("") <= 8


@virtually
async def test_a_poisonous_request_takes_no_drafter_from_anybody():
    (drafter,) = failing("drafter", 1, at_the_bad_request)
    async with virtual_system(drafter, *targets(1)) as system:
        for index in range(20):
            await speculate(system, request_id=f"bad-{index}", seed=index)
        stream = await speculate(system, request_id="good", token_ids=prompts(1)[0])
        assert stream.finished.statistics.drafter_forward_count


@virtually
async def test_many_poisonous_requests_take_no_drafter_from_another_client():
    (drafter,) = failing("drafter", 1, at_the_bad_request)
    async with virtual_system(drafter, *targets(1)) as system:
        for token_ids in prompts(20):
            await speculate(system, request_id="bad", token_ids=token_ids)
        asked = len(drafter.asked)
        await speculate(system, request_id="bad", token_ids=pb.TokenIds(ids=(*PROMPT, 90)))
        assert len(drafter.asked) == asked, "it pauses for this client"
        other = await speculate(system, request_id="good", client="10.0.0.2")
        assert other.finished.statistics.drafter_forward_count


@virtually
async def test_poisonous_requests_among_good_ones_take_no_drafter_from_their_client():
    (drafter,) = failing("drafter", 1, at_the_bad_request)
    async with virtual_system(drafter, *targets(1)) as system:
        for index, token_ids in enumerate(prompts(20)):
            is_bad = index % 3 != 2
            name = f"bad-{index}" if is_bad else "good"
            stream = await speculate(system, request_id=name, token_ids=token_ids)
            assert bool(stream.finished.statistics.drafter_forward_count) is not is_bad


@virtually
async def test_the_process_that_follows_a_broken_drafter_is_tried_at_once():
    (drafter,) = failing("drafter", 1, at_requests_only)
    drafter.incarnation = "1"
    async with virtual_system(drafter, *targets(1)) as system:
        for token_ids in prompts(50):
            await speculate(system, token_ids=token_ids)
        await drafter.kill()
        drafter.incarnation, drafter.fails = "2", lambda *_: False
        await drafter.start()
        await system.until(lambda: not system.server("drafter-0").ready)
        await system.until(lambda: system.server("drafter-0").ready)
        stream = await speculate(system)
        assert stream.finished.statistics.drafter_forward_count


# --- a server is to blame ----------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("fails", [always, at_requests_only])
@pytest.mark.parametrize("broken_count", [1, 2, 4])
@virtually
async def test_beside_a_good_target_a_request_survives_broken_ones_which_pause(
    broken_count, fails, strategy
):
    broken = failing("target", broken_count, fails)
    good = VirtualServer("target", name="target-9")
    async with virtual_system(*drafters(1), *broken, good) as system:
        stream = await system.generate(strategy=strategy, lookahead=2, max_tokens=100)
        assert stream.token_ids == continuation(PROMPT, 100)
        failed = {it.name for it in broken if it.asked}
        assert failed
        assert all(system.server(it).failure_count for it in failed)
        assert not system.server("target-9").failure_count


@dataclass
class OpensNothing(VirtualServer):
    """One that opens sessions for probes alone."""

    async def open(self, spec):
        if spec.request_id != "probe":
            raise errors.InternalError("a bug")
        return await super().open(spec)


@virtually
async def test_a_target_that_opens_no_session_pauses_beside_a_good_one():
    broken, good = OpensNothing("target", name="target-0"), VirtualServer("target", name="target-1")
    async with virtual_system(broken, good) as system:
        stream = await system.generate(strategy=pb.STRATEGY_AUTOREGRESSIVE)
        assert stream.token_ids == continuation(PROMPT, 24)
        assert system.server("target-0").failure_count


@virtually
async def test_a_target_that_scores_no_prompt_pauses_beside_a_good_one():
    (broken,) = failing("target", 1, at_requests_only)
    async with virtual_system(broken, VirtualServer("target", name="target-1")) as system:
        await system.generate(prompt_logprobs=0, max_tokens=0)
        assert system.server("target-0").failure_count


@virtually
async def test_a_lone_target_that_fails_at_everything_pauses_for_longer_each_time():
    (target,) = failing("target", 1, always)
    async with virtual_system(target) as system, asyncio.TaskGroup() as tasks:
        running = tasks.create_task(
            system.generate(strategy=pb.STRATEGY_AUTOREGRESSIVE, max_tokens=4)
        )
        await asyncio.sleep(3)
        assert statuses(system) == {"target-0": "INTERNAL"}
        assert system.server("target-0").failure_count == 3
        target.fails = lambda *_: False
        assert (await running).token_ids == continuation(PROMPT, 4)
        assert not statuses(system)


@virtually
async def test_what_waits_for_a_broken_target_in_vain_may_try_again_and_hears_what_it_said():
    async with virtual_system(*failing("target", 1, always)) as system:
        with pytest.raises(errors.NoTargetError, match="target-0 said INTERNAL: the model's"):
            await system.generate()


@virtually
async def test_a_target_is_blamed_at_the_end_of_a_short_answer_too():
    """It fails at a block that is longer than what is left of the answer."""
    end = continuation(PROMPT, 3)[2]
    broken = Failing("target", name="target-0", fails=at_requests_only, eos_ids=(end,))
    good = VirtualServer("target", name="target-1", eos_ids=(end,))
    async with virtual_system(*drafters(1), broken, good) as system:
        stream = await system.generate(
            strategy=pb.STRATEGY_SPECULATIVE,
            lookahead=6,
            dispatch_policy=pb.DISPATCH_POLICY_BLOCKS,
        )
        assert stream.token_ids == continuation(PROMPT, 3)
        assert broken.asked
        assert system.server("target-0").failure_count


@pytest.mark.parametrize("why", ["full", "draining", "restarting"])
@virtually
async def test_a_request_waits_for_a_good_target_that_is_away_for_a_moment(why):
    (broken,) = failing("target", 1, at_requests_only)
    good = VirtualServer("target", name="target-1")
    async with virtual_system(broken, good) as system, asyncio.TaskGroup() as tasks:
        if why == "full":
            good.open_error = errors.CacheExhaustedError("full", retry_after_seconds=1.0)
        elif why == "draining":
            good.faults.append("fail")
        else:
            await good.kill()
        running = tasks.create_task(system.generate(strategy=pb.STRATEGY_AUTOREGRESSIVE))
        await asyncio.sleep(2)
        good.open_error = None
        if why == "restarting":
            await good.start()
        assert (await running).token_ids == continuation(PROMPT, 24)
        assert broken.asked.count("") <= 3


@virtually
async def test_a_request_that_waits_in_vain_for_a_target_that_never_failed_it_may_try_again():
    (broken,) = failing("target", 1, at_requests_only)
    good = VirtualServer("target", name="target-1")
    async with virtual_system(broken, good) as system:
        await good.kill()
        with pytest.raises(errors.NoTargetError, match="target-0 said INTERNAL"):
            await system.generate(strategy=pb.STRATEGY_AUTOREGRESSIVE)


@virtually
async def test_a_request_is_tried_at_no_more_targets_than_can_fail_it():
    models = failing("target", 60, at_the_bad_request)
    async with virtual_system(*models) as system:
        with pytest.raises(errors.InternalError):
            await system.generate(strategy=pb.STRATEGY_AUTOREGRESSIVE, request_id="bad")
        assert sum(it.asked.count("bad") for it in models) == 16


# --- nobody is to blame ------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@virtually
async def test_a_failure_that_does_not_come_again_costs_a_lone_target_no_pause(strategy):
    (target,) = failing("target", 1, always)
    target.fails = lambda name, _: name != "probe" and target.asked.count(name) == 1
    async with virtual_system(*drafters(1), target) as system:
        stream = await system.generate(strategy=strategy)
        assert stream.token_ids == continuation(PROMPT, 24)
        assert not system.server("target-0").failure_count


@virtually
async def test_a_request_goes_on_as_soon_as_its_target_has_computed_a_token():
    (target,) = failing("target", 1, always)
    target.fails = lambda name, _: name != "probe" and target.asked.count(name) == 1
    async with virtual_system(target) as system:
        began = now()
        await system.generate(strategy=pb.STRATEGY_AUTOREGRESSIVE, max_tokens=1)
        assert now() - began < 0.5


@virtually
async def test_failures_at_places_that_were_passed_do_not_add_up():
    failed_at: set[int] = set()

    def fails(name, length):
        if name == "probe" or length in failed_at or (length - LENGTH) % 5:
            return False
        failed_at.add(length)
        return True

    async with virtual_system(*drafters(1), *failing("target", 1, fails)) as system:
        stream = await system.generate(
            strategy=pb.STRATEGY_SPECULATIVE, lookahead=1, max_tokens=100
        )
        assert stream.token_ids == continuation(PROMPT, 100)
        assert len(failed_at) > 6
