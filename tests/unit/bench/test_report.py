import json

import pytest

from paceline_bench.report import circumstances, goal_line, json_text, spread, write_json


def test_a_spread_is_the_median_and_the_outer_deciles():
    values = [float(value) for value in range(1, 21)]

    summary = spread(values[::-1])

    assert (summary.median, summary.low, summary.high, summary.count) == (10.5, 3.0, 18.0, 20)


def test_few_values_are_spread_from_the_smallest_to_the_largest():
    summary = spread([3.0, 1.0, 2.0])

    assert (summary.median, summary.low, summary.high) == (2.0, 1.0, 3.0)


def test_the_command_is_told_without_where_its_results_went(monkeypatch):
    options = ["--json", "/x/y.json", "--rows", "2", "--chart=y.png", "--output-directory", "/z"]
    monkeypatch.setattr("sys.argv", ["/bin/paceline", "bench", "table2", *options])
    assert circumstances()["command"] == "paceline bench table2 --rows 2"


def test_a_file_says_under_what_circumstances_it_was_made(tmp_path):
    write_json(tmp_path / "new" / "result.json", [{"name": "a"}], unit="ms")

    content = json.loads((tmp_path / "new" / "result.json").read_text())
    assert content["rows"] == [{"name": "a"}]
    assert content["unit"] == "ms"
    assert content["circumstances"]["python"].startswith("3.")
    assert content["circumstances"]["versions"]["grpcio"]


@pytest.mark.parametrize(("worst", "verdict"), [(0.99, "met"), (1.0, "met"), (1.01, "MISSED")])
def test_a_goal_is_met_by_the_worst_value_or_missed(worst, verdict):
    line = goal_line("ratio", [(0.5, "here"), (worst, "there")], limit=1)
    assert line == f"- ratio: at worst {worst:.3f} (there); goal 1: {verdict}"


def test_results_have_a_line_for_each_value_or_list_of_numbers():
    content = {"text": "[ 1,  2 ]", "tokens": [[12, -3], [4.5e-7]], "names": ["a", "b"], "none": []}
    text = json_text(content)
    assert json.loads(text) == content
    assert [line.strip() for line in text.splitlines() if "[" in line] == [
        '"text": "[ 1,  2 ]",', '"tokens": [', "[12, -3],", "[4.5e-07]", '"names": [', '"none": []'
    ]  # fmt: skip
