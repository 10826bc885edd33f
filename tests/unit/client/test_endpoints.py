"""Which orchestrator a call goes to, on a clock that is told the time."""

import pytest

from paceline.channel import Route
from paceline.connection import Connection
from paceline.endpoints import Endpoint, Endpoints
from paceline.errors import ConnectionLostError, InvalidFieldError


@pytest.fixture
def three(clock):
    return endpoints("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3", clock=clock)


def endpoints(*addresses, clock):
    routes = [Route.to(address, insecure=True) for address in addresses]
    return Endpoints(
        [Endpoint(it.address, Connection(it), leads_to_one=it.leads_to_one) for it in routes],
        clock=clock,
    )


def chosen(some, count=6):
    found = []
    for _ in range(count):
        with some.lent() as one:
            found.append(one)
    return found


def test_calls_that_follow_on_one_another_take_turns(three):
    assert chosen(three)[:3] == chosen(three)[3:]
    assert set(chosen(three)) == set(three)


def test_who_has_the_fewest_calls_is_next(three):
    with three.lent() as one, three.lent() as two, three.lent() as third:
        assert {one, two, third} == set(three)
    with three.lent() as busy:
        assert busy not in chosen(three)


def test_who_was_asked_comes_last(three):
    first, second, third = three
    with three.lent({first, second}) as one:
        assert one is third
    with three.lent(set(three)) as one:
        assert one in three


def test_who_failed_rests_longer_each_time_until_it_answers(three, clock):
    sick, *well = three
    for seconds in (0.1, 0.2, 0.4):
        three.failed(sick)
        clock.now += 0.99 * seconds
        assert set(chosen(three)) == set(well)
        clock.now += 0.02 * seconds
        assert sick in chosen(three)
    three.answered(sick)
    three.failed(sick)
    clock.now += 0.11
    assert sick in chosen(three)


def test_who_answers_while_it_rests_is_asked_again_at_once(three):
    sick, *_ = three
    three.failed(sick)
    three.answered(sick)
    assert sick in chosen(three)


def test_nobody_rests_longer_than_ten_seconds(three, clock):
    sick, *_ = three
    for _ in range(30):
        three.failed(sick)
        clock.now += 10.1
    assert sick in chosen(three)


def test_many_calls_that_end_together_are_one_failure(three, clock):
    sick, *_ = three
    for _ in range(50):
        three.failed(sick)
    clock.now += 0.11
    assert sick in chosen(three)


def test_who_does_not_serve_gets_nothing_while_another_does(three):
    silent, *serving = three
    silent.serves = False
    assert set(chosen(three)) == set(serving)
    for each in three:
        each.serves = False
    assert set(chosen(three)) == set(three)


def test_each_is_asked_once_what_none_answers(three):
    asked = set()
    lost = ConnectionLostError("gone")
    assert [three.is_another_left(lost, each, asked) for each in three] == [True, True, False]
    wrong = InvalidFieldError.of("x", "y")
    assert not three.is_another_left(wrong, next(iter(three)), set())


@pytest.mark.parametrize(
    ("addresses", "several"),
    [
        (["127.0.0.1:1"], False),
        (["localhost:1"], False),
        (["[::1]:1"], False),
        (["10.0.0.1:1"], False),
        (["unix:/tmp/x"], False),
        (["127.0.0.1:1", "127.0.0.1:2"], True),
        (["ipv4:127.0.0.1:1,127.0.0.1:2"], True),
        (["paceline.example:1"], True),
        (["dns:///paceline.example:1"], True),
    ],
)
def test_several_addresses_or_a_name_may_be_several_orchestrators(addresses, several, clock):
    assert endpoints(*addresses, clock=clock).may_be_several == several
