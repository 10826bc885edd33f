"""Methods in the form in which they would run: by simulation, with rows at their price."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from paceline_orchestrator.fleet.row_prices import RowPrices
from paceline_orchestrator.planning import simulated_shapes
from paceline_orchestrator.planning.estimates import Option, plain, speculative
from paceline_orchestrator.planning.measurements import Measurements
from paceline_orchestrator.planning.simulated_shapes import (
    SimulatedShapes,
    best_shape,
    case_of,
    simulated_times,
)
from paceline_protocol.draft_shape import CHAIN, Shape
from paceline_protocol.methods import Strategy

VICUNA = Measurements(
    target_step_ns=37_700_000,
    target_first_ns=37_700_000,
    drafter_step_ns=2_500_000,
    acceptance_rate=0.63,
    target_count=1,
    rank_decays=(0.4,) * 15,
    tree_tokens=64,
    tree_depth=64,
)
FREE = RowPrices(((1, 1.0), (64, 1.0)))
DEAR = RowPrices(((1, 1.0), (33, 2.9)))
PRICED = replace(VICUNA, target_prices=FREE, drafter_prices=FREE)
PLAIN = plain(VICUNA)
SI = speculative(VICUNA, 4)
DSI = Option(
    Strategy.DISTRIBUTED, lookahead=2, target_count=7, token_ns=20_000_000, note="DSI is dear"
)


def a_case(**changes):
    return case_of(
        Option(Strategy.SPECULATIVE, lookahead=4, target_count=1, token_ns=1),
        replace(VICUNA, **changes),
    )


def shape_and_gain(case):
    """The shape that is chosen, and what it or else the best tree gains over a chain."""
    times = simulated_times(case)
    shape = best_shape(times, plain_time=float("inf"))
    trees = [time for other, time in times.items() if other != CHAIN]
    return shape, times[CHAIN] / (min(trees) if shape == CHAIN else times[shape])


def test_dsi_is_worth_less_where_withdrawn_forwards_run_to_their_end():
    """And SI is not: it withdraws nothing from a target."""

    def time_of(strategy, **changes):
        option = Option(strategy, lookahead=2, target_count=2, token_ns=1)
        case = case_of(option, replace(VICUNA, target_count=2, **changes), shapes=(CHAIN,))
        return simulated_times(case)[CHAIN]

    run_on = {"targets_run_on": True, "drafter_runs_on": True}
    dsi, si = Strategy.DISTRIBUTED, Strategy.SPECULATIVE
    assert time_of(dsi, **run_on) > 1.03 * time_of(dsi)
    assert time_of(dsi, drafter_runs_on=True) > time_of(dsi)
    assert time_of(si, **run_on) == time_of(si)


def test_where_rows_are_free_the_widest_trees_gain_most():
    shape, gain = shape_and_gain(a_case())
    assert shape == Shape(4, 3)
    assert gain == pytest.approx(1.4, abs=0.15)


@pytest.mark.parametrize(
    "changes",
    [
        {"target_prices": DEAR},
        {"rank_decays": (0.0,) * 15},
        {"acceptance_rate": 0.98},
    ],
    ids=["dear rows", "no hits", "nothing to correct"],
)
def test_where_trees_do_not_pay_a_chain_is_the_best(changes):
    shape, gain = shape_and_gain(a_case(**changes))
    assert shape == CHAIN
    assert gain < 1.05


def test_rows_at_a_price_make_trees_narrower_before_they_make_them_chains():
    mostly_second = {"rank_decays": (0.9, *(0.1,) * 14), "acceptance_rate": 0.5}
    assert shape_and_gain(a_case(target_prices=DEAR, **mostly_second))[0] == Shape(2)


def test_branches_that_are_dear_to_the_drafter_are_left_out():
    dear_branches = RowPrices(((1, 1.0), (4, 9.0)))
    assert shape_and_gain(a_case(drafter_prices=dear_branches))[0] == Shape(4)


def test_a_tree_has_to_be_ahead_of_plain_decoding_as_far_as_of_a_chain():
    times = {CHAIN: 1.2, Shape(2): 1.0}
    assert best_shape(times, plain_time=1.04) == CHAIN
    assert best_shape(times, plain_time=1.06) == Shape(2)


def test_measurements_that_waver_a_little_are_simulated_a_few_times_and_not_at_each_request(
    monkeypatch,
):
    random, simulated = Random(1), []

    def simulate(case, **_):
        simulated.append(case)
        return dict.fromkeys(case.shapes, 1.0)

    monkeypatch.setattr(simulated_shapes, "simulated_times", simulate)
    shapes = SimulatedShapes()

    def about(number):
        return number * random.gauss(1, 0.03)

    def prices(*costs):
        return RowPrices(((1, 1.0), *((rows, about(cost)) for rows, cost in costs)))

    for _ in range(100):
        seen = replace(
            VICUNA,
            target_step_ns=round(about(37_700_000)),
            drafter_step_ns=round(about(2_500_000)),
            call_ns=round(about(1_500_000)),
            acceptance_rate=about(0.63),
            target_prices=prices((2, 1.2), (4, 1.5), (8, 2.1), (16, 2.7)),
            drafter_prices=prices((2, 1.1), (4, 1.4), (8, 2.0), (16, 2.9)),
        )
        lookahead = round(seen.target_step_ns / seen.drafter_step_ns)
        shapes.of([speculative(seen, None), replace(DSI, lookahead=lookahead)], seen, asked=None)
        shapes.simulate_missing()
    assert 2 <= len(simulated) <= 20
    for strategy in (Strategy.SPECULATIVE, Strategy.DISTRIBUTED):
        assert any(it.strategy is strategy for it in simulated)


def test_methods_that_are_compared_are_simulated_with_the_same_numbers(monkeypatch):
    simulated = []
    monkeypatch.setattr(
        simulated_shapes,
        "simulated_times",
        lambda case, **_: simulated.append(case) or dict.fromkeys(case.shapes, 1.0),
    )
    shapes = SimulatedShapes()
    shapes.of([SI], PRICED, asked=None)
    shapes.simulate_missing()
    shapes.of([SI, DSI], replace(PRICED, drafter_step_ns=2_700_000), asked=None)
    shapes.simulate_missing()
    one, other = simulated
    assert one.setting.drafter_step == other.setting.drafter_step
    shapes.of([SI], replace(PRICED, drafter_step_ns=4_000_000), asked=None)
    shapes.simulate_missing()
    assert len(simulated) == 3, "far away is another case"


def test_similar_measurements_share_a_case():
    near = a_case(acceptance_rate=0.64, rank_decays=(0.41,) * 15, drafter_step_ns=2_550_000)
    assert a_case() == near
    assert a_case() != a_case(acceptance_rate=0.5)
    assert a_case() != a_case(rank_decays=(0.6,) * 15)
    assert a_case() != a_case(target_prices=DEAR)


def simulating(monkeypatch, times_of):
    """SimulatedShapes whose simulation takes these times, and the cases that it was asked for."""
    cases = []
    monkeypatch.setattr(
        simulated_shapes, "simulated_times", lambda it, **_: cases.append(it) or times_of(it)
    )
    return SimulatedShapes(), cases


def token_ns(options):
    return {option.strategy: option.token_ns for option in options}


def test_a_case_is_simulated_once_and_nothing_is_claimed_before(monkeypatch):
    known, cases = simulating(monkeypatch, lambda _: {CHAIN: 6.0, Shape(2): 5.0})
    for _ in range(3):
        assert known.of([PLAIN, SI], PRICED, asked=None) == [PLAIN, SI]
    for _ in range(2):
        known.simulate_missing()
        _, si = known.of([PLAIN, SI], PRICED, asked=None)
        assert (si.shape, si.token_ns) == (Shape(2), round(SI.token_ns * 5 / 6))
    assert cases == [case_of(SI, PRICED)]


def test_methods_are_measured_on_one_clock_which_si_sets(monkeypatch):
    """Not by DSI's own forecast, in which rows have no price."""
    times = {
        Strategy.SPECULATIVE: {CHAIN: 6000.0, Shape(4): 5000.0},
        Strategy.DISTRIBUTED: {CHAIN: 4500.0, Shape(4): 4400.0},
    }
    known, _ = simulating(monkeypatch, lambda case: times[case.strategy])
    known.of([PLAIN, SI, DSI], PRICED, asked=None)
    known.simulate_missing()
    plainly, si, dsi = known.of([PLAIN, SI, DSI], PRICED, asked=None)
    assert plainly == PLAIN
    assert (si.shape, si.token_ns) == (Shape(4), round(SI.token_ns * 5 / 6))
    assert (dsi.shape, dsi.token_ns) == (CHAIN, round(SI.token_ns * 4.5 / 6))
    assert dsi.note == "DSI is dear; DSI: trees do not pay, 1.02 times as fast as chains"


def test_where_others_draft_too_each_method_keeps_its_own_forecast(monkeypatch):
    times = {Strategy.SPECULATIVE: 6000.0, Strategy.DISTRIBUTED: 4500.0}
    known, _ = simulating(monkeypatch, lambda it: {CHAIN: 1.0, Shape(2): times[it.strategy]})
    shared = replace(PRICED, request_count=2, drafting_count=2, target_count=8)
    known.of([SI, DSI], shared, asked=None)
    known.simulate_missing()
    options = known.of([SI, DSI], shared, asked=None)
    assert token_ns(options) == token_ns([SI, DSI])


def test_no_method_is_compared_while_another_one_is_not_simulated(monkeypatch):
    known, _ = simulating(monkeypatch, lambda _: {CHAIN: 6.0, Shape(2): 4.0})
    known.of([SI], PRICED, asked=None)
    known.simulate_missing()
    assert known.of([SI, DSI], PRICED, asked=None) == [SI, DSI]


def test_a_shape_that_is_asked_for_is_what_methods_are_compared_in(monkeypatch):
    known, cases = simulating(monkeypatch, lambda _: {CHAIN: 6.0, Shape(7, 5): 9.0})
    known.of([SI], PRICED, asked=Shape(7, 5))
    known.simulate_missing()
    (si,) = known.of([SI], PRICED, asked=Shape(7, 5))
    assert (si.shape, si.token_ns, si.note) == (Shape(7, 5), round(SI.token_ns * 1.5), "")
    assert [case.shapes for case in cases] == [(CHAIN, Shape(7, 5))]


def test_where_rows_have_no_known_price_chains_are_compared(monkeypatch):
    known, cases = simulating(monkeypatch, lambda _: {CHAIN: 6.0})
    known.of([SI, DSI], VICUNA, asked=None)
    known.simulate_missing()
    si, dsi = known.of([SI, DSI], VICUNA, asked=None)
    assert [case.shapes for case in cases] == [(CHAIN,), (CHAIN,)]
    assert (dsi.shape, dsi.token_ns) == (CHAIN, si.token_ns)
    assert dsi.note == DSI.note


def test_drafts_that_come_slower_than_verdicts_are_not_simulated(monkeypatch):
    known, cases = simulating(monkeypatch, lambda _: {CHAIN: 1.0})
    slow = replace(PRICED, drafter_step_ns=PRICED.verification_ns)
    assert known.of([SI, DSI], slow, asked=None) == [SI, DSI]
    known.simulate_missing()
    assert not cases
