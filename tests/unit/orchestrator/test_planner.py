"""Plans: what AUTO makes of forecasts. Their numbers are in test_estimates and test_forecasts."""

from __future__ import annotations

import gc
import re
import tracemalloc
from dataclasses import replace

import pytest

from paceline_contract.calls import VerificationRule
from paceline_orchestrator.fleet.row_prices import RowPrices
from paceline_orchestrator.planning import simulated_lookaheads, simulated_shapes
from paceline_orchestrator.planning.equation import needed_target_count, smallest_lookahead
from paceline_orchestrator.planning.measurements import Measurements
from paceline_orchestrator.planning.planner import DrafterKind, Planner, Wish
from paceline_orchestrator.planning.simulated_shapes import OPEN_SHAPES
from paceline_protocol.draft_shape import CHAIN, Shape
from paceline_protocol.methods import METHODS, Strategy

MS = 1_000_000
VICUNA = Measurements(
    target_step_ns=37_700_000,
    target_first_ns=202_000_000,
    drafter_step_ns=2_500_000,
    acceptance_rate=0.63,
    target_count=7,
)
DISTRIBUTED = Wish(strategy=Strategy.DISTRIBUTED)


def refined(measurements: Measurements, wish: Wish | None = None, *, times: int = 1) -> Planner:
    planner = Planner()
    for _ in range(times):
        planner.choose(measurements, wish or Wish())
        planner.refine()
    return planner


@pytest.mark.parametrize("target_count", range(1, 9))
@pytest.mark.parametrize("target_ns", [1, 7, 99, 100, 101])
def test_the_smallest_lookahead_is_the_smallest_that_fits(target_ns, target_count):
    lookahead = smallest_lookahead(target_ns, 3, target_count=target_count)
    assert needed_target_count(target_ns, 3, lookahead=lookahead) <= target_count
    if lookahead > 1:
        assert needed_target_count(target_ns, 3, lookahead=lookahead - 1) > target_count


def test_auto_takes_dsi_with_enough_targets_and_says_why():
    plan = Planner().choose(VICUNA)
    assert (plan.strategy, plan.lookahead, plan.target_count) == (Strategy.DISTRIBUTED, 3, 6)
    assert plan.note.startswith("DSI with lookahead 3 on 6 target(s): ")
    assert "SI with lookahead 4" in plan.note
    assert "non-SI: " in plan.note
    assert "\n" not in plan.note


def test_a_refined_plan_has_the_lookahead_that_simulates_best():
    plan = refined(VICUNA).choose(VICUNA)
    assert plan.strategy is Strategy.DISTRIBUTED
    assert plan.lookahead < 3
    assert plan.target_count == 7


FREE = RowPrices(((1, 1.0), (16, 1.0)))
TREES = {"tree_tokens": 64, "tree_depth": 64, "target_prices": FREE, "drafter_prices": FREE}


def simulating(monkeypatch, times_of):
    """Have the forms of a method take these times; returns the cases that are simulated."""
    cases = []
    monkeypatch.setattr(
        simulated_lookaheads, "rehearse", lambda *_, **__: [simulated_lookaheads.VERIFICATION]
    )
    monkeypatch.setattr(
        simulated_shapes,
        "simulated_times",
        lambda it, **_: cases.append(it) or times_of(it.strategy),
    )
    return cases


def test_forms_are_simulated_with_what_else_a_plan_wants_to_know(monkeypatch):
    simulating(monkeypatch, lambda _: {CHAIN: 1.25, Shape(2): 1.0})
    knows_trees = replace(VICUNA, target_count=1, **TREES)
    planner = refined(knows_trees)
    before = planner.choose(knows_trees)
    planner.refine()
    after = planner.choose(knows_trees)
    assert (before.shape, after.shape) == (CHAIN, Shape(2))
    assert after.token_ns == pytest.approx(before.token_ns / 1.25, abs=1)


def test_auto_takes_the_method_whose_form_is_best_though_its_chains_are_not(monkeypatch):
    times = {
        Strategy.SPECULATIVE: {CHAIN: 6000.0, Shape(4, 3): 3900.0},
        Strategy.DISTRIBUTED: {CHAIN: 4500.0, Shape(4, 3): 4050.0},
    }
    slow = {CHAIN: 6000.0, Shape(4, 3): 6000.0}
    simulating(monkeypatch, lambda strategy: times.get(strategy, slow))
    knows_trees = replace(VICUNA, **TREES)
    assert Planner().choose(knows_trees).strategy is Strategy.DISTRIBUTED
    planner = refined(knows_trees, times=2)
    plan = planner.choose(knows_trees)
    assert (plan.strategy, plan.shape) == (Strategy.SPECULATIVE, Shape(4, 3))
    assert re.search(
        r"DSI with lookahead \d+ on \d target\(s\) and trees of width 4 and 3", plan.note
    )
    only_dsi = planner.choose(knows_trees, Wish(strategy=Strategy.DISTRIBUTED))
    assert only_dsi.shape == CHAIN


def test_trees_may_make_speculation_pay_that_does_not_pay_as_chains(monkeypatch):
    simulating(monkeypatch, lambda _: {CHAIN: 6000.0, Shape(2): 3000.0})
    slow = {"drafter_step_ns": 36 * MS, "acceptance_rate": 0.1, "target_count": 1}
    doubtful = replace(VICUNA, **slow, **TREES)
    planner = Planner()
    assert planner.choose(doubtful).strategy is Strategy.AUTOREGRESSIVE
    planner.refine()
    plan = planner.choose(doubtful)
    assert (plan.strategy, plan.shape) == (Strategy.SPECULATIVE, Shape(2))
    assert plan.token_ns < plan.plain_token_ns


@pytest.mark.parametrize(
    ("wish", "shapes"),
    [
        (Wish(), OPEN_SHAPES),
        (Wish(shape=Shape(7, 5)), (CHAIN, Shape(7, 5))),
        (Wish(shape=CHAIN), (CHAIN,)),
        (Wish(rule=VerificationRule.REJECTION), (CHAIN,)),
    ],
    ids=["open", "trees", "chains", "by rejection"],
)
def test_methods_are_compared_in_the_shapes_that_the_request_allows(monkeypatch, wish, shapes):
    cases = simulating(monkeypatch, lambda _: {CHAIN: 1.0})
    refined(replace(VICUNA, **TREES), wish, times=2)
    assert [case.shapes for case in cases] == [shapes for it in METHODS.values() if it.drafts]


# Nearly always right, and two thirds of the target's latency: SI ahead hides most of it, too.
PHI3 = replace(
    VICUNA, target_step_ns=52 * MS, drafter_step_ns=34 * MS, acceptance_rate=0.93, target_count=7
)


@pytest.mark.parametrize("drafter_step_ns", [34 * MS, 35 * MS])
@pytest.mark.parametrize("call_ns", [0, MS])
def test_dsi_is_taken_where_it_is_little_ahead_of_si_that_drafts_ahead(drafter_step_ns, call_ns):
    slow = replace(PHI3, drafter_step_ns=drafter_step_ns, call_ns=call_ns)
    plan = refined(slow, times=2).choose(slow)
    assert (plan.strategy, plan.lookahead) == (Strategy.DISTRIBUTED, 1)


def test_auto_takes_si_with_one_target_and_a_drafter_that_errs():
    one = replace(VICUNA, target_count=1)
    assert Planner().choose(one).strategy is Strategy.SPECULATIVE
    assert refined(one).choose(one).strategy is Strategy.SPECULATIVE


# A drafter of a third of the target's latency that is nearly always right.
STARCODER = replace(
    VICUNA, target_step_ns=21 * MS, drafter_step_ns=7 * MS, acceptance_rate=0.93, target_count=1
)


def test_with_one_target_auto_drafts_ahead_and_says_so():
    one = replace(VICUNA, target_count=1)
    plan = refined(one).choose(one)
    assert (plan.strategy, plan.lookahead, plan.drafts_ahead) == (Strategy.SPECULATIVE, 4, True)
    assert plan.note.startswith("SI with lookahead 4, drafting ahead: 19.2 ms per token")


@pytest.mark.parametrize("lookahead", [1, 3, 8])
@pytest.mark.parametrize("rate", [0.0, 0.6, 0.95, 1.0])
@pytest.mark.parametrize("drafter_ms", [1, 10, 21, 60])
def test_drafting_ahead_is_never_expected_to_be_slower(lookahead, rate, drafter_ms):
    node = replace(STARCODER, drafter_step_ns=drafter_ms * MS, acceptance_rate=rate, call_ns=MS)
    wish = Wish(strategy=Strategy.SPECULATIVE, lookahead=lookahead)
    ahead = Planner().choose(node, wish)
    resting = Planner().choose(node, replace(wish, may_draft_ahead=False))
    assert (ahead.drafts_ahead, resting.drafts_ahead) == (True, False)
    assert ahead.token_ns <= resting.token_ns
    assert (ahead.token_ns < resting.token_ns) == (rate > 0 and drafter_ms <= 21)


def test_who_asks_for_blocks_gets_the_papers_si():
    asked = Wish(strategy=Strategy.SPECULATIVE, may_draft_ahead=False)
    plan = Planner().choose(STARCODER, asked)
    assert (plan.strategy, plan.lookahead, plan.drafts_ahead) == (Strategy.SPECULATIVE, 6, False)
    assert "drafting ahead" not in plan.note


def test_forms_are_simulated_with_a_drafter_that_does_as_the_plan_says(monkeypatch):
    cases = simulating(monkeypatch, lambda _: {CHAIN: 1.0})
    for may_draft_ahead in (True, False):
        refined(
            replace(VICUNA, target_count=1, **TREES), Wish(may_draft_ahead=may_draft_ahead), times=2
        )
    by_si = [case for case in cases if case.strategy is Strategy.SPECULATIVE]
    assert [case.drafts_ahead for case in by_si] == [True, False]


@pytest.mark.parametrize("target_count", [1, 7])
@pytest.mark.parametrize(("drafter_step_ns", "rate"), [(36 * MS, 0.1), (60 * MS, 0.9)])
def test_auto_decodes_plainly_where_drafting_cannot_pay(drafter_step_ns, rate, target_count):
    slow = replace(
        VICUNA,
        drafter_step_ns=drafter_step_ns,
        acceptance_rate=rate,
        target_count=target_count,
    )
    plan = refined(slow).choose(slow)
    assert (plan.strategy, plan.lookahead, plan.target_count) == (Strategy.AUTOREGRESSIVE, 0, 1)


def test_without_a_drafter_auto_decodes_plainly():
    plan = Planner().choose(replace(VICUNA, drafter_count=0))
    assert plan.strategy is Strategy.AUTOREGRESSIVE
    assert "no drafter" in plan.note


def test_speculation_asked_for_without_a_drafter_is_planned_all_the_same():
    plan = Planner().choose(replace(VICUNA, drafter_count=0), Wish(strategy=Strategy.DISTRIBUTED))
    assert (plan.strategy, plan.target_count) == (Strategy.DISTRIBUTED, 1)
    assert "no drafter" in plan.note


def test_auto_counts_on_the_targets_that_can_compute_side_by_side():
    plan = Planner().choose(replace(VICUNA, side_by_side=3))
    assert (plan.strategy, plan.target_count) == (Strategy.DISTRIBUTED, 3)
    assert "of 7 target(s) 3 can compute beside the drafter and each other" in plan.note
    alone = refined(replace(VICUNA, side_by_side=1)).choose(replace(VICUNA, side_by_side=1))
    assert (alone.strategy, alone.drafts_ahead) == (Strategy.SPECULATIVE, True)
    assert "hardware" not in Planner().choose(VICUNA).note


# A drafter for which DSI is better than SI with one target, too.
SLOW = replace(VICUNA, drafter_step_ns=15 * MS, acceptance_rate=0.8)


def test_where_target_and_drafter_share_hardware_auto_lets_them_take_turns(monkeypatch):
    assert Planner().choose(replace(SLOW, side_by_side=1)).strategy is Strategy.DISTRIBUTED
    shared = replace(SLOW, side_by_side=0)
    monkeypatch.setattr(
        simulated_lookaheads, "rehearse", lambda *_, **__: pytest.fail("simulated DSI")
    )
    plan = refined(shared).choose(shared)
    assert (plan.strategy, plan.drafts_ahead) == (Strategy.SPECULATIVE, False)


def test_what_is_asked_for_is_done_on_shared_hardware_too():
    shared = replace(SLOW, side_by_side=0)
    plan = Planner().choose(shared, Wish(strategy=Strategy.DISTRIBUTED))
    assert (plan.strategy, plan.target_count) == (Strategy.DISTRIBUTED, 3)
    plan = Planner().choose(shared, Wish(strategy=Strategy.SPECULATIVE))
    assert not plan.drafts_ahead


def test_what_is_asked_for_is_kept():
    plan = Planner().choose(
        VICUNA, Wish(strategy=Strategy.DISTRIBUTED, lookahead=5, target_count=2)
    )
    assert (plan.strategy, plan.lookahead, plan.target_count) == (Strategy.DISTRIBUTED, 5, 2)
    plan = Planner().choose(VICUNA, Wish(strategy=Strategy.SPECULATIVE, lookahead=9))
    assert (plan.strategy, plan.lookahead, plan.target_count) == (Strategy.SPECULATIVE, 9, 1)


@pytest.mark.parametrize("strategy", [None, *Strategy])
def test_a_plan_says_what_plain_decoding_would_take(strategy):
    plan = Planner().choose(replace(VICUNA, call_ns=2 * MS), Wish(strategy=strategy))
    assert plan.plain_token_ns == pytest.approx(37.7 * MS)


def test_the_text_beyond_a_drafter_has_two_targets_more_and_a_place_in_each_block():
    phi = replace(VICUNA, drafter_step_ns=24_000_000, acceptance_rate=0.95, target_first_ns=1)
    both = DrafterKind.SERVER_AND_MAX_GRAM
    dsi = Wish(strategy=Strategy.DISTRIBUTED)
    alone = Planner().choose(phi, dsi)
    assert (alone.target_count, alone.lookahead) == (2, 1)
    extended = Planner().choose(phi, replace(dsi, drafter=both))
    assert (extended.target_count, extended.lookahead) == (4, 2)
    assert "the text drafts beyond the drafter" in extended.note
    assert extended.note.count("DSI") == 1
    asked = replace(dsi, drafter=both, lookahead=1, target_count=3)
    assert Planner().choose(phi, asked).target_count == 3
    assert Planner().choose(phi, asked).lookahead == 1
    si = Wish(strategy=Strategy.SPECULATIVE, drafter=both)
    assert Planner().choose(phi, si).target_count == 1


def test_no_more_targets_are_used_than_there_are():
    plan = Planner().choose(replace(VICUNA, target_count=2), Wish(target_count=64))
    assert plan.target_count == 2


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_certain_drafters_are_no_special_case(rate):
    certain = replace(VICUNA, acceptance_rate=rate, target_count=7, drafter_step_ns=6 * MS)
    plan = refined(certain).choose(certain, Wish(strategy=Strategy.DISTRIBUTED))
    assert plan.token_ns <= certain.target_step_ns


def test_the_prompt_is_broadcast_where_that_simulates_better():
    slow_drafter = replace(
        VICUNA,
        target_step_ns=52_400_000,
        target_first_ns=250_000_000,
        drafter_step_ns=34_600_000,
        acceptance_rate=0.93,
    )
    dsi = Wish(strategy=Strategy.DISTRIBUTED)
    planner = refined(slow_drafter)
    planner.choose(slow_drafter, dsi)  # with the lookahead that simulated best
    planner.refine()
    assert planner.choose(slow_drafter, dsi).broadcast_prefill
    short = replace(slow_drafter, target_first_ns=52_400_000)
    assert not planner.choose(short, dsi).broadcast_prefill
    plain = Wish(strategy=Strategy.AUTOREGRESSIVE)
    assert not planner.choose(slow_drafter, plain).broadcast_prefill
    assert not refined(VICUNA).choose(VICUNA).broadcast_prefill


def test_what_carries_a_prompt_that_takes_longer_than_a_step_is_finished():
    assert Planner().choose(VICUNA).keep_prefill
    assert not Planner().choose(replace(VICUNA, target_first_ns=37_700_000)).keep_prefill
    assert not Planner().choose(VICUNA, Wish(strategy=Strategy.SPECULATIVE)).keep_prefill


def test_measurements_that_are_nearly_the_same_are_simulated_once(monkeypatch):
    planner = refined(VICUNA)
    monkeypatch.setattr(
        "paceline_orchestrator.planning.simulated_lookaheads.rehearse",
        lambda *_, **__: pytest.fail("again"),
    )
    planner.choose(replace(VICUNA, target_step_ns=37_600_000, acceptance_rate=0.9))
    planner.refine()


def test_nothing_is_simulated_where_it_cannot_matter(monkeypatch):
    monkeypatch.setattr(
        "paceline_orchestrator.planning.simulated_lookaheads.rehearse",
        lambda *_, **__: pytest.fail("simulated"),
    )
    refined(replace(VICUNA, drafter_step_ns=60 * MS))
    refined(replace(VICUNA, request_count=8))


def test_where_nothing_is_accepted_dsi_dispatches_next_to_nothing():
    hopeless = replace(VICUNA, acceptance_rate=0.0)
    planner = Planner()
    planner.choose(hopeless, Wish(strategy=Strategy.DISTRIBUTED))
    planner.refine()
    plan = planner.choose(hopeless, Wish(strategy=Strategy.DISTRIBUTED))
    assert plan.lookahead * VICUNA.drafter_step_ns > VICUNA.target_step_ns
    assert plan.target_count == 1


def test_what_is_kept_of_a_setting_is_small_however_many_wander_by():
    """Where latencies wander there are always new ones: as lists of numbers 30 KB each."""
    planner = refined(VICUNA)
    settings = [replace(VICUNA, target_count=count) for count in (3, 4)]
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for measurements in settings:
            planner.choose(measurements, DISTRIBUTED)
            planner.refine()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (after - before) / len(settings) < 10_000


def test_where_calls_cost_more_than_forwards_one_target_is_best_served_by_plain_decoding():
    quick = replace(
        VICUNA,
        target_step_ns=3 * MS,
        drafter_step_ns=MS // 2,
        acceptance_rate=0.3,
        target_count=1,
    )
    assert Planner().choose(quick).strategy is Strategy.SPECULATIVE
    assert Planner().choose(replace(quick, call_ns=5 * MS)).strategy is Strategy.AUTOREGRESSIVE


def test_targets_for_the_text_are_those_that_can_be_dispatched_to():
    wish = Wish(strategy=Strategy.DISTRIBUTED, drafter=DrafterKind.SERVER_AND_MAX_GRAM)
    slow = replace(VICUNA, drafter_step_ns=40 * MS, target_first_ns=1)
    for dispatch_ms, count in ((0, 3), (1, 3), (9, 2), (20, 1)):
        plan = Planner().choose(replace(slow, dispatch_ns=dispatch_ms * MS), wish)
        assert plan.target_count == count


@pytest.mark.parametrize("row_price", [1.02, 1.2])
def test_targets_own_guesses_ride_along_where_their_rows_are_free(row_price):
    prices = RowPrices(((1, 1.0), (32, row_price)))
    known = replace(VICUNA, guess_count=16.0, guesses_accepted=1.0, target_prices=prices)
    plan = Planner().choose(known, Wish(strategy=Strategy.SPECULATIVE, lookahead=3))
    assert plan.own_guesses is (row_price < 1.05)
