from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_contract.shares import FairShares


def take_all(shares, name):
    while shares.allows(name):
        shares.take(name)
    return shares.held_by(name)


def test_who_is_alone_gets_four_fifths_and_who_comes_next_four_fifths_of_the_rest():
    shares = FairShares(100)

    assert take_all(shares, "greedy") == 80
    assert take_all(shares, "second") == 16


@pytest.mark.parametrize("capacity", [1, 2, 3, 4])
def test_of_a_small_capacity_one_alone_gets_everything(capacity):
    shares = FairShares(capacity)

    assert take_all(shares, "alone") == capacity


def test_who_holds_nothing_may_take_all_there_is_at_once():
    shares = FairShares(100)

    assert shares.allows("large", 100)
    assert not shares.allows("large", 101)


def test_what_was_given_back_can_be_taken_again():
    shares = FairShares(10)
    shares.take("a", 10)
    assert not shares.allows("b")

    shares.give_back("a", 10)

    assert (shares.free, shares.held_by("a")) == (10, 0)
    assert shares.allows("b", 10)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 8)), max_size=60))
def test_a_share_that_holds_nothing_is_refused_only_what_is_not_there(steps):
    shares = FairShares(40)
    for name, amount in steps:
        if shares.allows(name, amount):
            shares.take(name, amount)
        newcomer = shares.allows("newcomer", max(1, shares.free))
        assert newcomer == (shares.free > 0)
        assert shares.free == 40 - sum(map(shares.held_by, "abc")) >= 0
