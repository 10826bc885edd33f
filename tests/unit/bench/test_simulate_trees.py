"""What trees are worth by simulation: known times, what is said of them, and who it is told."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import pytest

from paceline_bench.simulate.tree_tables import (
    self_finding,
)
from paceline_bench.simulate.trees import (
    TreeJob,
    compare_trees,
    grid_jobs,
    steady,
)
from paceline_cli.__main__ import main
from paceline_protocol.draft_shape import Shape
from paceline_protocol.laboratory.guesses import OwnGuesses
from paceline_protocol.ranks import runner_up_shares

TREE = Shape(3, 2)
JOB = TreeJob(
    name="here",
    servers=steady(0.1, 0.6, target_count=2),
    shapes=(TREE,),
    shares=runner_up_shares(0.4),
    token_count=20,
    repeats=6,
)


def test_each_method_stands_as_a_chain_and_with_each_shape_beside_si():
    gains = compare_trees(JOB)
    assert [(gain.strategy, gain.width, gain.branches) for gain in gains] == [
        ("SI", 1, 0),
        ("SI", 3, 2),
        ("SI ahead", 1, 0),
        ("SI ahead", 3, 2),
        ("DSI", 1, 0),
        ("DSI", 3, 2),
    ]
    si, _, ahead, _, dsi, dsi_tree = gains
    assert si.over_si == si.over_chain == ahead.over_chain == dsi.over_chain == 1
    assert si.over_si_error == 0
    for gain in gains:
        assert gain.over_si == pytest.approx(si.time / gain.time)
        assert gain.over_plain == pytest.approx(20 / gain.time)
    assert dsi_tree.over_chain == pytest.approx(dsi.time / dsi_tree.time)


def test_where_every_draft_token_is_right_times_are_known():
    """The last of 20 tokens needs no draft: DSI has it after 19 drafts and a forward."""
    job = replace(JOB, servers=steady(0.1, 1.0, target_count=20), shapes=())
    si, ahead, dsi = compare_trees(job)
    assert ahead.time == pytest.approx(19 * 0.1 + 1)
    assert dsi.time == pytest.approx(19 * 0.1 + 1)
    assert si.time == pytest.approx(19 * 0.1 + 1)
    assert si.lookahead >= 19


def test_what_each_gpu_is_worth_counts_the_drafters_with_dsi():
    """SI's drafter and target take turns, on one."""
    si, _, ahead, _, dsi, _ = compare_trees(JOB)
    assert (si.gpu_count, ahead.gpu_count, dsi.gpu_count) == (1, 2, 3)
    assert si.per_gpu == si.over_plain
    assert ahead.per_gpu == pytest.approx(ahead.over_plain / 2)
    assert dsi.per_gpu == pytest.approx(dsi.over_plain / 3)


def test_rows_with_a_price_make_speculation_slower():
    dear = replace(JOB, servers=steady(0.1, 0.6, target_count=2, target_row=0.2, drafter_row=0.5))
    for free, priced in zip(compare_trees(JOB), compare_trees(dear), strict=True):
        assert priced.time > free.time


def test_a_grid_keeps_the_price_of_rows_and_the_targets():
    job = replace(JOB, servers=steady(0.5, 0.5, target_count=7, target_row=0.02, drafter_row=0.1))
    first, *_, last = grid_jobs(job, drafters=(0.1, 0.4), rates=(0.3, 0.9))
    assert first.name == "drafter 0.1, acceptance 0.3"
    assert (last.servers.drafter.step, last.servers.acceptance_rate) == (4000, 0.9)
    assert {(each.servers.target.row, each.servers.target_count) for each in (first, last)} == {
        (200, 7)
    }
    assert (first.servers.drafter.row, last.servers.drafter.row) == (100, 400)


def test_own_guesses_are_worth_what_the_rates_say_and_rows_cost():
    """Always right: after the first forward each gives three tokens, for the price of two rows."""
    job = replace(
        JOB,
        servers=steady(0.1, 0.6, target_count=2, target_row=0.1),
        shapes=(),
        token_count=19,
        guesses=OwnGuesses((1.0, 1.0), ((0,), (0, 0))),
    )
    si, _, dsi, own = compare_trees(job)
    assert (si.strategy, dsi.strategy, own.strategy) == ("SI", "DSI", "self-SI")
    assert own.tokens_per_forward == pytest.approx(19 / 7)
    assert own.time == pytest.approx(1 + 6 * 1.2)
    assert own.over_plain == pytest.approx(19 / own.time)
    assert own.over_si == pytest.approx(si.time / own.time)
    assert (own.lookahead, own.gpu_count, own.target_count) == (0, 1, 1)
    said = self_finding([si, dsi, own])
    assert said.startswith("self-SI: 2.71 tokens for each forward, 2.32x of plain decoding; ahead")
    ahead = [int(each.over_si < own.over_si) for each in (si, dsi)]
    assert f"ahead of SI in {ahead[0]} of 1; ahead of DSI, 2 targets in {ahead[1]} of 1" in said


def run(capsys, *arguments):
    code = main(arguments)
    output = capsys.readouterr()
    return code, output.out, output.err


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr("paceline_bench.simulate.trees_command._COARSE", ((0.1, 0.4), (0.5, 0.9)))


SHORT = ("--tokens", "8", "--repeats", "2", "--sp", "1,2", "--widths", "2,3", "--branches", "1")


@pytest.mark.usefixtures("small")
def test_a_grid_of_trees_comes_as_pictures_and_tables(capsys, tmp_path):
    findings = tmp_path / "trees.json"
    options = ("--output-directory", str(tmp_path), "--json", str(findings))
    code, out, err = run(capsys, "simulate", "trees", *SHORT, *options)
    assert code == 0
    assert out.startswith("2 generations of 8 tokens, decoding alone; rank decay 0.4")
    assert "DSI, 2 targets, width 3, 1 branches: up to" in out
    assert "drafter 0.4, acceptance 0.9, 2 target(s)" in err
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"trees-2-1.png", "trees-3-1.png", "trees.csv", "trees.json"}
    with (tmp_path / "trees.csv").open() as file:
        rows = list(csv.DictReader(file))
    # Four cells: SI's chain and its two trees, resting and ahead, which have no SP degree, and
    # DSI's for two of them.
    assert len(rows) == len(json.loads(findings.read_text())["rows"]) == 4 * (2 * 3 + 2 * 3)


@pytest.mark.usefixtures("small")
def test_the_rows_of_table_2_come_with_what_each_gpu_is_worth(capsys, tmp_path):
    options = ("--output-directory", str(tmp_path), "--per-gpu", "--rank-decay", "llama")
    code, out, _ = run(capsys, "simulate", "table2", *SHORT, "--target-row", "0.01", *options)
    assert code == 0
    assert "rank decay llama; rows 0.01 and 0" in out
    lines = [line for line in out.splitlines() if line.startswith("| vicuna-13b/cnn-dm | DSI | 2")]
    assert [line.split(" | ")[3] for line in lines] == ["-", "2, 1", "3, 1"]
    assert all(line.split(" | ")[9] == "3" for line in lines)


@pytest.mark.usefixtures("small")
def test_a_target_that_drafts_for_itself_comes_beside_them(capsys, tmp_path):
    options = ("--self-rates", "0.9,0.8", "--self-nodes", "4", "--output-directory", str(tmp_path))
    code, out, _ = run(capsys, "simulate", "table2", *SHORT, *options)
    assert code == 0
    assert "; 4 own guesses, right by 0.9, 0.8\n- self-SI: " in out
    (line,) = [line for line in out.splitlines() if line.startswith("| vicuna-13b/cnn-dm | self")]
    assert line.split(" | ")[2:5] == ["1", "-", "-"]
    assert float(line.split(" | ")[5]) > 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("trees", "--rank-decay", "0"), "'0' is neither above 0 and at most 1 nor 'llama'"),
        (("trees", "--rank-decay", "fast"), "'fast' is neither above 0"),
        (("trees", "--widths", "17"), "'17' is not within 1 to 16"),
        (("table1", "--per-gpu"), "--per-gpu goes with pictures and rows, not table1"),
        (
            ("figure2", "--self-rates", "0.5"),
            "--self-rates goes with trees and table2, not figure2",
        ),
        (("figure2", "--widths", "2"), "--widths goes with trees and table2, not figure2"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(capsys, arguments, words):
    with pytest.raises(SystemExit) as ended:
        main(("simulate", *arguments))
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_leaves_gain_what_the_formula_allows_and_not_much_less():
    """DSI on 7 targets, 25 draws, within 4 standard errors of the bound."""
    leaves = Shape(4)
    servers, shares = steady(0.066, 0.63, target_count=7), runner_up_shares(0.4)
    job = replace(JOB, servers=servers, shapes=(leaves,), shares=shares, token_count=50, repeats=25)
    gain = compare_trees(job)[-1]
    assert (gain.strategy, gain.width, gain.branches) == ("DSI", 4, 0)
    most = 1 + (1 - 0.63) * sum(shares[:3])  # a rejection that is a hit tells one token more
    assert 0.9 * most < gain.over_chain <= most + 4 * gain.over_chain_error
