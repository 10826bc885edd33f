"""What `paceline bench pair` keeps of its measurements."""

from __future__ import annotations

import pytest

from paceline_bench.pair.acceptance import Block
from paceline_bench.pair.contest import Contestant, Entry, Group, Method, Outcome
from paceline_bench.pair.engine import Latency
from paceline_bench.pair.random_models import RandomModel, Shape
from paceline_bench.pair.results import acceptance_row, all_identical, model_row, variant_rows


def entry(method, *, ms, wrong=0, **counts):
    outcome = Outcome(
        token_ids=(1, 2, 3, 4), elapsed_ns=round(4 * ms * 1e6), target_forwards=2, **counts
    )
    contestant = Contestant(Group.SERVICES, method, method.value, run=None, targets=1)
    return Entry(contestant, [[outcome, outcome]], wrong=wrong)


def test_a_model_is_kept_with_its_latencies_and_its_forwards_by_rows():
    description = RandomModel(Shape(1, 64), dtype="float32", device="cpu", threads=1).description
    latency = Latency(first_ms=(32, 48), later_ms=(8,) * 6)
    row = model_row(description, latency, {1: 8.0, 5: 16.0}, context=30)
    assert (row["ttft_ms"]["median"], row["ttft_ms"]["count"]) == (40, 2)
    assert (row["tpot_ms"]["median"], row["context"]) == (8, 30)
    assert row["rows_ms"] == {"1": 8.0, "5": 16.0}


def test_acceptance_is_kept_by_both_estimators_and_by_position():
    row = acceptance_row([2, 4], [Block(2, 2), Block(2, 0)], tokens=8, lookahead=2)
    assert (row["rate_by_common_runs"], row["accepted_shares"]) == (0.75, [0.5, 0.5])
    assert (row["rate_by_verdicts"], row["accepted_per_block"]) == (pytest.approx(2 / 3), 1)


def test_speeds_are_compared_with_the_first_variant_where_texts_are_equal():
    counts = {"forward_ns": 12_000_000, "accepted": 3, "rejected": 1}
    plain, speculative, wrong = variant_rows(
        [
            entry(Method.PLAIN, ms=10),
            entry(Method.SPECULATIVE, ms=5, **counts),
            entry(Method.DISTRIBUTED, ms=4, wrong=1),
        ]
    )
    assert (plain["tokens_per_second"], plain["speed_up"], plain["targets"]) == (100, 1, 1)
    assert (speculative["speed_up"], speculative["ms_per_token"]) == (2, 5)
    assert (speculative["acceptance_rate"], speculative["forward_ms_per_token"]) == (0.75, 3)
    assert speculative["tokens_per_forward"] == 2
    assert (wrong["identical"], wrong["different"], "speed_up" in wrong) == (False, 1, False)


@pytest.mark.parametrize("part", ["rows", "sharing_strategies"])
def test_all_texts_have_to_be_identical(part):
    content = {"rows": [], "sharing_strategies": []}
    assert all_identical(content)
    wrong = variant_rows([entry(Method.PLAIN, ms=1), entry(Method.DISTRIBUTED, ms=1, wrong=1)])
    assert not all_identical(content | {part: wrong})
