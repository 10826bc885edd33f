"""`paceline bench self --sweep`: which trees are tried, and what is said of them."""

from __future__ import annotations

import pytest

from paceline_bench.self_drafting.sweep import Case, SweepPlan, SweptTree, sweep, trees_of
from paceline_bench.self_drafting.sweep_chart import draw_sweep
from paceline_bench.self_drafting.tables import sweep_report
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


def test_every_way_decodes_the_same_and_plain_decoding_comes_first(swept):
    rows, told = swept
    plain, *others = rows
    assert told == ["13 ways"] * 2
    assert (plain["tokens_per_forward"], plain["rows_per_forward"]) == (1, 1)
    assert (plain["nodes"], plain["times_as_fast"]) == (0, 1)
    assert all(row["identical"] for row in rows)
    # Four trees; only streams can prune.
    assert [row["adapter"] for row in others] == ["streams"] * 8 + ["medusa"] * 4
    for row in others:
        assert 1 < row["rows_per_forward"] <= 1 + row["nodes"]
        assert row["tokens_per_forward"] >= 1


def test_pruned_ways_have_fewer_rows_in_the_upper_layers(swept):
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


def test_the_report_names_the_fastest_of_each_adapter():
    plain = Case(texts=[[1, 2]], tokens=2, forwards=2, rows=2, seconds=1.0)
    fast = case([1, 2], seconds=0.5, forwards=1, rows=3, dropped=1, prune_below=0.01)
    slow = case([1, 2], seconds=2.0, forwards=1, rows=3)
    wrong = case([1, 3], seconds=0.1, forwards=1, rows=3)
    content = {"rows": [each.row(plain) for each in (plain, fast, slow, wrong)]}
    told = sweep_report(content)
    assert "| non-SI | - | - | - | - | 1.00 | 1.0 | 1.0 | 2 | 1.00x | identical |" in told
    assert "| it | k = 2 | 1 | 2 | 0.01 | 2.00 | 3.0 | 2.0 | 4 | 2.00x | identical |" in told
    assert "DIFFERENT" in told
    assert (
        "- it: fastest with 2 guesses (k = 2, gamma 1, pruned below 0.01): 2.00x of plain decoding"
        in told
    )


def test_a_sweep_is_drawn_for_each_adapter(swept):
    rows, _ = swept
    figure = draw_sweep({"rows": rows})
    assert len(figure.axes) == 2 * 3
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert "k = 2, pruned below 0.004" in labels
    # The line of k = 2 goes over its trees' sizes.
    line = figure.axes[0].lines[labels.index("k = 2")]
    assert list(line.get_xdata()) == [2, 6, 14]


def test_where_adapters_differ_in_layers_that_is_drawn_too(swept):
    rows, _ = swept
    deeper = [
        row | {"adapter": "deep", "layers": 3, "tokens_per_forward": 2 + row["nodes"] / 100}
        for row in rows
        if row["adapter"] == "streams"
    ]
    figure = draw_sweep({"rows": [*rows, *deeper]})
    assert len(figure.axes) == 4 * 3
    axes = figure.axes[9]
    assert axes.get_xlabel() == "layers with streams"
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    # Its largest tree, unpruned.
    line = axes.lines[labels.index("k = 2, 14 guesses")]
    (unpruned,) = (
        row["tokens_per_forward"]
        for row in rows
        if (row["adapter"], row["nodes"], row["prune_below"]) == ("streams", 14, 0)
    )
    assert line.get_xydata().tolist() == [[2, unpruned], [3, 2.14]]
