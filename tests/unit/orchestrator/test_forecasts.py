"""What DSI promises a request: examples in which each term decides.

A target's forward of n rows takes 900 + 100 n, a drafter's step 70, a call 30. A block of two rows
is so verified in 1130, and Equation 1 needs 17 targets for a lookahead of 1, 6 for 3.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from paceline_orchestrator.fleet.row_prices import RowPrices
from paceline_orchestrator.planning.estimates import distributed_token_ns, on_its_part
from paceline_orchestrator.planning.forecasts import FORECASTS, Case
from paceline_orchestrator.planning.measurements import Measurements
from paceline_protocol.methods import Strategy

NODE = Measurements(
    target_step_ns=1000,
    target_first_ns=5000,
    drafter_step_ns=70,
    acceptance_rate=0.5,
    target_count=7,
    call_ns=30,
    target_prices=RowPrices(((1, 1.0), (11, 2.0))),
)


def forecast(node=NODE, *, lookahead=None, target_count=7, rehearsed=()):
    """What is promised where these times were simulated, by lookahead."""
    known = SimpleNamespace(times=lambda *_: dict(rehearsed))
    return FORECASTS[Strategy.DISTRIBUTED](
        Case(node, lookahead=lookahead, target_count=target_count, lookaheads=known)
    )


def stretched(time_ns, *, lookahead):
    """A block of lookahead + 1 rows takes longer than one of two."""
    return round(time_ns * (1000 + 100 * lookahead) / 1100)


def test_until_it_was_simulated_the_lookahead_is_the_smallest_that_equation_1_allows():
    assert (forecast().lookahead, forecast().target_count) == (3, 6)
    assert (forecast(target_count=2).lookahead, forecast(target_count=2).target_count) == (9, 2)
    assert forecast(replace(NODE, dispatch_ns=175)).lookahead == 5, "what can be dispatched"


def test_a_request_has_no_more_targets_than_it_may_count_on():
    asked = forecast(lookahead=1, target_count=4)
    assert (asked.lookahead, asked.target_count) == (1, 4)


def test_what_was_not_simulated_takes_the_closed_form_of_a_lookahead_that_never_waits():
    own = on_its_part(NODE)
    times = {each: distributed_token_ns(own, each) for each in (1, 3, 5)}
    assert len(set(times.values())) == 3
    assert forecast(lookahead=1).token_ns == stretched(times[3], lookahead=1)
    assert forecast(lookahead=5).token_ns == stretched(times[5], lookahead=5)


def test_what_was_simulated_is_promised_stretched_by_its_rows_and_never_beyond_a_verification():
    simulated = {2: 500, 4: 2000}
    asked = {it: forecast(lookahead=it, rehearsed=simulated) for it in (2, 4)}
    assert asked[2].token_ns == stretched(500, lookahead=2)
    assert asked[4].token_ns == stretched(1130, lookahead=4)


def flat(node=NODE):
    """Rows are free, so that nothing is stretched."""
    return replace(node, target_prices=RowPrices())


@pytest.mark.parametrize(
    ("simulated", "lookahead"),
    [
        ({1: 500, 2: 501, 4: 502, 8: 400}, 8),
        ({1: 500, 2: 500, 4: 501, 8: 502}, 4),  # two in a thousand are no difference
        ({1: 502, 2: 500, 4: 502}, 2),
    ],
)
def test_of_lookaheads_that_are_equally_good_the_longest_is_taken(simulated, lookahead):
    assert forecast(flat(), rehearsed=simulated).lookahead == lookahead


def test_a_lookahead_is_taken_only_if_its_verifications_can_be_dispatched():
    busy = replace(flat(), dispatch_ns=70)
    assert forecast(busy, rehearsed={1: 300, 2: 500, 4: 600}).lookahead == 2
    assert "DSI from lookahead 2 on" in forecast(busy).note
    assert forecast(busy, lookahead=1, rehearsed={1: 300}).token_ns == 300, "it was asked for"
    assert forecast(flat()).note == ""
