from __future__ import annotations

import random

from paceline_engine.scheduling.fair_queue import Turns


def serve(turns: Turns, shares: list[str], lengths) -> str:
    """Serve one forward of the share whose turn it is; equal turns go to the first."""
    share = min(shares, key=turns.of)
    turns.begin(share)
    turns.charge(share, lengths[share])
    return share


def test_equal_forwards_take_turns_one_by_one():
    turns = Turns()
    served = [serve(turns, ["a", "b", "c"], dict.fromkeys("abc", 5)) for _ in range(9)]
    assert served == list("abcabcabc")


def test_shares_that_all_want_service_get_as_much_of_it_within_one_forward_each():
    draw = random.Random(3)
    turns, had = Turns(), dict.fromkeys("abcd", 0)
    longest = {"a": 1, "b": 10, "c": 100, "d": 1000}
    for _ in range(20_000):
        lengths = {share: draw.randint(1, length) for share, length in longest.items()}
        share = serve(turns, list("abcd"), lengths)
        had[share] += lengths[share]
        for one in "abcd":
            for other in "abcd":
                assert had[one] - had[other] <= longest[one] + longest[other]


def test_who_comes_back_saved_up_no_turns():
    turns = Turns()
    for _ in range(100):
        serve(turns, ["busy"], {"busy": 7})
    served = [serve(turns, ["busy", "back"], {"busy": 7, "back": 7}) for _ in range(10)]
    assert served.count("back") == 5


def test_who_had_a_long_forward_waits_until_the_others_had_as_much():
    turns = Turns()
    lengths = {"long": 100, "short": 10}
    assert serve(turns, ["long", "short"], lengths) == "long"
    served = [serve(turns, ["long", "short"], lengths) for _ in range(11)]
    assert served == ["short"] * 10 + ["long"]


def test_after_a_rest_all_start_anew():
    turns = Turns()
    lengths = {"long": 100, "short": 10}
    serve(turns, ["long"], lengths)
    turns.rest()
    assert turns.of("long") == turns.of("short")


def test_shares_that_are_not_ahead_are_forgotten():
    turns = Turns()
    for index in range(1000):
        turns.charge(f"share {index}", 5)
        turns.charge("always there", 1)
        turns.begin("always there")
    assert len(turns._clocks) < 10


def test_a_share_with_two_texts_in_a_forward_pays_for_both():
    turns = Turns()
    turns.begin("two")
    turns.charge("two", 10)
    turns.charge("two", 10)
    served = [serve(turns, ["two", "one"], {"two": 10, "one": 10}) for _ in range(3)]
    assert served == ["one", "one", "two"]


def test_a_share_that_rides_along_in_another_ones_forward_pays_beyond_what_it_owed():
    turns = Turns()
    lengths = {"ahead": 30, "behind": 10}
    assert serve(turns, ["ahead", "behind"], lengths) == "ahead"
    turns.begin("behind")
    turns.charge("behind", 10)
    turns.charge("ahead", 10)
    served = [serve(turns, ["ahead", "behind"], lengths) for _ in range(4)]
    assert served == ["behind", "behind", "behind", "ahead"]
