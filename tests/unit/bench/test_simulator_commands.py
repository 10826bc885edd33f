"""`paceline simulate` and `paceline plan`, as their users meet them."""

from __future__ import annotations

import csv
import json

import pytest

from paceline_bench.simulate import table1
from paceline_bench.simulate.heatmaps import Grid
from paceline_cli.__main__ import main

VICUNA = ("plan", "--target-ms", "37.7", "--drafter-ms", "2.5", "--acceptance", "0.63")
TINY = Grid((20, 60), (30, 80))


@pytest.fixture
def tiny_grid(monkeypatch):
    """A coarse grid that is coarser still, in this process."""
    monkeypatch.setattr(Grid, "coarse", lambda: TINY)


def run(capsys, *arguments):
    code = main(arguments)
    output = capsys.readouterr()
    return code, output.out, output.err


def test_table_1_is_shown_and_found_exact(capsys, tmp_path):
    code, out, _ = run(capsys, "simulate", "table1", "--output-directory", str(tmp_path))
    lines = [line.split() for line in out.splitlines()]
    assert code == 0
    assert ["non-SI", "2", "4", "8", "9"] in lines
    assert ["DSI,", "every", "draft", "token", "right", "8", "26", "50", "58"] in lines
    assert "All as in the paper." in out


def test_another_table_1_is_an_error(capsys, monkeypatch, tmp_path):
    wrong = [table1.TableRow("non-SI", (2, 4, 8, 8), (2, 4, 8, 9))]
    monkeypatch.setattr("paceline_bench.simulate.command.table1", lambda: wrong)
    code, out, _ = run(capsys, "simulate", "table1", "--output-directory", str(tmp_path))
    assert code == 1
    assert "8, not 9" in out
    assert "NOT as in the paper." in out


@pytest.mark.usefixtures("tiny_grid")
def test_everything_comes_as_pictures_tables_and_claims(capsys, tmp_path):
    arguments = ("--tokens", "10", "--repeats", "2", "--output-directory", str(tmp_path / "new"))
    findings = tmp_path / "findings.json"
    code, out, err = run(capsys, "simulate", *arguments, "--json", str(findings))
    assert code == 0
    content = json.loads(findings.read_text())
    assert content["table1_is_exact"] is True
    assert [row["figure"] for row in content["rows"]] == ["figure2", "figure7"]
    assert [row["lookahead"] for row in content["rows"]] == [None, 5]
    assert content["rows"][0]["dispatch"] == "blocks"
    assert content["rows"][0]["si_slower_below_count"] == 1
    assert content["rows"][0]["over_si"]["slower_count"] == 0
    names = {path.name for path in (tmp_path / "new").iterdir()}
    assert names == {"figure2.png", "figure2.csv", "figure7.png", "figure7.csv"}
    assert (tmp_path / "new" / "figure2.png").read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "new" / "figure7.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4
    assert {row["dsi_lookahead"] for row in rows} == {row["si_lookahead"] for row in rows} == {"5"}
    assert "SI is slower than non-SI in 1 of 4 cells: 1 of the 1" in out
    assert "drafter at 60 %" in err


@pytest.mark.usefixtures("tiny_grid")
def test_one_figure_can_be_had_as_svg(capsys, tmp_path):
    arguments = ("--tokens", "5", "--image", "svg", "--output-directory", str(tmp_path))
    assert run(capsys, "simulate", "figure2", *arguments)[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["figure2.csv", "figure2.svg"]
    assert "min(SI, non-SI) / DSI" in (tmp_path / "figure2.svg").read_text()


def test_a_plan_is_a_table_advice_a_picture_and_json(capsys, monkeypatch, tmp_path):
    picture, rows = tmp_path / "plan.svg", tmp_path / "plan.json"
    options = ("--gpus", "3", "--tokens", "10", "--repeats", "4")
    code, out, err = run(capsys, *VICUNA, *options, "--chart", str(picture), "--json", str(rows))
    assert code == 0
    steps = [line.strip() for line in err.splitlines()[1:]]
    assert len({*steps}) == len(steps) == 5
    assert {"speculative, 1 target", "speculative, 1 target, drafting ahead"} < {*steps}
    assert out.startswith("target 37.7 ms, drafter 2.5 ms, acceptance 63%; 10 tokens")
    assert "DSI on 2 targets" in out
    assert "times as fast as plain decoding" in out
    assert picture.read_text().startswith("<?xml")
    content = json.loads(rows.read_text())
    assert [row["gpu_count"] for row in content["rows"]] == [1, 1, 2, 2, 3]
    assert content["rows"][0]["mean_ms"] == 377


def test_a_plan_knows_a_target_that_drafts_for_itself(capsys, monkeypatch, tmp_path):
    rows, picture = tmp_path / "plan.json", tmp_path / "plan.svg"
    options = ("--gpus", "2", "--tokens", "11", "--repeats", "2", "--target-row-ms", "1")
    own = ("--self-rates", "1,1", "--self-nodes", "2", "--self-guess-ms", "0.3", "--rank-decay")
    kept = ("--json", str(rows), "--chart", str(picture))
    code, out, _ = run(capsys, *VICUNA, *options, *own, "0.5", *kept)
    assert code == 0
    assert "; 2 own guesses, right by 1, 1\n" in out
    assert "self-SI" in out
    last = json.loads(rows.read_text())["rows"][-1]
    assert last["strategy"] == "self-SI"
    # The prompt's, three of three rows, and the last token's, for which there is no guess left.
    assert last["mean_ms"] == pytest.approx(37.7 + 3 * (37.7 + 2 + 0.3) + 37.7)
    assert "self-SI" in picture.read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan", "--gpus", "3"), "paceline plan: --target-ms: is needed"),
        ((*VICUNA, "--gpus", "0"), "--gpus: Input should be greater than or equal to 1"),
        ((*VICUNA, "--gpus", "3", "--chart", "plan.gif"), "--chart: must end in .svg or .png"),
        ((*VICUNA, "--gpus", "3", "--branches", "1"), "--branches goes with a --width of 2 or"),
        ((*VICUNA, "--gpus", "3", "--self-nodes", "4"), "--self-nodes goes with --self-rates"),
        ((*VICUNA, "--gpus", "3", "--rank-decay", "1"), "--rank-decay goes with a --width of 2"),
        ((*VICUNA, "--gpu", "3"), "did you mean --gpus?"),
        (("simulate", "figure3"), "paceline simulate: WHAT: Input should be 'all', 'table1'"),
        (("simulate", "--tokens", "1"), "--tokens: Input should be greater than or equal to 2"),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_code_2(capsys, arguments, words):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_a_folder_that_cannot_be_made_is_known_before_the_work_is_done(capsys, tmp_path):
    (tmp_path / "file").touch()
    folder = str(tmp_path / "file" / "x")
    code, out, err = run(capsys, "simulate", "--output-directory", folder)
    assert (code, out) == (1, "")
    assert err.startswith(f"paceline: {tmp_path}")


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_help_has_examples(capsys, command):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"\n  paceline {command} " in capsys.readouterr().out
