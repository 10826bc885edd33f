"""When a client tries again, on a clock of its own."""

import pytest

from paceline.call_plan import CallPlan, RetryBudget, timeout_seconds
from paceline.errors import (
    ConnectionLostError,
    DeadlineError,
    DrainingError,
    InvalidFieldError,
    OverloadedError,
)

LOST = ConnectionLostError("gone")
DRAINING = DrainingError("leaving")


def plan(clock, *, attempts=0, seconds=120.0, chance=0.0, budget=None):
    return CallPlan(
        seconds,
        resume_attempts=attempts,
        budget=budget or RetryBudget(clock=clock),
        clock=clock,
        chance=lambda: chance,
    )


def delays(calls, error, count, *, was_refused=False):
    return [calls.delay_seconds(error, was_refused=was_refused) for _ in range(count)]


def test_each_wait_is_twice_as_long_as_the_one_before_up_to_two_seconds(clock):
    told = delays(plan(clock, attempts=7), LOST, 7)
    assert told == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0])


def test_a_wait_is_longer_by_chance_up_to_half_of_it(clock):
    assert delays(plan(clock, attempts=2, chance=0.5), LOST, 2) == pytest.approx([0.125, 0.25])


def test_a_wait_that_a_server_asks_for_is_longer_by_a_second_at_most(clock):
    full = OverloadedError("full", retry_after_seconds=30)
    assert delays(plan(clock, attempts=1, chance=0.5), full, 1) == [30.5]


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_wait_that_a_server_says_is_over_is_the_clients_own(clock, seconds):
    lost = ConnectionLostError("gone", retry_after_seconds=seconds)
    assert delays(plan(clock, attempts=1), lost, 1) == [0.1]


def test_chance_differs_from_client_to_client(clock):
    def first():
        calls = CallPlan(9, resume_attempts=1, budget=RetryBudget(clock=clock), clock=clock)
        return calls.delay_seconds(LOST, was_refused=False)

    drawn = {first() for _ in range(10)}
    assert len(drawn) > 1
    assert all(0.1 <= each < 0.15 for each in drawn)


def test_what_cannot_pass_is_raised(clock):
    with pytest.raises(DeadlineError):
        plan(clock, attempts=9).delay_seconds(DeadlineError("over"), was_refused=True)


def test_a_wait_beyond_the_deadline_is_not_begun(clock):
    with pytest.raises(ConnectionLostError):
        plan(clock, attempts=9, seconds=0.1).delay_seconds(LOST, was_refused=False)


def test_three_refusals_of_a_draining_orchestrator_are_no_resumptions(clock):
    calls = plan(clock, attempts=1)
    assert len(delays(calls, DRAINING, 4, was_refused=True)) == 4
    with pytest.raises(DrainingError):
        calls.delay_seconds(DRAINING, was_refused=True)


def test_a_stream_that_a_draining_orchestrator_cut_is_one(clock):
    with pytest.raises(DrainingError):
        plan(clock).delay_seconds(DRAINING, was_refused=False)


def test_a_hundred_streams_go_on_at_once_and_then_ten_a_second(clock):
    budget = RetryBudget(clock=clock)
    told = [
        plan(clock, attempts=1, budget=budget).delay_seconds(LOST, was_refused=False)
        for _ in range(130)
    ]
    assert told[:101] == pytest.approx([0.1] * 101)
    assert told[-1] == pytest.approx(3.0)


def test_the_budget_is_whole_again_after_ten_seconds(clock):
    budget = RetryBudget(clock=clock)
    for _ in range(110):
        budget.take(within_seconds=9)
    clock.now = 11.0
    assert [budget.take(within_seconds=9) for _ in range(100)] == [0.0] * 100


def test_who_has_no_time_to_wait_takes_no_place(clock):
    budget = RetryBudget(clock=clock)
    for _ in range(100):
        budget.take(within_seconds=1)
    assert [budget.take(within_seconds=0.05) for _ in range(50)] == [None] * 50
    assert budget.take(within_seconds=1) == pytest.approx(0.1)


@pytest.mark.parametrize("seconds", [0, 0.5, 604800])
def test_a_time_is_as_long_as_it_says(seconds):
    assert timeout_seconds(seconds) == seconds


@pytest.mark.parametrize("seconds", [1e10, float("inf"), 10**400])
def test_a_time_is_a_week_at_most(seconds):
    assert timeout_seconds(seconds) == 604800


@pytest.mark.parametrize("seconds", [-1, float("-inf"), float("nan"), "1"])
def test_what_is_no_time_is_refused(seconds):
    with pytest.raises(InvalidFieldError, match="timeout"):
        timeout_seconds(seconds)


FULL = OverloadedError("full")


def asked_one_after_the_other(calls, error, count, *, endpoints=2):
    """Return the waits of a plan whose orchestrators all fail, each in its turn."""
    return [
        calls.delay_seconds(error, was_refused=True, endpoint=number % endpoints)
        for number in range(count)
    ]


def several(clock, **options):
    return CallPlan(
        120.0,
        resume_attempts=None,
        budget=RetryBudget(clock=clock),
        endpoint_count=2,
        clock=clock,
        chance=lambda: 0.0,
        **options,
    )


def test_nothing_is_waited_for_while_another_orchestrator_is_left(clock):
    calls = several(clock)
    assert asked_one_after_the_other(calls, LOST, 3) == pytest.approx([0.0, 0.1, 0.0])
    with pytest.raises(ConnectionLostError):
        calls.delay_seconds(LOST, was_refused=True, endpoint=1)


def test_a_text_that_has_begun_is_worth_thirty_rounds(clock):
    calls = several(clock)
    calls.hear()
    waits = asked_one_after_the_other(calls, LOST, 59)
    assert waits[1::2] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6] + 24 * [2.0])
    with pytest.raises(ConnectionLostError):
        calls.delay_seconds(LOST, was_refused=True, endpoint=1)


def test_with_each_text_all_begins_anew(clock):
    calls = several(clock)
    for _ in range(50):
        clock.now += 1
        assert asked_one_after_the_other(calls, LOST, 2) == pytest.approx([0.0, 0.1])
        calls.hear()
        assert not calls.asked


def test_one_full_round_of_refusals_is_the_last_word_to_an_unheard_request(clock):
    calls = several(clock)
    assert calls.delay_seconds(FULL, was_refused=True, endpoint=0) == 0
    with pytest.raises(OverloadedError):
        calls.delay_seconds(FULL, was_refused=True, endpoint=1)
