"""What `paceline bench self` makes of what every variant decoded."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from paceline import Strategy
from paceline_bench.self_drafting.tables import break_even
from paceline_bench.variants import Variant, compete, parameter_count, row_of


def completion(*token_ids, seconds=1.0, models=(), lookahead=0, targets=1, **counts):
    statistics = {
        "target_forward_count": len(token_ids),
        "drafter_forward_count": 0,
        "drafted_token_count": 0,
        "accepted_token_count": 0,
        "rejected_token_count": 0,
        "total_ns": round(seconds * 1e9),
        "drafter_models": models,
    }
    statistics |= {f"{name}_count": count for name, count in counts.items()}
    finished = SimpleNamespace(
        statistics=SimpleNamespace(**statistics), lookahead=lookahead, targets_used=targets
    )
    return SimpleNamespace(token_ids=token_ids, finished=finished)


def variant(name, strategy=Strategy.AUTOREGRESSIVE, **facts):
    return Variant(name=name, client=None, strategy=strategy, **facts)


PLAIN = [completion(1, 2, 3, 4), completion(5, 6, 7, 8)]


def a_row(name="self-SI", *, strategy=Strategy.SELF_SPECULATIVE, tokens=(1, 2, 3, 4)):
    own = [
        completion(*tokens, seconds=0.5, target_forward=2, drafted_token=6, accepted_token=2),
        completion(5, 6, 7, 8, seconds=0.25, target_forward=2, drafted_token=6, accepted_token=2),
    ]
    return row_of(variant(name, strategy, extra_parameters=20_480), own, plain=PLAIN)


def test_a_row_has_tokens_and_rows_of_a_forward_and_the_ratio_of_times():
    row = a_row()
    assert (row["tokens"], row["target_forwards"]) == (8, 4)
    assert row["tokens_per_forward"] == 2
    assert row["rows_per_forward"] == 4
    assert row["times_as_fast"] == pytest.approx(2 / 0.75)
    assert row["repeats_times_as_fast"] == [2, 4]
    assert row["identical"]


def test_a_row_has_each_models_forwards_and_what_lookaheads_there_were():
    def ran(lookahead, **counts):
        models = [SimpleNamespace(model_name=it, forward_count=n) for it, n in counts.items()]
        return completion(1, 2, 3, 4, models=models, lookahead=lookahead)

    own = [ran(3, base=4, small=9), ran(2, base=1, small=2), ran(3, base=1, small=0)]
    row = row_of(variant("SI"), own, plain=own)
    assert row["drafter_models"] == {"base": 6, "small": 11}
    assert row["lookaheads"] == [2, 3]


def test_a_drafters_gpu_counts_where_it_does_not_wait_for_the_target():
    def gpus(strategy, *, used, drafter_forwards):
        own = [completion(1, targets=each, drafter_forward=drafter_forwards) for each in used]
        return row_of(variant("", strategy, targets=7), own, plain=own)["gpu_count"]

    assert gpus(Strategy.DISTRIBUTED, used=(1, 2), drafter_forwards=5) == 3
    assert gpus(Strategy.DISTRIBUTED, used=(2,), drafter_forwards=0) == 2  # by the text alone
    assert gpus(Strategy.SPECULATIVE, used=(1,), drafter_forwards=5) == 1


def test_the_break_even_is_of_both_variants_times_a_forward_and_of_the_variants_own_tokens():
    two = {"name": "SI", "tokens_per_forward": 1.5, "tokens_per_second": 10.0}
    own = {"name": "self-SI", "tokens_per_forward": 2.5, "tokens_per_second": 8.0}
    # 0.15 s a forward against 0.3125 s.
    assert break_even(own, two=two) == (
        "- as good as self-SI, SI would have to give 1.20 tokens for each target forward"
        " (0.48 times as many); it gives 1.50"
    )


def test_parameters_are_counted_from_the_files_head(tmp_path):
    path = tmp_path / "adapter.safetensors"
    save_file({"a": torch.zeros(3, 4), "b": torch.zeros(5)}, path, metadata={"kind": "x"})
    assert parameter_count(path) == 17


async def test_who_comes_first_with_a_text_changes_from_text_to_text():
    order = []

    class Recorded:
        def __init__(self, name):
            self.name = name

        async def decode(self, prompt, *, max_tokens):
            order.append((self.name, prompt))
            return completion(1)

    variants = [Recorded("a"), Recorded("b")]
    told = [it async for it in compete(variants, ["x", "y"], max_tokens=4, repeats=2)]
    assert order[:2] == [("a", "x"), ("b", "x")]  # warm-up
    assert order[2:6] == [("a", "x"), ("b", "x"), ("b", "y"), ("a", "y")]
    assert len(told) == 8
