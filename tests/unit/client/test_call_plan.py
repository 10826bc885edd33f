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
    options.setdefault("budget", RetryBudget(clock=clock))
    return CallPlan(
        120.0,
        resume_attempts=None,
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


def test_a_text_that_has_begun_is_asked_on_about_for_as_long_as_the_client_is_patient(clock):
    budget = RetryBudget(patience_seconds=3, clock=clock)
    calls = several(clock, budget=budget)
    for _ in range(2):
        calls.hear()
        for now in (0, 1, 2.9):
            clock.now = now
            asked_one_after_the_other(calls, LOST, 2)
        clock.now = 3
        calls.asked.add(0)
        with pytest.raises(ConnectionLostError):
            calls.delay_seconds(LOST, was_refused=True, endpoint=1)
        clock.now = 0


def test_with_each_text_all_begins_anew(clock):
    calls = several(clock)
    for _ in range(50):
        clock.now += 1
        assert asked_one_after_the_other(calls, LOST, 2) == pytest.approx([0.0, 0.1])
        calls.hear()
        assert not calls.asked


def test_who_failed_before_a_text_is_left_to_ask_after_it(clock):
    calls = several(clock)
    assert calls.delay_seconds(LOST, was_refused=False, endpoint=0) == 0
    calls.hear()
    assert not calls.asked
    assert calls.delay_seconds(LOST, was_refused=False, endpoint=1) == 0, "the first one is left"


def test_one_full_round_of_refusals_is_the_last_word_to_an_unheard_request(clock):
    calls = several(clock)
    assert calls.delay_seconds(FULL, was_refused=True, endpoint=0) == 0
    with pytest.raises(OverloadedError):
        calls.delay_seconds(FULL, was_refused=True, endpoint=1)


# What each library says of REFUSED_STREAM: gRPC's core, grpc-go, grpc-js, grpc-java, Envoy.
REFUSALS = (
    "Stream removed (RST_STREAM (Received RST_STREAM with error code 7))",
    "stream terminated by RST_STREAM with error code: REFUSED_STREAM",
    "Stream refused by server",
    "RST_STREAM closed stream. HTTP/2 error code: REFUSED_STREAM",
    "upstream connect error or disconnect/reset. reset reason: remote refused stream reset",
)
REFUSED = ConnectionLostError(REFUSALS[0])


@pytest.mark.parametrize("words", REFUSALS)
def test_a_refused_stream_is_sent_again_and_is_no_resumption(clock, words):
    refused = ConnectionLostError(words)
    calls = plan(clock, chance=0.5)
    told = delays(calls, refused, 10, was_refused=True)
    assert told == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0, 2.0, 2.0])
    with pytest.raises(ConnectionLostError):
        calls.delay_seconds(refused, was_refused=True)


def test_a_text_has_refused_streams_sent_again_as_often_as_at_first(clock):
    calls = plan(clock, chance=0.5)
    told = delays(calls, REFUSED, 10, was_refused=True)
    calls.hear()
    assert delays(calls, REFUSED, 10, was_refused=True) == told


def test_the_pauses_of_refused_streams_are_random(clock):
    assert delays(plan(clock, chance=0.0), REFUSED, 1, was_refused=True) == [0.05]
    assert delays(plan(clock, chance=0.9), REFUSED, 1, was_refused=True) == pytest.approx([0.14])


def test_more_refused_streams_than_the_budget_has_places_are_sent_again_at_once(clock):
    budget = RetryBudget(clock=clock)
    for _ in range(1000):
        pause = delays(plan(clock, budget=budget), REFUSED, 1, was_refused=True)
        assert pause == [0.05]


@pytest.mark.parametrize(
    ("error", "was_refused"),
    [
        (REFUSED, False),
        (ConnectionLostError("RST_STREAM with error code 8"), True),
        (ConnectionLostError("RST_STREAM with error code 77"), True),
        (ConnectionLostError("Connection refused"), True),
        (OverloadedError("refused stream"), True),
    ],
)
def test_a_stream_that_was_begun_or_failed_otherwise_is_not_sent_again(clock, error, was_refused):
    with pytest.raises(type(error)):
        plan(clock).delay_seconds(error, was_refused=was_refused)


def test_a_refused_stream_is_not_sent_again_beyond_its_deadline(clock):
    with pytest.raises(ConnectionLostError):
        plan(clock, seconds=0.05).delay_seconds(REFUSED, was_refused=True)


def test_a_refused_stream_goes_to_another_orchestrator_without_a_pause(clock):
    calls = CallPlan(
        9, budget=RetryBudget(clock=clock), endpoint_count=2, clock=clock, chance=lambda: 0.5
    )
    told = [
        calls.delay_seconds(REFUSED, was_refused=True, endpoint=each) for each in ("a", "b", "a")
    ]
    assert told == [0.0, 0.2, 0.0]
