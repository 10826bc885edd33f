"""`paceline bench self --sweep`: which trees are tried, and what is said of them."""

from __future__ import annotations

import pytest

from paceline_bench.self_drafting.sweep import Case, SweepPlan, SweptTree, sweep, trees_of
from paceline_engine.terms.rank_paths import cartesian_tree
from paceline_engine.torch_backend.adapters.card import AdapterCard
from support.tiny_adapters import write_adapter
from support.tiny_models import tiny_pair

__all__ = ["tiny_pair"]

RATES = [[0.5, 0.2, 0.1], [0.4, 0.2, 0.1], [0.3, 0.1, 0.1]]
PLAN = SweepPlan(widths=(2,), sizes=(3,), thresholds=(0.0, 0.004), max_tokens=6)


@pytest.fixture(scope="module")
def swept(tiny_pair, tmp_path_factory):
    """The rows of both adapters, and what was told meanwhile."""
    root, told = tmp_path_factory.mktemp("adapters"), []
    adapters = {
        kind: write_adapter(
            root / kind,
            tiny_pair.target,
            kind=kind,
            tree=((0,),),
            training={"hit_rates": RATES},
        )
        for kind in ("streams", "medusa")
    }
    rows = sweep(tiny_pair.target, adapters, ["def a", "import"], plan=PLAN, tell=told.append)
    return rows, told


def test_each_reach_and_width_is_tried_and_the_likeliest(tiny_pair, tmp_path):
    directory = write_adapter(
        tmp_path / "it",
        tiny_pair.target,
        kind="medusa",
        tree=((0,),),
        training={"hit_rates": RATES},
    )
    plan = SweepPlan(widths=(1, 6), sizes=(2,), thresholds=(0.0,), max_tokens=9)
    trees = list(trees_of(AdapterCard.read(directory), plan))
    # Six in a row would be 258 at a reach of three: too many.
    assert [(tree.kind, tree.reach, len(tree.paths)) for tree in trees] == [
        ("k = 1", 1, 1),
        ("k = 1", 2, 2),
        ("k = 1", 3, 3),
        ("k = 6", 1, 6),
        ("k = 6", 2, 42),
        ("likeliest", 2, 2),
    ]
    assert trees[4].paths == cartesian_tree((6, 6))


def test_every_variant_decodes_the_same_and_plain_decoding_comes_first(swept):
    rows, told = swept
    plain, *others = rows
    assert told == ["13 variants"] * 2
    assert (plain["tokens_per_forward"], plain["rows_per_forward"]) == (1, 1)
    assert (plain["nodes"], plain["times_as_fast"]) == (0, 1)
    assert all(row["identical"] for row in rows)
    # Four trees; only streams can prune.
    assert [row["adapter"] for row in others] == ["streams"] * 8 + ["medusa"] * 4
    for row in others:
        assert 1 < row["rows_per_forward"] <= 1 + row["nodes"]
        assert row["tokens_per_forward"] >= 1


def test_pruned_variants_have_fewer_rows_in_the_upper_layers(swept):
    rows, _ = swept
    for row in rows[1:]:
        if row["prune_below"]:
            assert row["upper_rows_per_forward"] < row["rows_per_forward"]
        else:
            assert row["upper_rows_per_forward"] == row["rows_per_forward"]


def case(*texts, seconds, **facts):
    tree = SweptTree("k = 2", 1, ((0,), (1,)))
    tokens = sum(map(len, texts))
    return Case("it", tree, texts=list(texts), tokens=tokens, seconds=seconds, **facts)


def test_a_row_is_of_all_texts_beside_plain_decoding():
    plain = case([1, 2, 3], [4, 5, 6], seconds=2.0, forwards=6, rows=6)
    row = case([1, 2, 3], [4, 5, 6], seconds=1.0, forwards=4, rows=12, dropped=2).row(plain)
    assert row["tokens_per_forward"] == 1.5
    assert (row["rows_per_forward"], row["upper_rows_per_forward"]) == (3, 2.5)
    assert (row["tokens_per_second"], row["times_as_fast"]) == (6, 2)
    assert row["identical"]
    assert not case([1, 2, 3], [4, 5, 7], seconds=1.0, forwards=4).row(plain)["identical"]
