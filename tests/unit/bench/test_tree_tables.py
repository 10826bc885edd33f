"""What a page says of token trees on Table 2."""

from __future__ import annotations

import pytest

from paceline_bench.table2.tree_tables import table2_trees, table2_trees_headline


def row(strategy, targets, ms, gain=None, ideal=None):
    return {
        "name": "vicuna/cnn",
        "strategy": strategy,
        "target_counts": [targets],
        "median_ms": ms,
        "speed_up_over_si": gain,
        "ideal_speed_up_over_si": ideal,
        "repeats": 3,
        "width": 4,
        "branches": 2,
    }


def run(targets, *, tree_gain):
    return {
        "rows": [row("SI", 1, 1200.4), row("DSI", targets, 1000.0, 1.2, 1.25)],
        "trees": [row("SI", 1, 900.0, 1.33, 1.4), row("DSI", targets, 800.0, tree_gain, 1.6)],
    }


@pytest.fixture
def results():
    return {
        "table2": run(7, tree_gain=9.0),
        "table2-trees-7": run(7, tree_gain=1.55),
        "table2-trees-2": run(2, tree_gain=1.5),
    }


def test_a_line_has_si_and_then_each_number_of_targets(results):
    words, _, headings, _, line = table2_trees(results).strip().split("\n")
    assert "3 prompts, width 4, branches 2;" in words
    assert headings.index("DSI, 2 targets") < headings.index("DSI, 7 targets")
    assert line == (
        "| vicuna/cnn | 1200 | 1.33x | 1.40x | 1.20x | 1.50x | 1.60x | 1.20x | 1.55x | 1.60x |"
    )


def test_a_way_whose_output_differed_has_no_gain(results):
    del results["table2-trees-7"]
    for each in results["table2-trees-2"]["trees"]:
        each["speed_up_over_si"] = None
    line = table2_trees(results).strip().split("\n")[-1]
    assert line == "| vicuna/cnn | 1200 | - | 1.40x | 1.20x | - | 1.60x |"


def test_without_results_it_says_nothing(results):
    assert not table2_trees({"table2": results["table2"]})


def test_the_headline_is_of_the_fewest_targets(results):
    assert table2_trees_headline(results) == (
        "**With token trees**, on its Vicuna rows: SI, on one target, 1.33 to 1.33 times as fast as"
        " without them, DSI on 2 targets 1.50 to 1.50 times as fast as SI without them. How"
        " often a runner-up is right is assumed."
    )
