"""Requests that end the processes which work on them, and others that only seem to."""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

import pytest

from paceline import errors
from paceline.v1 import orchestrator_service_pb2 as pb
from paceline_orchestrator.fleet.losses import Loss, PastLosses
from paceline_orchestrator.front.prompts import request_key
from support.fake_text import continuation
from support.orchestrating import PROMPT, STRATEGIES
from support.virtual_servers import VirtualServer, drafters
from support.virtual_system import Stream, now, virtual_system
from support.virtual_time import virtually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LENGTH = len(PROMPT)
RESTART_SECONDS = 2.0
FORWARD_SECONDS = 0.1


@dataclass
class Mortal(VirtualServer):
    """One that ends at some calls, and comes back as another process.

    Attributes:
        ends: Whether it does so, by the request and the length of its text.
        same: Whether only its connections break.
        says_so: Whether it says so a moment before.
        loses_device: Whether it answers its calls with what a target says that is about to end.
        restart_seconds: After how long it comes back.
        ended_at: When it has ended.
    """

    ends: Callable[[str, int], bool] = lambda *_: False
    same: bool = False
    says_so: bool = False
    loses_device: bool = False
    restart_seconds: float = RESTART_SECONDS
    ended_at: list[float] = field(default_factory=list)

    @property
    def end_count(self) -> int:
        return len(self.ended_at)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._processes = count()
        self._restarts: set[asyncio.Task[None]] = set()
        self.incarnation = f"{self.name} {next(self._processes)}"

    async def end(self) -> None:
        await asyncio.sleep(0 if self.loses_device else FORWARD_SECONDS)
        self.ended_at.append(now())
        if self.says_so:
            await self.set_serving(False)
            await asyncio.sleep(0.5)
        await self.kill()
        await asyncio.sleep(self.restart_seconds)
        if not self.same:
            self.incarnation = f"{self.name} {next(self._processes)}"
        await self.start()

    @contextmanager
    def call(self, request) -> Iterator:
        with super().call(request) as (session, fault):
            length = request.call.base_length + len(request.call.token_ids)
            if self.ends(session.spec.request_id, length):
                self._restarts.add(asyncio.ensure_future(self.end()))
                if self.loses_device:
                    raise errors.DrainingError("the device is lost")
            yield session, fault


def mortal(role, number, ends, **more):
    latency = 0.2 if role == "target" else 0.02
    return [
        Mortal(role, name=f"{role}-{index}", ends=ends, latency_seconds=latency, **more)
        for index in range(number)
    ]


def at_the_bad_request(request_id, _length):
    return request_id == "bad"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("target_count", [1, 3, 8])
@virtually
async def test_a_request_that_ends_each_target_is_ended_after_three(target_count, strategy):
    models = mortal("target", target_count, at_the_bad_request)
    async with virtual_system(*drafters(1), *models) as system:
        with pytest.raises(errors.InternalError, match=r"targets ended, .* at this request: targ"):
            await system.generate(strategy=strategy, request_id="bad", seconds=300)
    at_first = target_count if strategy == pb.STRATEGY_DISTRIBUTED else 1
    assert 3 <= sum(it.end_count for it in models) <= at_first + 2


@virtually
async def test_a_request_is_ended_as_soon_as_three_targets_are_known_to_have_ended():
    models = mortal("target", 1, at_the_bad_request)
    async with virtual_system(*models) as system:
        began = now()
        with pytest.raises(errors.InternalError, match="at this request"):
            await system.generate(request_id="bad", seconds=300)
        assert now() - began < 3 * (FORWARD_SECONDS + RESTART_SECONDS) + 1


@virtually
async def test_a_request_ends_though_its_targets_do_not_come_back_and_others_are_left():
    models = mortal("target", 8, at_the_bad_request, restart_seconds=1000.0)
    async with virtual_system(*models) as system:
        with pytest.raises(errors.InternalError, match="at this request"):
            await system.generate(request_id="bad", seconds=300)
        assert sum(it.end_count for it in models) == 3


@virtually
async def test_a_request_at_which_targets_lose_their_device_is_ended_after_three():
    models = mortal("target", 5, at_the_bad_request, loses_device=True)
    async with virtual_system(*models) as system:
        with pytest.raises(errors.InternalError, match="at this request"):
            await system.generate(
                strategy=pb.STRATEGY_AUTOREGRESSIVE, request_id="bad", seconds=300
            )
    assert sum(it.end_count for it in models) == 3


@pytest.mark.parametrize("target_count", [3, 4])
@virtually
async def test_who_lost_the_same_targets_is_not_taken_for_guilty(target_count):
    """Prompts that take long are lost with each target that the other request ends."""
    models = mortal("target", target_count, at_the_bad_request, row_seconds=0.02)
    prompt = [*PROMPT] * (40 // LENGTH + 1)

    async def good(index):
        while True:
            try:
                stream = await system.generate(
                    strategy=pb.STRATEGY_AUTOREGRESSIVE,
                    token_ids=pb.TokenIds(ids=prompt),
                    request_id=f"good-{index}",
                    client=f"10.0.1.{index}",
                    seconds=600,
                )
            except errors.NoTargetError:
                continue  # as it may while targets restart; a client tries again by itself
            return stream.token_ids

    async with virtual_system(*models) as system, asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(good(index)) for index in range(12)]
        with pytest.raises(errors.PacelineError):
            await system.generate(
                strategy=pb.STRATEGY_AUTOREGRESSIVE, request_id="bad", seconds=300
            )
        for each in running:
            assert await each == continuation(prompt, 24)
    assert sum(it.end_count for it in models) == 3


@virtually
async def test_a_request_has_several_targets_again_when_it_has_got_past_a_loss():
    first = iter(range(4))
    models = mortal("target", 4, lambda name, _: name == "good" and next(first, None) is not None)
    async with virtual_system(*drafters(1), *models) as system:
        await system.generate(
            strategy=pb.STRATEGY_DISTRIBUTED, request_id="good", max_tokens=600, seconds=300
        )
        back_at = min(at for it in models for at in it.ended_at) + RESTART_SECONDS
        verifications = [it for it in system.records("Verify") if it.sent_at > back_at]
        first_answer_at = min(it.ended_at for it in verifications)
        at_first = {it.server for it in verifications if it.sent_at < first_answer_at}
        assert len(at_first) == 1, "the first one shows whether it ends, too"
        assert len({it.server for it in verifications}) == 4


@pytest.mark.parametrize("strategy", STRATEGIES)
@virtually
async def test_a_request_goes_on_though_all_its_targets_end_at_once_and_again(strategy):
    ended = {}

    def twice(request_id, length):
        here = ended.setdefault(request_id, [])
        if request_id == "good" and len(here) < 2:
            here.append(length)
            return True
        return False

    models = mortal("target", 4, twice)
    async with virtual_system(*drafters(1), *models) as system:
        answer = await system.generate(strategy=strategy, request_id="good", seconds=300)
    assert answer.token_ids == continuation(PROMPT, 24)
    assert len(ended["good"]) == 2


@virtually
async def test_losses_at_once_are_one():
    models = mortal("target", 8, at_the_bad_request)
    for it in models:
        it.ends = lambda *_: False
    async with virtual_system(*drafters(1), *models) as system, asyncio.TaskGroup() as tasks:
        running = tasks.create_task(
            system.generate(strategy=pb.STRATEGY_DISTRIBUTED, request_id="good", seconds=300)
        )
        await asyncio.sleep(0.1)
        for it in models[:6]:
            tasks.create_task(it.end())
        answer = await running
    assert answer.token_ids == continuation(PROMPT, 24)


@virtually
async def test_targets_that_end_at_one_place_after_the_other_end_nothing():
    places = iter(range(LENGTH + 2, LENGTH + 24, 3))
    following = next(places)

    def further_each_time(request_id, length):
        nonlocal following
        if request_id == "good" and length >= following:
            following = next(places, 10**6)
            return True
        return False

    models = mortal("target", 3, further_each_time)
    async with virtual_system(*drafters(1), *models) as system:
        answer = await system.generate(
            strategy=pb.STRATEGY_SPECULATIVE, request_id="good", lookahead=1, seconds=300
        )
    assert answer.token_ids == continuation(PROMPT, 24)
    assert sum(it.end_count for it in models) > 5


@virtually
async def test_connections_that_break_and_come_back_end_nothing():
    left = iter(range(6))
    models = mortal("target", 2, lambda name, _: name == "good" and next(left, None) is not None)
    for it in models:
        it.same = True
    async with virtual_system(*drafters(1), *models) as system:
        answer = await system.generate(
            strategy=pb.STRATEGY_AUTOREGRESSIVE, request_id="good", seconds=300
        )
    assert answer.token_ids == continuation(PROMPT, 24)
    assert sum(it.end_count for it in models) == 6


@virtually
async def test_targets_that_say_that_they_end_are_not_counted():
    left = iter(range(5))
    models = mortal("target", 1, lambda name, _: name == "good" and next(left, None) is not None)
    for it in models:
        it.says_so, it.latency_seconds = True, 2.0
    async with virtual_system(*drafters(1), *models) as system:
        answer = await system.generate(
            strategy=pb.STRATEGY_AUTOREGRESSIVE, request_id="good", seconds=300
        )
    assert answer.token_ids == continuation(PROMPT, 24)
    assert sum(it.end_count for it in models) == 5


# --- and is resumed ----------------------------------------------------------------------------


async def resume(system, *, until, **request):
    """Send a request again and again, as a client that resumes does; return what it ends with."""
    stream, ends = Stream(), now() + until
    while now() < ends:
        again = dict(request)
        if stream.started is not None:
            again["seed"] = stream.started.seed
            again["resume_token_ids"] = stream.token_ids
        try:
            return await system.generate(into=stream, seconds=300, **again)
        except (errors.NoTargetError, errors.DeadlineError):
            await asyncio.sleep(1)
        except errors.InternalError as error:
            return error
    return None


@pytest.mark.parametrize("at", [0, 5])
@pytest.mark.parametrize("target_count", [1, 2])
@virtually
async def test_a_request_whose_targets_restart_slowly_is_ended_after_three_though_it_is_resumed(
    target_count, at
):
    """It ends each time because its targets are away, before three of them are known to end."""

    def ends(request_id, length):
        return request_id == "bad" and length >= LENGTH + at

    models = mortal("target", target_count, ends, restart_seconds=60)
    async with virtual_system(*models) as system:
        error = await resume(system, until=1000, request_id="bad")
        assert isinstance(error, errors.InternalError)
        assert sum(it.end_count for it in models) == 3
        await asyncio.sleep(70)
        for _ in range(2):
            began = now()
            with pytest.raises(errors.InternalError, match=r"targets ended, .* at this request"):
                await system.generate(request_id="bad")
            assert now() == began, "who sends it again hears it at once"
        other = await system.generate(request_id="good", client="10.0.0.2")
        assert other.token_ids == continuation(PROMPT, 24)


@virtually
async def test_a_request_that_is_sent_many_times_at_once_loses_a_target_once():
    left = iter(range(1))
    models = mortal("target", 1, lambda *_: next(left, None) is not None, restart_seconds=60)
    async with virtual_system(*models) as system:
        for _ in range(2):
            answers = await asyncio.gather(
                *(system.generate(client="10.0.0.1") for _ in range(5)), return_exceptions=True
            )
            assert all(isinstance(it, errors.NoTargetError) for it in answers)
        await asyncio.sleep(60)
        assert (await system.generate()).token_ids == continuation(PROMPT, 24)


@virtually
async def test_what_was_lost_is_forgotten_once_the_resumed_request_has_got_past_it():
    broken = iter([True, False] * 4)

    def ends(request_id, _length):
        return request_id == "unlucky" and next(broken, False)

    models = mortal("target", 1, ends, restart_seconds=60)
    async with virtual_system(*models) as system:
        for _ in range(4):
            answer = await resume(system, until=200, request_id="unlucky", max_tokens=1)
            assert answer.token_ids == continuation(PROMPT, 1)
    assert sum(it.end_count for it in models) == 4


def test_losses_are_forgotten_in_time_and_the_oldest_where_there_are_too_many():
    def loss(seconds_ago):
        at = time.monotonic() - seconds_ago
        return Loss(None, "it", asked_at=at, noticed_at=at, reach=1)

    past = PastLosses()
    for index in range(2000):
        past.leave(str(index), [loss(0)])
    assert [bool(past.take(str(index))) for index in (0, 1, 1998)] == [False, False, True]
    past.leave("old", [loss(3700)])
    assert not past.take("old")
    past.leave("going on", [loss(3700), loss(3500)])
    assert len(past.take("going on")) == 2


def test_a_request_is_the_same_however_it_is_resumed_and_another_one_is_not():
    asked = pb.GenerateRequest(text="a", sampling={"temperature": 1.0}, include_prompt=True)
    again = pb.GenerateRequest(
        text="a", sampling={"temperature": 1.0}, seed=7, resume_token_ids=[1], request_id="it"
    )
    key = request_key(asked, share="1")
    assert request_key(again, share="1") == key
    assert request_key(again, share="2") != key
    assert request_key(pb.GenerateRequest(text="b"), share="1") != key
    assert asked.include_prompt, "it is not changed"


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
@virtually
async def test_a_request_that_ends_drafters_goes_on_without_them(strategy):
    models = mortal("drafter", 5, at_the_bad_request)
    good = mortal("target", 2, lambda *_: False)
    async with virtual_system(*models, *good) as system:
        answer = await system.generate(strategy=strategy, request_id="bad", seconds=300)
        assert answer.token_ids == continuation(PROMPT, 24)
        assert sum(it.end_count for it in models) <= 2
