"""Running requests follow the load: with the planner's word, at once where servers fill up, and
later where they empty; and nothing of them is lost, or left behind."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from paceline.v1 import orchestrator_service_pb2 as pb
from paceline_orchestrator.decoding.slots import Slots
from paceline_orchestrator.decoding.statistics import Fallback, TextStatistics
from paceline_orchestrator.decoding.text_drafter import TextDrafter
from paceline_orchestrator.fleet.discovery import Role
from paceline_orchestrator.front.pacing import Pacing
from paceline_orchestrator.planning.planner import Planner, Wish
from paceline_protocol.draft_shape import Shape
from paceline_protocol.draft_statistics import DraftStatistics
from paceline_protocol.methods import Strategy
from support.fake_text import continuation
from support.orchestrating import PROMPT
from support.virtual_servers import drafters, targets
from support.virtual_system import Stream, now, virtual_system
from support.virtual_time import virtually

PLAIN, SI, DSI = Strategy.AUTOREGRESSIVE, Strategy.SPECULATIVE, Strategy.DISTRIBUTED


class _ByCount(Planner):
    """Takes one method up to so many requests, and plain decoding with more."""

    def __init__(self, alone=SI, *, most=1):
        super().__init__()
        self._alone, self._most = alone, most

    def choose(self, measurements, wish=None):
        if wish.strategy is None:
            crowded = measurements.request_count > self._most
            wish = replace(wish, strategy=PLAIN if crowded else self._alone)
        return super().choose(measurements, wish)


def system_by_count():
    """A system that decodes one request by SI, and more plainly."""
    return virtual_system(*models(), planner=_ByCount())


class _Requests:
    """Asks a system for texts, and keeps what came and when."""

    def __init__(self, system):
        self.system = system
        self._tasks = asyncio.TaskGroup()
        self._reading = {}

    async def __aenter__(self):
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *failure):
        await self._tasks.__aexit__(*failure)
        await self.system.settle()
        assert self.system.leftovers() == []

    def ask(self, count, **request):
        """Ask for so many tokens, and return the stream that they come in."""
        stream = Stream()

        async def read():
            await self.system.generate(max_tokens=count, into=stream, **request)
            resumed = [*request.get("resume_token_ids", ())]
            assert resumed + stream.token_ids == continuation(PROMPT, count)

        self._reading[id(stream)] = self._tasks.create_task(read(), name="a client")
        return stream

    async def end_of(self, stream):
        await self._reading[id(stream)]

    def calls(self, *methods, since):
        return [it for it in self.system.records(*methods) if it.sent_at >= since]


def changes(stream):
    """Count how often the way of decoding has changed."""
    told = {it.kind: it.count for it in stream.finished.statistics.fallbacks}
    return told.pop(pb.FALLBACK_KIND_LOAD_CHANGED, 0)


def models(target_count=1):
    return [*drafters(1), *targets(target_count, row_seconds=0.001)]


@virtually
async def test_who_drafts_decodes_plainly_as_soon_as_others_crowd_the_target():
    async with system_by_count() as system, _Requests(system) as requests:
        first = requests.ask(100)
        await asyncio.sleep(0.5)
        assert first.started.strategy == pb.STRATEGY_SPECULATIVE
        second = requests.ask(100)
        await asyncio.sleep(0.2)  # a round is over, and sessions are closed
        crowded = now()
        await asyncio.sleep(0.5)
        assert requests.calls("Draft", "Verify", since=crowded) == []
        assert second.started.strategy == pb.STRATEGY_AUTOREGRESSIVE
        assert system.server("drafter-0").session_count == 0, "its room is for others"
    assert changes(first) == 1
    assert first.started.strategy == pb.STRATEGY_SPECULATIVE, "as it began"


@virtually
async def test_who_is_left_drafts_again_and_who_began_plainly_does_then(monkeypatch):
    plans = []

    def learnt(drafts, *, plan, **_):
        plans.append((drafts.accepted > 0, plan.strategy))

    async with system_by_count() as system, _Requests(system) as requests:
        first = requests.ask(400)
        await asyncio.sleep(0.1)
        requests.ask(10)
        last = requests.ask(500)
        monkeypatch.setattr(system.planning.experience, "learn", learnt)
        await asyncio.sleep(1.5)
        drafted = requests.calls("Draft", since=now() - 0.5)
        assert drafted == [], "two are too many"
        await requests.end_of(first)
        await asyncio.sleep(1.5)
        assert requests.calls("Draft", since=first.ended)
    assert last.started.strategy == pb.STRATEGY_AUTOREGRESSIVE
    assert changes(last) == 1
    assert plans[-1] == (True, SI), "learnt by the plan that drafted"
    assert last.started.lookahead == 0
    assert last.finished.lookahead > 0, "as it ended"
    assert last.finished.statistics.accepted_token_count > 0


class _Shaped(_ByCount):
    """Has drafts be as wide as it is told."""

    width = 1

    def choose(self, measurements, wish=None):
        plan = super().choose(measurements, wish)
        return replace(plan, shape=Shape(self.width)) if plan.method.drafts else plan


@pytest.mark.parametrize(("first", "last"), [(3, 2), (2, 3)])
@virtually
async def test_draft_tokens_are_learnt_as_far_as_all_drafts_were_wide(first, last, monkeypatch):
    widths = []

    def learnt(_drafts, *, plan, **_):
        widths.append(plan.shape.width)

    planner = _Shaped()
    async with virtual_system(*models(), planner=planner) as system, _Requests(system) as requests:
        monkeypatch.setattr(system.planning.experience, "learn", learnt)
        planner.width = first
        stream = requests.ask(400)
        await asyncio.sleep(0.5)
        planner.width = last
        requests.ask(10)
    assert changes(stream) == 2
    assert widths[-1] == 2


@virtually
async def test_a_request_alone_does_not_take_itself_for_company():
    async with system_by_count() as system, _Requests(system) as requests:
        alone = requests.ask(400)
    assert changes(alone) == 0
    assert requests.calls("Decode", since=0.0) == []


@virtually
async def test_dsi_gives_its_other_targets_back():
    async with (
        virtual_system(*models(3), planner=_ByCount(DSI, most=3)) as system,
        _Requests(system) as requests,
    ):
        first = requests.ask(300)
        await asyncio.sleep(0.3)
        assert first.started.target_count > 1
        for _ in range(3):
            requests.ask(100)
        await asyncio.sleep(0.3)
        assert sum(system.server(f"target-{it}").session_count for it in range(3)) == 4
        limits = [it.verifier_limit() for it in system.servicer._demand._streams.values()]
        assert limits == [1] * 4, "nor does the autoscaler keep targets for it"
    assert changes(first) >= 1


@virtually
async def test_what_a_change_withdraws_counts_as_no_rejection():
    perfect = drafters(1, agrees=lambda _: True)
    async with (
        virtual_system(*perfect, *models(3)[1:], planner=_ByCount(DSI)) as system,
        _Requests(system) as requests,
    ):
        stream = requests.ask(300)
        await asyncio.sleep(0.3)
        requests.ask(100)
        await requests.end_of(stream)
        ends = {it.end for it in requests.calls("Draft", "Verify", since=0.0)}
    assert changes(stream) >= 1
    assert ends - {"answered"}, "something was withdrawn"
    assert stream.finished.statistics.cancelled_rpc_count == 0


@virtually
async def test_a_load_that_goes_up_and_down_changes_it_less_and_less_often():
    async with system_by_count() as system, _Requests(system) as requests:
        stream = requests.ask(900)
        while stream.finished is None:
            requests.ask(3)
            await asyncio.sleep(1.1)
        took = stream.ended - stream.began
    # At the start, and then after 1, 2, 4 and 8 seconds at the earliest.
    assert 10 < took < 25
    assert 3 <= changes(stream) <= 5


@virtually
async def test_a_change_that_is_taken_back_in_time_does_not_begin_the_same_method_anew():
    async with system_by_count() as system, _Requests(system) as requests:
        first = requests.ask(10)
        stream = requests.ask(400)
        await requests.end_of(first)
        system.models[0].link.hold("OpenSession")
        await asyncio.sleep(1.5)
        generation = next(iter(system.servicer._pacing._paces))
        assert generation.drafts, "as soon as the drafter is there"
        requests.ask(120)
        await asyncio.sleep(2.5)
        assert not generation.drafts
        assert {it.end for it in requests.calls("Decode", since=0.0)} == {"answered", ""}
        system.models[0].link.release()
        await asyncio.sleep(0.2)
        assert system.server("drafter-0").session_count == 0, "its room is for others"
        assert Fallback.LOAD_CHANGED not in generation.statistics().fallbacks
    assert stream.finished is not None


@virtually
async def test_what_is_taken_back_before_a_request_has_a_server_is_not_how_it_begins():
    async with system_by_count() as system, _Requests(system) as requests:
        system.models[1].link.hold("OpenSession")
        stream = requests.ask(20)
        await asyncio.sleep(0.2)
        generation = next(iter(system.servicer._pacing._paces))
        planned = generation.order.plan
        assert generation.follow(replace(planned, strategy=PLAIN))
        assert generation.follow(planned)
        system.models[1].link.release()
    assert changes(stream) == 0
    assert requests.calls("Decode", since=0.0) == []


@virtually
async def test_the_text_takes_no_prompt_in_for_who_is_about_to_decode_plainly(monkeypatch):
    read = []

    async def read_prompt(drafter):
        read.append(drafter)

    monkeypatch.setattr(TextDrafter, "read_prompt", read_prompt)
    async with system_by_count() as system, _Requests(system) as requests:
        stream = requests.ask(60)
        await asyncio.sleep(0.3)
        requests.ask(60)
    assert changes(stream) == 1
    assert read == []


class _Running:
    """A generation, to those that pace it."""

    def __init__(self, wish, *, model="model", target=0, rate=0.7, limit=99):
        self.order = SimpleNamespace(
            follows_load=True,
            may_leave_guesses=False,
            limit_length=limit,
            model=SimpleNamespace(fingerprint=model, measured_by=target),
            options=SimpleNamespace(wish=wish),
            plan=SimpleNamespace(is_crowded=False, hit_rates=(rate,)),
        )
        self.drafts, self.length, self.followed = True, 9, []
        self.verdicts, self.text_verdicts = DraftStatistics(), TextStatistics()
        self.has_outgrown_drafters = False

    def follow(self, plan):
        self.followed.append(plan.name)
        return False

    def pace(self, plan):
        self.followed.append(plan.name)

    def when_judged(self, reconsider):
        self.judged = reconsider


class _Planning:
    """Says the same each time; or, for a rate, whether drafting pays.

    Attributes:
        asked: The wishes and rates that it was asked for.
    """

    def __init__(self, *, drafts=lambda _: True, plans=None, is_crowded=False):
        self._drafts, self._plans, self._is_crowded = drafts, plans, is_crowded
        self.asked = []

    def plan_again(self, wish, *_, acceptance_rate, **__):
        self.asked.append((wish, acceptance_rate))
        if self._plans is not None:
            return next(self._plans)
        drafts = self._drafts(acceptance_rate)
        return a_plan(f"for {acceptance_rate}", drafts=drafts, is_crowded=self._is_crowded)

    def context_lengths(self):
        return [50, 100]

    def trial_tokens(self, _model, *, length):
        return length


def a_plan(name, *, drafts=True, is_crowded=False):
    method = SimpleNamespace(drafts=drafts)
    return SimpleNamespace(name=name, method=method, is_crowded=is_crowded)


@virtually
async def test_a_plan_is_for_those_that_wish_the_same_and_each_has_its_turn():
    plans = iter([a_plan("the first's"), None, a_plan("the third's"), a_plan("the fourth's")])
    planning = _Planning(plans=plans)
    pacing = Pacing(planning)
    one, other = _Running(Wish()), _Running(Wish(lookahead=7))
    with pacing.following(one), pacing.following(other):
        await asyncio.sleep(4.5)
    assert [wish for wish, _ in planning.asked] == [Wish(), Wish(lookahead=7)] * 2
    assert one.followed == ["the first's", "the third's"]
    assert other.followed == ["the fourth's"], "its plan before was none"


@virtually
async def test_a_plan_is_for_those_of_the_same_model_whichever_target_described_it():
    pacing = Pacing(_Planning())
    one, like_it = _Running(Wish()), _Running(Wish(), target=1)
    other = _Running(Wish(), model="another")
    with pacing.following(one), pacing.following(like_it), pacing.following(other):
        await asyncio.sleep(1.5)
    assert (one.followed, like_it.followed) == (["for 0.7"], ["for 0.7"])
    assert other.followed == []


@pytest.mark.parametrize(
    ("drafts", "followers"),
    [
        pytest.param(lambda _: True, {0.5, 0.9}, id="drafting pays for those that are as good"),
        pytest.param(lambda rate: rate > 0.6, {0.2, 0.5}, id="it does not for those that are not"),
        pytest.param(lambda _: False, {0.2, 0.5, 0.9}, id="it does for nobody"),
    ],
)
@virtually
async def test_a_plan_is_for_those_whose_drafts_are_right_as_often_as_it_takes(drafts, followers):
    pacing = Pacing(_Planning(drafts=drafts))
    first, worse, better = (_Running(Wish(), rate=rate) for rate in (0.5, 0.2, 0.9))
    with pacing.following(first), pacing.following(worse), pacing.following(better):
        await asyncio.sleep(1.5)
    rates = {0.5: first, 0.2: worse, 0.9: better}
    assert {rate for rate, it in rates.items() if it.followed == ["for 0.5"]} == followers
    assert sum(len(it.followed) for it in rates.values()) == len(followers)


@pytest.mark.parametrize(
    ("is_crowded", "rate", "goes_on"),
    [
        pytest.param(True, 0.45, True, id="in a crowd a step from what pays"),
        pytest.param(True, 0.35, False, id="in a crowd two steps from it"),
        pytest.param(False, 0.45, False, id="not in a crowd"),
    ],
)
@virtually
async def test_in_a_crowd_a_request_drafts_on_where_that_nearly_pays(is_crowded, rate, goes_on):
    planning = _Planning(drafts=lambda rate: rate >= 0.5, is_crowded=is_crowded)
    for_its_load, for_its_verdict = _Running(Wish(), rate=rate), _Running(Wish(), rate=rate)
    with Pacing(planning).following(for_its_load):
        await asyncio.sleep(1.5)
    with Pacing(planning).following(for_its_verdict):
        for_its_verdict.verdicts = DraftStatistics(accepted=1, rejected=1)
        for_its_verdict.judged()
    assert (for_its_load.followed == []) is goes_on
    assert (for_its_verdict.followed == []) is goes_on


@virtually
async def test_a_plan_is_for_those_for_which_the_same_targets_have_room():
    planning = _Planning()
    pacing = Pacing(planning)
    one, like_it, longer = (_Running(Wish(), limit=limit) for limit in (51, 100, 101))
    with pacing.following(one), pacing.following(like_it), pacing.following(longer):
        await asyncio.sleep(1.5)
    assert (one.followed, like_it.followed, longer.followed) == (["for 0.7"], ["for 0.7"], [])


@virtually
async def test_a_plan_of_requests_that_have_ended_is_none_for_the_next_one():
    planning = _Planning()
    pacing = Pacing(planning)
    for _ in range(2):
        running = _Running(Wish())
        with pacing.following(running):
            running.verdicts = DraftStatistics(accepted=2)
            running.judged()
    assert [rate for _, rate in planning.asked] == [0.8, 0.8]


def test_the_primary_target_is_not_among_the_slots_that_go():
    primary, secondary, coming = object(), object(), object()
    slots = Slots(Role.TARGET, [None, primary, secondary, None], {3: coming})
    assert slots.resize(3) == []
    assert slots.empty == [], "who is there matters more than a slot that nobody has"
    assert set(slots.resize(1)) == {secondary, coming}
    assert (slots.taken, slots.empty, slots.count) == ((1,), [], 1)
    assert slots.resize(3) == []
    assert (slots.taken, slots.empty, slots.count) == ((1,), [2, 3], 3), "behind the primary target"
    assert slots.resize(6) == []
    assert (slots.empty, slots.count) == ([0, 2, 3, 4, 5], 6)
    assert slots.resize(0) == [primary]
    assert (slots.taken, slots.empty, slots.count) == ((), [], 0)


@virtually
async def test_who_has_lost_a_target_stays_with_the_one_that_has_its_text():
    async with (
        virtual_system(*models(3), planner=_ByCount(DSI, most=2)) as system,
        _Requests(system) as requests,
    ):
        stream = requests.ask(300)
        await asyncio.sleep(0.3)
        await system.models[1].kill()
        await asyncio.sleep(0.3)
        for _ in range(3):
            requests.ask(60)
        await asyncio.sleep(0.3)
        assert sum(it.session_count for it in system.pool.servers) == 4, "one each, and no drafter"
    assert changes(stream) >= 1


@virtually
async def test_a_drafter_that_is_lost_meanwhile_changes_nothing_of_the_text():
    async with system_by_count() as system, _Requests(system) as requests:
        stream = requests.ask(600)
        await asyncio.sleep(0.2)
        requests.ask(100)
        await asyncio.sleep(0.2)
        drafter = system.models[0]
        await drafter.kill()
        await asyncio.sleep(6)
        await drafter.start()
    assert stream.finished is not None


@virtually
async def test_what_was_resumed_and_what_tokens_carry_goes_on_with_the_next_method():
    async with system_by_count() as system, _Requests(system) as requests:
        resumed = continuation(PROMPT, 7)
        stream = requests.ask(107, resume_token_ids=resumed, logprobs=True, top_logprobs=2)
        await asyncio.sleep(0.3)
        requests.ask(100)
    assert changes(stream) == 1
    logprobs = [logprob for chunk in stream.chunks for logprob in chunk.logprobs]
    likeliest = [told for chunk in stream.chunks for told in chunk.top_logprobs]
    assert len(logprobs) == len(likeliest) == len(stream.token_ids) == 100
    assert all(told.logprobs[0] >= told.logprobs[1] for told in likeliest)
