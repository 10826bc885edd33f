"""`paceline bench shaping` sums up turns: each kind beside none of the same turn."""

from __future__ import annotations

import pytest

from paceline_bench.shaping.measurement import NONE, Heard, rows


def turn(*seconds, token_ids=(1, 2)):
    return tuple(Heard(token_ids, 0.5, each) for each in seconds)


def test_a_kind_is_compared_with_none_turn_by_turn():
    turns = {
        NONE: [turn(0.1, 0.2, 0.3), turn(0.4, 0.4, 0.4)],
        "bias": [turn(0.4, 0.4, 0.4), turn(0.2, 0.2, 9.0)],
    }
    plain, bias = rows(turns, streams=3)
    assert plain["ratios"] == [1.0, 1.0]
    assert plain["tokens_per_second"] == pytest.approx(10)
    assert bias["ratios"] == [0.5, 2.0]
    assert (bias["kind"], bias["stream_count"], bias["identical"]) == ("bias", 3, True)


def test_texts_that_differ_between_turns_are_told():
    turns = {NONE: [turn(0.1), turn(0.1, token_ids=(1, 3))]}
    assert not rows(turns, streams=1)[0]["identical"]
