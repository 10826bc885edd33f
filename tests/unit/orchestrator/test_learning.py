"""What plans learn from: only what was judged, measured, and this request's own."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

from paceline_contract.calls import CallTiming
from paceline_orchestrator.fleet.latency import ObservedLatency
from paceline_orchestrator.fleet.row_prices import RowPrices
from paceline_orchestrator.planning.hit_rates import HitRates, Pair
from paceline_orchestrator.planning.planner import DrafterKind
from paceline_orchestrator.planning.request_planner import RequestPlanner
from paceline_protocol.draft_shape import Shape
from paceline_protocol.draft_statistics import DraftStatistics
from paceline_protocol.methods import METHODS, Strategy
from unit.orchestrator.test_request_planner import a_plan, a_planning, a_server

MS = 1_000_000
SI = Strategy.SPECULATIVE
TARGET = a_server(30, row_ms=2)
ASSUMED = 20  # values that an assumption counts for


def a_text_planning():
    """A target beside which nothing but the text drafts."""
    pool = SimpleNamespace(targets=lambda _: [TARGET], drafters=lambda _: [])
    return RequestPlanner(pool)


def learn(planning, drafts, *, strategy=SI, **text):
    plan = SimpleNamespace(method=METHODS[strategy], shape=Shape(1), pair=Pair("target", "drafter"))
    planning.experience.learn(drafts, plan=plan, verification_count=0, **text)


# --- what drafts were worth -----------------------------------------------------------------------


def test_a_first_choice_is_known_by_what_was_judged_of_it_and_by_nothing_else():
    """Not by what was drafted, discarded or own, nor by runners-up that became corrections."""
    rates = HitRates()
    assumed = rates.acceptance_rate
    rates.learn(
        DraftStatistics(
            drafted=97, accepted=40, corrections_ahead=9, rejected=21, discarded=36, own=22
        ),
        width=1,
    )
    judged = 31 + 21
    assert rates.acceptance_rate == pytest.approx((ASSUMED * assumed + 31) / (ASSUMED + judged))


def test_a_runner_up_is_known_only_by_places_that_had_one_and_were_reached():
    rates = HitRates()
    assumed = rates.decays[0]
    rates.learn(DraftStatistics(ranks=Counter({1: 50, 2: 7, 3: 4, 0: 2})), width=2)
    assert rates.decays[0] == pytest.approx((ASSUMED * assumed + 7) / (ASSUMED + 7 + 4 + 2))
    assert rates.decays[1] == assumed, "at two for each place there was no third"


def test_a_request_that_was_left_before_any_verdict_teaches_nothing_of_drafts():
    planning = a_planning([TARGET])
    before = a_plan(planning).hit_rates
    learn(planning, DraftStatistics(drafted=500, discarded=500))
    assert a_plan(planning).hit_rates == before


def test_where_the_text_drafted_too_only_the_text_is_known_better():
    planning = a_planning([TARGET])
    before = a_plan(planning).hit_rates
    counts = {"text_accepted_count": 0, "text_rejected_count": 30}
    learn(planning, DraftStatistics(drafted=90, accepted=3, rejected=60), **counts)
    assert a_plan(planning).hit_rates == before


def test_what_the_text_is_worth_follows_from_what_was_accepted_and_rejected_of_it():
    """SI takes a call of 1 ms and a forward of two rows, 32 ms, and the text 0.02 ms to draft."""
    planning = a_text_planning()
    drafts = DraftStatistics(drafted=900, accepted=700, rejected=100, discarded=100)
    for _ in range(100):
        learn(planning, drafts, text_accepted_count=30, text_rejected_count=10)
    asked = {"strategy": SI, "lookahead": 1, "drafter": DrafterKind.MAX_GRAM}
    assert a_plan(planning, **asked).token_ns == pytest.approx(33.02 * MS / 1.75, rel=0.005)


def test_a_text_that_is_not_used_is_doubted_less_and_less():
    """Where it drafts badly it is left out, and with each request believed a little more again."""
    planning = a_text_planning()
    asked = {"strategy": SI, "lookahead": 1, "drafter": DrafterKind.MAX_GRAM}
    learn(planning, DraftStatistics(), text_accepted_count=0, text_rejected_count=200)
    bad = a_plan(planning, **asked).token_ns
    assert not a_plan(planning).method.drafts
    assert 0.99 * bad < a_plan(planning, **asked).token_ns < bad


def test_a_targets_own_guesses_are_counted_for_each_verdict_that_had_some_to_judge():
    """Of three verdicts the first judges none. Each other one: 5 guesses, of which 1.5 are right.

    Those after a wrong one are not judged, and their rows are computed all the same.
    """
    planning = a_planning([a_server(30, row_ms=2, self_draft_depth=4)])
    own = Strategy.SELF_SPECULATIVE
    drafts = DraftStatistics(drafted=10, accepted=3, rejected=2, discarded=5, own=3)
    for _ in range(2000):
        learn(planning, drafts, strategy=own)
    forward_ms, call_ms = 30 + 5 * 2, 1
    plan = a_plan(planning, strategy=own)
    assert plan.token_ns == pytest.approx((forward_ms + call_ms) * MS / 2.5, rel=0.01)


# --- what calls cost ------------------------------------------------------------------------------


def a_meter():
    """A forward of one row takes 100 ns, and each further one 10; prompts 40 and 30 a token."""
    meter = ObservedLatency(clock=lambda: 0.0)
    meter.adopt(((1, 100), (5, 140)), prefill_fixed_ns=40, prefill_ns_per_token=30)
    return meter


FOUR_FORWARDS = CallTiming(
    queue_ns=800,
    forward_ns=840,
    forward_count=4,
    row_count=12,
    shared_row_count=20,
    shared_call_count=12,
)
"""Of five rows each, three of them ours, beside two other calls; a step takes 150 ns."""


def test_of_an_answer_of_several_forwards_each_number_is_that_of_one():
    meter = a_meter()
    meter.observe(FOUR_FORWARDS, elapsed_ns=2000, is_first=False)
    assert meter.step_ns == 150
    assert meter.queue_ns == 800 / 4 / 8
    assert meter.lag_ns == round((2000 - 800 - 840) / 4 / 8)
    assert meter.call_ns is None
    in_one = 1 + 2 / 8
    waited = 25 / (150 * (1 + 0.1 * (in_one - 1)))
    assert meter.other_calls == pytest.approx(in_one * (1 + waited) - 1)


def test_what_was_seen_of_others_has_faded_when_the_next_answer_comes():
    """Of 800 ns and of 2 calls an eighth is believed; a second later half of that is left."""
    now = 0.0
    meter = ObservedLatency(clock=lambda: now)
    meter.adopt(((1, 100),), prefill_fixed_ns=0, prefill_ns_per_token=0)
    for _ in range(2):
        meter.observe(CallTiming(800, 100, 1, 1, shared_call_count=3), elapsed_ns=900)
        now += 1.0
    queue_ns, beside = (seen / 8 + seen / 8 / 2 * 7 / 8 for seen in (800, 2))
    assert meter.queue_ns == round(queue_ns / 2)
    waited = round(queue_ns / 2) / 100
    assert meter.other_calls == pytest.approx((1 + beside / 2) * (1 + waited) - 1)


def test_a_step_is_what_the_server_says_of_itself_until_its_answers_say_something_else():
    meter = ObservedLatency(clock=lambda: 0.0)
    assert (meter.step_ns, meter.expected_ns(1), meter.other_calls) == (0, 0, 0.0)
    meter = a_meter()
    assert meter.step_ns == 100
    for _ in range(60):
        meter.observe(CallTiming(0, 400, 2, 2), elapsed_ns=500)
    assert meter.step_ns == 200


def test_an_answer_whose_forward_began_before_its_call_came_says_nothing_of_the_way():
    meter, timing = a_meter(), CallTiming(0, 300, 1, 3, began_early=True)
    for is_first in (True, False):
        meter.observe(timing, elapsed_ns=900, is_first=is_first)
    assert (meter.call_ns, meter.lag_ns) == (None, 0)


def test_an_answer_without_a_forward_says_nothing_of_a_step_or_of_a_lag():
    meter = a_meter()
    meter.observe(CallTiming(), elapsed_ns=900, is_first=False)
    assert (meter.step_ns, meter.lag_ns) == (100, 0)


def test_a_prompt_among_our_rows_or_beside_them_says_nothing_of_a_step():
    meter = a_meter()
    meter.observe(CallTiming(0, 9000, 2, 33), elapsed_ns=9900)
    meter.observe(
        CallTiming(0, 9000, 2, 2, shared_row_count=65, shared_call_count=4), elapsed_ns=9900
    )
    assert meter.step_ns == 100
    meter.observe(CallTiming(0, 840, 2, 32), elapsed_ns=9900)  # 16 rows a forward are no prompt
    assert meter.step_ns == round(420 / 2.5)


@pytest.mark.parametrize(
    ("rows", "expected"), [(1, 100), (2, 140), (5, 140), (6, 40 + 6 * 30), (100, 40 + 100 * 30)]
)
def test_a_forward_is_expected_to_take_what_was_measured_or_a_prompts_formula(rows, expected):
    assert a_meter().expected_ns(rows) == expected


def test_a_prompt_takes_no_less_than_the_widest_forward_or_a_step():
    meter = ObservedLatency(clock=lambda: 0.0)
    meter.adopt(((1, 100), (5, 140)), prefill_fixed_ns=2, prefill_ns_per_token=3)
    assert meter.expected_ns(6) == 140
    meter.observe(CallTiming(0, 170, 1, 1), elapsed_ns=200)
    assert meter.expected_ns(5) == meter.expected_ns(6) == 170


def test_rows_of_a_server_that_measured_nothing_are_not_known_to_cost_more():
    for table in ((), ((1, 0), (4, 90))):
        assert not RowPrices.measured(table, shares_forwards=True).are_measured
    assert RowPrices(((1, 1.0), (3, 1.5), (11, 3.5))).of(7) == pytest.approx(2.5)
