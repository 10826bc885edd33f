"""The recurrences are the protocol: the same times, to the last unit."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline_bench.protocol_runs import Setup, draw_agreements, run_protocol
from paceline_bench.recurrences import (
    ahead_time,
    distributed_time,
    expected_ahead_time,
    expected_distributed_times,
    expected_speculative_forwards,
    run_lengths,
    scheduled_stretches,
    speculative_time,
    stretches,
)
from paceline_protocol.laboratory.simulation import ServerLatency
from paceline_protocol.methods import Strategy
from paceline_protocol.task import DispatchPolicy
from support.examples import examples


def steady(step: int, *, call: int = 0) -> ServerLatency:
    return ServerLatency(step, step, call=call)


def probability(agreements: tuple[bool, ...], *, acceptance_rate: float) -> float:
    right = sum(agreements)
    return acceptance_rate**right * (1 - acceptance_rate) ** (len(agreements) - right)


def test_run_lengths_count_the_agreements_from_each_position_on():
    assert run_lengths([True, True, False, True]) == [2, 1, 0, 1]
    assert run_lengths([]) == []


@settings(max_examples=examples(150), deadline=None)
@given(
    target=st.integers(1, 60),
    drafter_percent=st.integers(1, 100),
    call=st.integers(0, 20),
    lookahead=st.integers(1, 15),
    target_count=st.integers(1, 8),
    dispatch=st.sampled_from(DispatchPolicy),
    max_tokens=st.integers(1, 40),
    acceptance_rate=st.sampled_from([0.0, 0.3, 0.7, 0.95]),
    seed=st.integers(0, 10**6),
)
def test_a_dsi_generation_takes_the_sum_of_its_stretches(
    target,
    drafter_percent,
    call,
    lookahead,
    target_count,
    dispatch,
    max_tokens,
    acceptance_rate,
    seed,
):
    setup = Setup(
        Strategy.DISTRIBUTED,
        steady(target, call=call),
        steady(max(1, target * drafter_percent // 100), call=call),
        lookahead=lookahead,
        target_count=target_count,
        dispatch=dispatch,
    )
    protocol = run_protocol(
        setup, acceptance_rate=acceptance_rate, max_tokens=max_tokens, seed=seed
    )
    runs = run_lengths(draw_agreements(acceptance_rate, max_tokens=max_tokens, seed=seed))
    assert distributed_time(runs, stretches(setup, max_tokens=max_tokens)) == protocol.total_time


@settings(max_examples=examples(150), deadline=None)
@given(
    drafter=st.integers(1, 12),
    drafters_to_target=st.integers(1, 60),
    rest=st.integers(0, 11),
    lookahead=st.integers(1, 30),
    target_count=st.integers(1, 8),
    dispatch=st.sampled_from(DispatchPolicy),
    max_tokens=st.integers(0, 25),
)
def test_the_schedule_has_the_stretches_of_the_protocol(
    drafter, drafters_to_target, rest, lookahead, target_count, dispatch, max_tokens
):
    """Often a draft token and a verdict come at the same time."""
    setup = Setup(
        Strategy.DISTRIBUTED,
        steady(drafter * drafters_to_target + rest // 6),
        steady(drafter),
        lookahead=lookahead,
        target_count=target_count,
        dispatch=dispatch,
    )
    expected = stretches(setup, max_tokens=max_tokens)
    assert scheduled_stretches(setup, max_tokens=max_tokens) == expected


@settings(max_examples=examples(150), deadline=None)
@given(
    target=st.integers(1, 60),
    drafter=st.integers(1, 80),
    lookahead=st.integers(1, 70),
    max_tokens=st.integers(1, 100),
    acceptance_rate=st.sampled_from([0.0, 0.3, 0.7, 0.95, 1.0]),
    seed=st.integers(0, 10**6),
)
def test_an_si_generation_takes_the_sum_of_its_rounds(
    target, drafter, lookahead, max_tokens, acceptance_rate, seed
):
    setup = Setup(Strategy.SPECULATIVE, steady(target), steady(drafter), lookahead=lookahead)
    protocol = run_protocol(
        setup, acceptance_rate=acceptance_rate, max_tokens=max_tokens, seed=seed
    )
    runs = run_lengths(draw_agreements(acceptance_rate, max_tokens=max_tokens, seed=seed))
    time = speculative_time(runs, lookahead=lookahead, target_step=target, drafter_step=drafter)
    assert time == protocol.total_time


@settings(max_examples=examples(150), deadline=None)
@given(
    target=st.integers(1, 60),
    drafter_percent=st.integers(1, 100),
    lookahead=st.integers(1, 20),
    max_tokens=st.integers(1, 100),
    acceptance_rate=st.sampled_from([0.0, 0.3, 0.7, 0.95, 1.0]),
    seed=st.integers(0, 10**6),
)
def test_si_that_drafts_ahead_takes_what_is_left_of_its_drafting(
    target, drafter_percent, lookahead, max_tokens, acceptance_rate, seed
):
    drafter = max(1, target * drafter_percent // 100)
    setup = Setup(
        Strategy.SPECULATIVE,
        steady(target),
        steady(drafter),
        lookahead=lookahead,
        drafts_ahead=True,
    )
    protocol = run_protocol(
        setup, acceptance_rate=acceptance_rate, max_tokens=max_tokens, seed=seed
    )
    runs = run_lengths(draw_agreements(acceptance_rate, max_tokens=max_tokens, seed=seed))
    time = ahead_time(runs, lookahead=lookahead, target_step=target, drafter_step=drafter)
    assert time == protocol.total_time


@pytest.mark.parametrize("lookahead", [1, 3, 50])
@pytest.mark.parametrize("acceptance_rate", [0.0, 0.6, 1.0])
def test_the_expectation_of_drafting_ahead_is_the_mean_over_all_that_can_be_drawn(
    lookahead, acceptance_rate
):
    steps = {"target_step": 20, "drafter_step": 7}
    mean = sum(
        probability(agreements, acceptance_rate=acceptance_rate)
        * ahead_time(run_lengths(agreements), lookahead=lookahead, **steps)
        for agreements in product([False, True], repeat=8)
    )
    expected = expected_ahead_time(acceptance_rate, lookahead=lookahead, max_tokens=8, **steps)
    assert expected == pytest.approx(mean)


@pytest.mark.parametrize("dispatch", DispatchPolicy)
@pytest.mark.parametrize("acceptance_rate", [0.0, 0.6, 1.0])
def test_the_expectation_of_dsi_is_the_mean_over_all_that_can_be_drawn(dispatch, acceptance_rate):
    setup = Setup(
        Strategy.DISTRIBUTED,
        steady(20),
        steady(3),
        lookahead=2,
        target_count=3,
        dispatch=dispatch,
    )
    table = stretches(setup, max_tokens=8)
    mean = sum(
        probability(agreements, acceptance_rate=acceptance_rate)
        * distributed_time(run_lengths(agreements), table)
        for agreements in product([False, True], repeat=8)
    )
    assert expected_distributed_times(np.array([acceptance_rate]), table)[0] == pytest.approx(mean)


@pytest.mark.parametrize("lookahead", [1, 3, 50])
@pytest.mark.parametrize("acceptance_rate", [0.0, 0.6, 1.0])
def test_the_expectation_of_si_is_the_mean_over_all_that_can_be_drawn(lookahead, acceptance_rate):
    def mean(*, target_step: int, drafter_step: int) -> float:
        return sum(
            probability(agreements, acceptance_rate=acceptance_rate)
            * speculative_time(
                run_lengths(agreements),
                lookahead=lookahead,
                target_step=target_step,
                drafter_step=drafter_step,
            )
            for agreements in product([False, True], repeat=8)
        )

    drafts, rounds = expected_speculative_forwards(
        np.array([acceptance_rate]), lookahead=lookahead, max_tokens=8
    )
    assert drafts[0] == pytest.approx(mean(target_step=0, drafter_step=1))
    assert rounds[0] == pytest.approx(mean(target_step=1, drafter_step=0))


def test_stretches_are_refused_where_they_would_not_hold():
    """A drafter slower than the target falls behind it: then a correction is no fresh start."""
    slow_drafter = Setup(Strategy.DISTRIBUTED, steady(10), steady(11))
    with pytest.raises(AssertionError):
        stretches(slow_drafter, max_tokens=3)
    cold = Setup(Strategy.DISTRIBUTED, ServerLatency(50, 10), steady(5))
    with pytest.raises(AssertionError):
        stretches(cold, max_tokens=3)
    remote = Setup(Strategy.DISTRIBUTED, steady(10, call=1), steady(5))
    with pytest.raises(AssertionError):
        scheduled_stretches(remote, max_tokens=3)
