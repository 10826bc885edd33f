"""What is learnt of draft tokens by their rank."""

from __future__ import annotations

from collections import Counter

import pytest

from paceline_contract.limits import MOST_LORA_ADAPTERS
from paceline_orchestrator.planning.hit_rates import HitRates, LearntRates, Pair
from paceline_protocol.draft_statistics import DraftStatistics
from paceline_protocol.ranks import MOST_WIDTH


def seen(**ranks):
    """Places at which the token of each rank was right, by `r` and its rank."""
    return DraftStatistics(ranks=Counter({int(name[1:]): n for name, n in ranks.items()}))


def test_at_the_start_rates_are_assumed_for_every_rank_and_leave_room_for_none():
    rates = HitRates().by_rank
    assert len(rates) == MOST_WIDTH
    assert list(rates) == sorted(rates, reverse=True)
    assert sum(rates) < 1


def test_a_rank_is_judged_by_the_places_where_all_before_it_were_wrong():
    rates = HitRates()
    for _ in range(20):
        rates.learn(seen(r1=700, r2=150, r3=75, r0=75), width=3)
    assert rates.decays[:2] == pytest.approx((0.5, 0.5), abs=0.01)
    assert rates.decays[2] == 0.4, "nobody saw a fourth"


def test_a_correction_that_was_a_runner_up_is_no_first_choice_that_was_right_or_judged():
    rates = HitRates()
    # Of 100 first choices half were right; 20 of the others had their correction behind them.
    rates.learn(
        DraftStatistics(accepted=70_000, corrections_ahead=20_000, rejected=50_000), width=2
    )
    assert rates.acceptance_rate == pytest.approx(0.5, abs=0.001)


def test_what_is_doubted_goes_back_to_what_is_assumed():
    rates = HitRates()
    rates.learn(seen(r0=1000), width=2)
    for _ in range(5000):
        rates.doubt()
    assert rates.decays[0] == pytest.approx(0.4, abs=0.05)


def test_the_rates_of_pairs_that_are_gone_are_forgotten():
    learnt = LearntRates()
    kept, gone = Pair("target", "kept"), Pair("target", "gone")
    rates = {pair: learnt.of(pair) for pair in (gone, kept)}
    for number in range(1000):
        learnt.of(Pair("target", str(number)))
        learnt.of(kept)
    assert learnt.of(kept) is rates[kept]
    assert learnt.of(gone) is not rates[gone]


def test_a_model_is_remembered_with_all_the_adapters_that_it_may_have():
    learnt = LearntRates()
    pairs = [Pair(f"target with {it}", "drafter") for it in range(1 + MOST_LORA_ADAPTERS)]
    rates = {pair: learnt.of(pair) for pair in pairs}
    assert all(learnt.of(pair) is rates[pair] for pair in pairs)
