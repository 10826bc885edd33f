"""Plans follow what the servers are doing now, for this orchestrator's requests and for others'."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from types import SimpleNamespace
from weakref import WeakKeyDictionary

import pytest

from paceline.errors import NoTargetError, UnsupportedError
from paceline_contract.calls import CallTiming, Hardware, VerificationRule
from paceline_contract.limits import MOST_TARGETS
from paceline_orchestrator.fleet.latency import ObservedLatency
from paceline_orchestrator.planning.hit_rates import Pair
from paceline_orchestrator.planning.planner import Plan, Planner, Wish
from paceline_orchestrator.planning.request_planner import RequestPlanner
from paceline_orchestrator.planning.simulated_shapes import SimulatedShapes
from paceline_orchestrator.planning.target_scaling import TargetScaling
from paceline_protocol.draft_shape import CHAIN, Shape
from paceline_protocol.draft_statistics import DraftStatistics
from paceline_protocol.methods import METHODS, Strategy
from paceline_protocol.task import DispatchPolicy
from support.waiting import until

MS = 1_000_000


MODEL = SimpleNamespace(fingerprint="target", tree_token_limit=64, lora="", self_draft_depth=0)


def a_server(
    step_ms,
    *,
    primaries=0,
    sessions=0,
    calls_ahead=0.0,
    beside=0,
    row_ms=None,
    self_draft_depth=0,
    tree_tokens=0,
    fingerprint="drafter",
    hardware=None,
    cancels=True,
):
    """A server with so many of our requests, whose queue holds so many calls.

    With a price for rows it shares forwards, and so many calls were beside one of ours.
    """
    latency = ObservedLatency(clock=lambda: 0.0)
    table = [(1, step_ms * MS)]
    if row_ms is not None:
        table.append((11, round((step_ms + 10 * row_ms) * MS)))
    latency.adopt(
        tuple(table),
        prefill_fixed_ns=step_ms * MS,
        prefill_ns_per_token=0,
        shares_forwards=row_ms is not None,
    )
    shared = {"shared_row_count": 1 + beside, "shared_call_count": 1 + beside}
    for _ in range(80 if beside else 0):
        forward_ns = round((step_ms + beside * (row_ms or 0)) * MS)
        met = CallTiming(0, forward_ns, forward_count=1, row_count=1, **shared)
        latency.observe(met, elapsed_ns=forward_ns + MS)
    queue_ns = round(calls_ahead * step_ms * MS)
    for _ in range(80 if calls_ahead else 0):
        timing = CallTiming(
            queue_ns=queue_ns, forward_ns=step_ms * MS, forward_count=1, row_count=1
        )
        latency.observe(timing, elapsed_ns=queue_ns + (step_ms + 1) * MS)
    return SimpleNamespace(
        latency=latency,
        primary_count=primaries,
        session_count=sessions,
        hardware=hardware,
        facts=SimpleNamespace(
            self_draft_depth=self_draft_depth,
            tree_token_limit=tree_tokens,
            tree_depth_limit=tree_tokens,
            context_length=4096,
            fingerprint=fingerprint,
            with_lora={"law": SimpleNamespace(fingerprint="drafter with law")}.get,
            cancels_forwards=cancels,
        ),
    )


SHAPES = WeakKeyDictionary()
"""The trees that a planning simulates."""


def a_planning(targets, *, drafter=None, **options):
    drafter = drafter or a_server(3)
    pool = SimpleNamespace(
        targets=lambda _: targets,
        drafters=lambda _: [drafter],
        with_those_away=lambda model: model,
    )
    shapes = SimulatedShapes()
    planning = RequestPlanner(pool, **{"planner": Planner(shapes=shapes)} | options)
    SHAPES[planning] = shapes
    return planning


class Watched(Planner):
    """A planner that keeps the measurements of its last request."""

    measured = None

    def choose(self, measurements, wish=None):
        self.measured = measurements
        return super().choose(measurements, wish)


def measured(targets, *, prompt_length=5, drafter=None):
    """What a request's plan is made of."""
    planner = Watched()
    a_planning(targets, planner=planner, drafter=drafter).plan(
        Wish(), MODEL, prompt_length=prompt_length
    )
    return planner.measured


def dispatch_ns(planning, planner):
    """What a verification costs this process, as far as is known."""
    planning.plan(Wish(), MODEL, prompt_length=5)
    return planner.measured.dispatch_ns


def refining():
    """The task that refines the plan, if there is one."""
    return next((it for it in asyncio.all_tasks() if it.get_name() == "refine the plan"), None)


def a_plan(planning, **wish):
    """Plan a request, and begin it."""
    wish = Wish(**wish)
    plan = planning.plan(wish, MODEL, prompt_length=5)
    planning.begin(plan, wish, model=MODEL)
    return plan


def took(
    *,
    forwards=0,
    cancelled=0,
    accepted=0,
    rejected=0,
    strategy=Strategy.DISTRIBUTED,
    width=1,
    ranks=(),
    drafter="drafter",
):
    """What became of a request, as `Experience.learn` takes it."""
    drafts = DraftStatistics(
        drafted=accepted + rejected,
        accepted=accepted,
        rejected=rejected,
        own=forwards,
        ranks=Counter(dict(ranks)),
    )
    plan = SimpleNamespace(
        method=METHODS[strategy], shape=Shape(width), pair=Pair(MODEL.fingerprint, drafter)
    )
    return {"drafts": drafts, "plan": plan, "verification_count": forwards + cancelled}


def test_a_request_alone_uses_the_targets_it_needs():
    plan = a_plan(a_planning([a_server(30) for _ in range(7)]))
    assert plan.strategy is Strategy.DISTRIBUTED
    assert 1 < plan.target_count <= 7


def test_a_plan_knows_which_servers_run_withdrawn_forwards_to_their_end():
    stops, runs_on = a_server(30), a_server(30, cancels=False)
    found = measured([stops, runs_on], drafter=a_server(3))
    assert (found.targets_run_on, found.drafter_runs_on) == (True, False)
    found = measured([stops, stops], drafter=a_server(3, cancels=False))
    assert (found.targets_run_on, found.drafter_runs_on) == (False, True)


def test_a_request_uses_no_more_targets_than_compute_side_by_side():
    cores = Hardware("four cores", 0.25)
    targets = [a_server(30, hardware=cores) for _ in range(7)]
    plan = a_plan(a_planning(targets, drafter=a_server(3, hardware=cores)))
    assert (plan.strategy, plan.target_count) == (Strategy.DISTRIBUTED, 3)
    apart = a_plan(a_planning(targets, drafter=a_server(3, hardware=Hardware("gpu", 1.0))))
    assert (apart.strategy, apart.target_count) == (Strategy.DISTRIBUTED, 4)


def test_sessions_at_secondary_targets_keep_no_target_from_being_used():
    plan = a_plan(a_planning([a_server(30, sessions=1) for _ in range(7)]))
    assert plan.strategy is Strategy.DISTRIBUTED


@pytest.mark.parametrize("primaries", [1, 2, 9])
def test_where_every_target_is_a_primary_a_request_is_decoded_with_one(primaries):
    plan = a_plan(
        a_planning(
            [a_server(30, primaries=primaries) for _ in range(7)],
            drafter=a_server(3, sessions=7 * primaries),
        )
    )
    assert plan.strategy is Strategy.SPECULATIVE
    assert plan.target_count == 1
    assert (
        f"{7 * primaries + 1} requests on 7 target(s), {7 * primaries + 1} at the drafter"
        in plan.note
    )


def test_the_queues_tell_of_other_orchestrators_requests():
    plan = a_plan(a_planning([a_server(30, calls_ahead=2) for _ in range(3)]))
    assert plan.strategy is Strategy.SPECULATIVE
    assert "6 requests on 3 target(s), 1 at the drafter" in plan.note


def test_the_calls_in_a_forward_tell_of_other_orchestrators_requests():
    """They do not wait, so no queue would tell."""
    targets = [a_server(30, beside=16, row_ms=0.1) for _ in range(4)]
    plan = a_plan(a_planning(targets, drafter=a_server(3, beside=60, row_ms=0.01)))
    assert plan.strategy is Strategy.SPECULATIVE
    assert "63 requests on 4 target(s), 61 at the drafter" in plan.note
    dear = [a_server(30, beside=16, row_ms=20) for _ in range(4)]
    plan = a_plan(a_planning(dear, drafter=a_server(3, beside=60, row_ms=0.01)))
    assert plan.strategy is Strategy.AUTOREGRESSIVE


def test_a_target_that_computes_a_request_of_ours_beside_others_is_no_slower_alone():
    busy = [a_server(30, beside=16, row_ms=1) for _ in range(2)]
    assert measured(busy).target_step_ns == 30 * MS


def test_a_drafter_that_others_fill_is_left_to_them():
    targets = [a_server(30, calls_ahead=2) for _ in range(3)]
    plan = a_plan(a_planning(targets, drafter=a_server(25, calls_ahead=12)))
    assert plan.strategy is Strategy.AUTOREGRESSIVE
    assert "6 requests on 3 target(s), 13 at the drafter" in plan.note


def test_a_wait_for_a_worthless_forward_is_no_other_request():
    plan = a_plan(a_planning([a_server(30, calls_ahead=0.45) for _ in range(7)]))
    assert "requests" not in plan.note


def test_what_a_request_asks_for_is_not_explained():
    plan = a_plan(a_planning([a_server(30)]), strategy=Strategy.SPECULATIVE, lookahead=3)
    assert (plan.strategy, plan.lookahead, plan.note) == (Strategy.SPECULATIVE, 3, "")


def test_draft_tokens_that_arrive_late_are_worth_as_little_as_slow_ones():
    late = a_server(3)
    for _ in range(80):
        timing = CallTiming(forward_ns=3 * MS, forward_count=1, row_count=1)
        late.latency.observe(timing, elapsed_ns=43 * MS, is_first=False)
    targets = [a_server(30) for _ in range(7)]
    assert a_plan(a_planning(targets)).strategy is Strategy.DISTRIBUTED
    assert a_plan(a_planning(targets, drafter=late)).strategy is Strategy.AUTOREGRESSIVE


def test_the_way_to_a_target_is_what_was_measured():
    far, near = a_server(30), a_server(30)
    timing = CallTiming(forward_ns=30 * MS, forward_count=1, row_count=1)
    far.latency.observe(timing, elapsed_ns=80 * MS)
    near.latency.observe(timing, elapsed_ns=31 * MS)
    asked = {"strategy": Strategy.SPECULATIVE, "lookahead": 1}
    plans = [a_plan(a_planning([each]), **asked) for each in (far, near)]
    assert plans[0].token_ns > plans[1].token_ns + 20 * MS
    # A target that decodes by itself is called once for many tokens.
    assert plans[0].plain_token_ns == plans[1].plain_token_ns == 30 * MS


@pytest.mark.parametrize("prompt_length", [5, 500])
def test_the_planner_hears_how_long_a_prompt_takes(prompt_length):
    targets = [a_server(30) for _ in range(7)]
    for target in targets:
        target.latency.adopt(((1, 30 * MS),), prefill_fixed_ns=0, prefill_ns_per_token=MS)
    first_ns = measured(targets, prompt_length=prompt_length).target_first_ns
    assert first_ns == max(30, prompt_length) * MS


def test_what_drafts_were_worth_long_ago_is_forgotten():
    planning = a_planning([a_server(30)])
    planning.experience.learn(**took(accepted=10_000))
    for _ in range(20):
        planning.experience.learn(**took(rejected=1000))
    assert a_plan(planning).hit_rates[0] < 0.05


@pytest.mark.parametrize(("target_count", "lookahead"), [(1, 4), (2, 4), (3, 4), (5, 2), (10, 1)])
def test_more_targets_take_shorter_blocks_and_never_longer_ones_than_planned(
    target_count, lookahead
):
    times = {"target_ns": 100, "drafter_ns": 10}
    assert TargetScaling(4, is_fixed=False).lookahead_with(target_count, **times) == lookahead
    assert TargetScaling(4, is_fixed=True).lookahead_with(target_count, **times) == 4


def test_where_the_text_drafts_too_growth_goes_two_targets_further_and_keeps_its_room():
    times = {"target_ns": 50, "drafter_ns": 30}
    alone, extended = (TargetScaling(4, is_fixed=False, has_text=it) for it in (False, True))
    assert (alone.target_limit(50, 30), extended.target_limit(50, 30)) == (2, 4)
    assert (alone.lookahead_with(2, **times), extended.lookahead_with(2, **times)) == (1, 2)
    assert TargetScaling(1, is_fixed=True, has_text=True).lookahead_with(4, **times) == 1


def test_a_verification_costs_the_cpu_time_of_requests_over_their_verifications():
    clock = SimpleNamespace(ns=0)
    planning = a_planning([a_server(30) for _ in range(7)], cpu_clock=lambda: clock.ns)
    clock.ns += 3_600_000 * MS  # at rest: not counted
    for _ in range(40):
        a_plan(planning)
        clock.ns += 100 * 5 * MS
        planning.experience.learn(**took(forwards=70, cancelled=30, accepted=70, rejected=30))
    note = a_plan(planning).note
    assert "DSI from lookahead 4 on, at 5.0 ms of CPU for a verification" in note


def test_clients_that_leave_before_a_verdict_do_not_make_dispatching_dearer():
    clock = SimpleNamespace(ns=0)
    targets, planner = [a_server(30, primaries=1) for _ in range(7)], Watched()
    planning = a_planning(targets, planner=planner, cpu_clock=lambda: clock.ns)
    known = dispatch_ns(planning, planner)
    for _ in range(1000):
        a_plan(planning)
        clock.ns += 4 * MS
        planning.experience.learn(**took(forwards=0))
    assert dispatch_ns(planning, planner) == known
    planning.experience.learn(**took(forwards=100))
    assert dispatch_ns(planning, planner) < known, "what they took is nobody else's"


def test_at_rest_nothing_is_dispatched_though_others_use_the_same_targets():
    clock = SimpleNamespace(ns=0)
    shared = [a_server(30, calls_ahead=1.5) for _ in range(7)]
    planner = Watched()
    planning = a_planning(shared, planner=planner, cpu_clock=lambda: clock.ns)
    for _ in range(40):
        clock.ns += 3_600_000 * MS
        a_plan(planning)
        planning.experience.learn(**took(forwards=70, cancelled=30))
    assert dispatch_ns(planning, planner) < MS


def test_a_request_whose_targets_were_lost_before_its_plan_may_come_again():
    with pytest.raises(NoTargetError) as failure:
        a_plan(a_planning([]))
    assert failure.value.retry_after_seconds


SELF = Strategy.SELF_SPECULATIVE


def a_self_drafting_planning(*, row_ms=0.1):
    return a_planning([a_server(30, row_ms=row_ms, self_draft_depth=4)], drafter=a_server(60))


def test_a_target_that_drafts_for_itself_is_believed_to_be_worth_something():
    assert a_plan(a_self_drafting_planning()).strategy is SELF
    assert a_plan(a_self_drafting_planning(row_ms=4)).strategy is Strategy.AUTOREGRESSIVE


def test_where_no_target_drafts_for_itself_nothing_is_said_of_it():
    plan = a_plan(a_planning([a_server(30, row_ms=0.1)]))
    assert plan.strategy is not SELF
    assert "self-SI" not in plan.note
    with pytest.raises(UnsupportedError, match="no target of this model"):
        a_plan(a_planning([a_server(30)]), strategy=SELF)


def test_what_a_target_guesses_is_not_judged_by_rejection_sampling():
    planning = a_self_drafting_planning()
    assert a_plan(planning, rule=VerificationRule.REJECTION).strategy is not SELF
    with pytest.raises(UnsupportedError, match="EXACT"):
        a_plan(planning, rule=VerificationRule.REJECTION, strategy=SELF)


def test_a_targets_own_guesses_say_nothing_of_the_drafter():
    planning = a_planning([a_server(30, self_draft_depth=4)])
    before = a_plan(planning).hit_rates[0]
    planning.experience.learn(**took(forwards=100, rejected=1000, strategy=SELF))
    assert a_plan(planning).hit_rates[0] == before


def a_tree_planning(*, row_ms=0, drafter_row_ms=0, target_count=1):
    """Targets and a drafter that know trees, and rows at this price."""
    targets = [a_server(30, row_ms=row_ms, tree_tokens=64) for _ in range(target_count)]
    return a_planning(targets, drafter=a_server(3, row_ms=drafter_row_ms, tree_tokens=64))


def simulated(planning, **wish):
    """A plan after its trees were simulated."""
    a_plan(planning, **wish)
    SHAPES[planning].simulate_missing()
    return a_plan(planning, **wish)


def test_a_request_begins_with_the_hit_rates_that_earlier_ones_of_its_pair_have_shown():
    planning = a_tree_planning()
    seen = {1: 600, 2: 350, 3: 10, 0: 40}
    planning.experience.learn(**took(accepted=600, rejected=400, width=3, ranks=seen))
    rates = a_plan(planning).hit_rates
    assert rates[:3] == pytest.approx((0.6, 0.35, 0.01), abs=0.02)
    assert rates[3] == pytest.approx(0.4 * 0.04, abs=0.01)  # what nobody asked for is assumed


def test_another_drafters_hit_rates_are_not_this_ones():
    planning = a_tree_planning()
    before = a_plan(planning).hit_rates
    seen = {1: 10, 0: 990}
    planning.experience.learn(
        **took(accepted=10, rejected=990, width=3, ranks=seen, drafter="another")
    )
    assert a_plan(planning).hit_rates == pytest.approx(before)


@pytest.mark.parametrize(
    ("target_count", "strategy"), [(1, Strategy.SPECULATIVE), (3, Strategy.DISTRIBUTED)]
)
def test_auto_uses_trees_once_simulation_says_that_they_pay(target_count, strategy):
    planning = a_tree_planning(target_count=target_count)
    before = a_plan(planning)
    assert before.shape == CHAIN
    plan = simulated(planning)
    assert plan.strategy is strategy
    assert plan.shape.width > 1
    assert plan.token_ns < before.token_ns / 1.05
    assert str(plan.shape) in plan.note


def test_auto_stays_with_chains_where_runners_up_are_never_right_but_doubts_it_in_time():
    planning = a_tree_planning()
    for _ in range(20):
        planning.experience.learn(
            **took(accepted=600, rejected=400, width=4, ranks={1: 600, 0: 400})
        )
    plan = simulated(planning)
    assert plan.shape == CHAIN
    assert a_plan(planning).hit_rates[1] > plan.hit_rates[1]
    asked = {"strategy": Strategy.DISTRIBUTED}
    assert a_plan(planning, **asked).hit_rates == a_plan(planning, **asked).hit_rates


def chosen(plan, *, tree_token_limit=64, **wish):
    """What becomes of a choice of the planner: the plan of a request."""
    planner = SimpleNamespace(choose=lambda *_: plan)
    model = SimpleNamespace(fingerprint="target", tree_token_limit=tree_token_limit, lora="")
    planning = a_planning([a_server(30)], planner=planner)
    return planning.plan(Wish(**wish), model, prompt_length=5)


def a_choice(strategy, **facts):
    times = {"token_ns": 1, "plain_token_ns": 2, "note": ""}
    prefill = {"broadcast_prefill": False, "keep_prefill": False}
    return Plan(strategy=strategy, lookahead=1, target_count=1, **times, **prefill, **facts)


def test_a_model_whose_servers_judge_no_trees_and_a_method_that_drafts_nothing_get_chains():
    wide = a_choice(Strategy.DISTRIBUTED, shape=Shape(3, 2))
    assert chosen(wide).shape == Shape(3, 2)
    assert chosen(wide, tree_token_limit=0).shape == CHAIN
    assert chosen(a_choice(Strategy.AUTOREGRESSIVE), shape=Shape(3, 2)).shape == CHAIN


@pytest.mark.parametrize(
    ("strategy", "shape", "ride"),
    [
        (Strategy.SPECULATIVE, CHAIN, True),
        (Strategy.SPECULATIVE, Shape(2, 0), False),
        (Strategy.DISTRIBUTED, Shape(2, 0), True),
    ],
)
def test_own_guesses_ride_along_where_nothing_comes_later_for_them(strategy, shape, ride):
    choice = a_choice(strategy, shape=shape, own_guesses=True)
    assert chosen(choice).own_guesses is ride
    assert not chosen(choice, dispatch=DispatchPolicy.BLOCKS).own_guesses


def test_a_request_could_use_more_targets_where_verifications_run_ahead():
    si = a_choice(Strategy.SPECULATIVE)
    assert chosen(si).target_limit == MOST_TARGETS, "the planner had too few for DSI"
    assert chosen(si, strategy=Strategy.SPECULATIVE).target_limit == 1
    assert chosen(si, target_count=3).target_limit == 3
    assert chosen(a_choice(Strategy.AUTOREGRESSIVE)).target_limit == 1


def test_to_plan_changes_nothing_until_a_request_begins():
    planning = a_tree_planning()
    for _ in range(20):
        planning.experience.learn(
            **took(accepted=600, rejected=400, width=4, ranks={1: 600, 0: 400})
        )
    wish = Wish()
    plan = planning.plan(wish, MODEL, prompt_length=5)
    assert planning.plan(wish, MODEL, prompt_length=5) == plan
    planning.begin(plan, wish, model=MODEL)
    assert planning.plan(wish, MODEL, prompt_length=5).hit_rates != plan.hit_rates


def test_only_a_request_that_leaves_its_method_open_gets_trees_unasked():
    planning = a_tree_planning()
    assert simulated(planning).shape != CHAIN
    assert simulated(planning, strategy=Strategy.DISTRIBUTED).shape == CHAIN
    assert simulated(planning, rule=VerificationRule.REJECTION).shape == CHAIN
    assert simulated(planning, shape=CHAIN).shape == CHAIN
    asked = Shape(7, 5)
    assert a_plan(planning, shape=asked).shape == asked
    assert a_plan(planning, shape=asked, strategy=Strategy.SPECULATIVE).shape == asked


@pytest.mark.parametrize("unknown", ["row_ms", "drafter_row_ms"])
def test_rows_of_which_nobody_knows_the_price_are_not_taken_for_free(unknown):
    assert simulated(a_tree_planning(**{unknown: None})).shape == CHAIN


@pytest.mark.parametrize("chains_only", ["target", "drafter"])
def test_servers_that_know_chains_only_are_not_asked_for_trees(chains_only):
    limits = {"target": 64, "drafter": 64, chains_only: 0}
    drafter = a_server(3, row_ms=0, tree_tokens=limits["drafter"])
    planning = a_planning([a_server(30, row_ms=0, tree_tokens=limits["target"])], drafter=drafter)
    assert simulated(planning).shape == CHAIN


def test_where_requests_share_targets_rows_are_left_to_the_others():
    targets = [a_server(30, primaries=2, row_ms=0, tree_tokens=64) for _ in range(2)]
    planning = a_planning(targets, drafter=a_server(3, row_ms=0, tree_tokens=64))
    plan = simulated(planning)
    assert plan.strategy is Strategy.SPECULATIVE
    assert plan.shape == CHAIN


async def test_what_was_asked_for_is_simulated_when_there_is_time():
    planning = a_planning([a_server(30) for _ in range(7)])
    before = a_plan(planning)
    async with asyncio.TaskGroup() as tasks:
        planning.refinement.begin_at_rest(tasks)
    after = a_plan(planning)
    assert before.strategy is after.strategy is Strategy.DISTRIBUTED
    assert after.lookahead < before.lookahead


async def test_however_often_there_is_time_one_simulation_runs_at_once(monkeypatch):
    planning = a_planning([a_server(30) for _ in range(7)])
    goes_on, running, most = threading.Event(), [], []

    def rehearse(setting, *, lookahead, **_):
        running.append(lookahead)
        most.append(len(running))
        goes_on.wait(60)
        running.pop()
        return [1]

    monkeypatch.setattr("paceline_orchestrator.planning.simulated_lookaheads.rehearse", rehearse)
    async with asyncio.TaskGroup() as tasks:
        for target_count in (7, 6, 5):
            a_plan(planning, target_count=target_count)
            planning.refinement.begin_at_rest(tasks)
            await until(lambda: running, what="a simulation runs")
        goes_on.set()
    assert max(most) == 1
    simulated = len(most)
    a_plan(planning, target_count=4)
    async with asyncio.TaskGroup() as tasks:
        planning.refinement.begin_at_rest(tasks)
    assert len(most) > simulated


class Dear(Planner):
    """A planner whose simulations take four seconds of a processor each."""

    def __init__(self):
        super().__init__()
        self.seconds, self.count = 0.0, 0

    def refine(self, _after_event):
        self.seconds += 4.0
        self.count += 1
        if self.count == 1:
            raise MemoryError("once")


async def test_simulations_take_a_twentieth_of_a_processor_where_there_is_always_a_new_case():
    planner, clock = Dear(), SimpleNamespace(seconds=100.0)
    planning = a_planning(
        [a_server(30)],
        planner=planner,
        clock=lambda: clock.seconds,
        thread_clock=lambda: planner.seconds,
    )
    counts = []
    for _ in range(1000):  # a request each second
        async with asyncio.TaskGroup() as tasks:
            planning.refinement.begin_at_rest(tasks)
        counts.append(planner.count)
        clock.seconds += 1
    assert counts[5] == 3, "as many as there may be at first"
    assert planner.seconds <= 10 + 4 + 0.05 * 1000
    assert planner.seconds >= 0.05 * 1000


class Endless(Planner):
    """A planner whose simulations go on until they are told to end."""

    def __init__(self):
        super().__init__()
        self.running, self.over = threading.Event(), threading.Event()

    def refine(self, after_event):
        self.running.set()
        try:
            while True:
                after_event()
        finally:
            self.over.set()


async def test_a_process_that_stops_does_not_wait_for_simulations(caplog):
    planner = Endless()
    planning = a_planning([a_server(30) for _ in range(7)], planner=planner)
    async with asyncio.TaskGroup() as tasks:
        planning.refinement.begin_at_rest(tasks)
        await until(planner.running.is_set, what="a simulation runs")
        planning.refinement.end()
    assert planner.over.is_set()
    assert caplog.records == [], "it is no failure"
    planner.running.clear()
    async with asyncio.TaskGroup() as tasks:
        planning.refinement.begin_at_rest(tasks)
    assert not planner.running.is_set()


async def test_a_simulation_whose_task_is_cancelled_leaves_no_thread_behind():
    planner = Endless()
    planning = a_planning([a_server(30) for _ in range(7)], planner=planner)
    async with asyncio.TaskGroup() as tasks:
        planning.refinement.begin_at_rest(tasks)
        await until(planner.running.is_set, what="a simulation runs")
        refining().cancel()
    try:
        await until(planner.over.is_set, what="the thread is done")
    finally:
        planning.refinement.end()  # or a failed test would never end


async def test_where_there_is_never_a_moment_at_rest_plans_are_refined_beside_requests():
    clock = SimpleNamespace(seconds=100.0)
    targets = [a_server(30) for _ in range(7)]
    planning = a_planning(targets, clock=lambda: clock.seconds)
    before = a_plan(planning)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(10):
            planning.refinement.note_request(tasks)
            assert refining() is None
            clock.seconds += 1
        planning.refinement.note_request(tasks)
        assert planning.refinement._computing._has_company, "it makes way"
    assert a_plan(planning).lookahead < before.lookahead


async def test_the_wait_for_a_moment_at_rest_begins_with_what_there_is_to_refine():
    clock = SimpleNamespace(seconds=100.0)
    targets = [a_server(30) for _ in range(7)]
    planner = Planner()
    planning = a_planning(targets, planner=planner, clock=lambda: clock.seconds)
    a_plan(planning)
    async with asyncio.TaskGroup() as tasks:
        planning.refinement.note_request(tasks)
        planning.refinement.begin_at_rest(tasks)
    planning.refinement.note_request(None)  # all was refined at rest
    del targets[3:]
    a_plan(planning)
    assert planner.is_missing_some
    clock.seconds += 60
    # It has waited for no time: there is nowhere to refine.
    planning.refinement.note_request(None)
    assert planner.is_missing_some


async def test_a_simulation_makes_way_as_soon_as_a_request_begins():
    planner = Endless()
    planning = a_planning([a_server(30) for _ in range(7)], planner=planner)
    async with asyncio.TaskGroup() as tasks:
        planning.refinement.begin_at_rest(tasks)
        await until(planner.running.is_set, what="a simulation runs")
        assert not planning.refinement._computing._has_company
        planning.refinement.note_request(tasks)
        assert planning.refinement._computing._has_company
        planning.refinement.begin_at_rest(tasks)
        assert not planning.refinement._computing._has_company, "the last request has ended"
        planning.refinement.end()


@pytest.mark.parametrize(("lora", "drafting"), [("law", "drafter with law"), ("verse", "drafter")])
def test_what_is_learnt_is_of_the_model_and_the_drafter_with_the_requests_adapter(lora, drafting):
    model = SimpleNamespace(fingerprint="target with it", tree_token_limit=64, lora=lora)
    plan = a_planning([a_server(30)]).plan(Wish(), model, prompt_length=5)
    assert plan.pair == Pair("target with it", drafting)
