"""`paceline bench table2` as its user runs it: what it says, never how fast it was."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

pytestmark = pytest.mark.long

BENCH = (sys.executable, "-m", "paceline_cli", "bench", "table2")
SMALL = ("--repeats", "1", "--targets", "2")
ROW = "starcoder-15b/humaneval"


def bench(*arguments):
    return subprocess.run((*BENCH, *SMALL, *arguments), capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """One row, 8 tokens; its result, its JSON and its picture."""
    folder = tmp_path_factory.mktemp("table2")
    files = ("--json", str(folder / "t.json"), "--chart", str(folder / "t.svg"))
    lookaheads = ("--si-lookaheads", "1,3", "--dsi-lookaheads", "2")
    ran = bench("--rows", ROW, "--max-tokens", "8", *lookaheads, *files)
    assert ran.returncode == 0, ran.stderr
    return ran, json.loads((folder / "t.json").read_text()), folder / "t.svg"


def test_a_row_has_every_strategy_with_equal_outputs_and_an_ideal_below_its_floor(measured):
    _, content, _ = measured

    rows = content["rows"]
    assert [row["strategy"] for row in rows] == ["non-SI", "SI", "DSI", "DSI (best lookahead)"]
    for row in [*rows, *content["sweeps"]]:
        assert (row["name"], row["identical"], row["repeats"]) == (ROW, True, 1)
        assert row["ideal_ms"] < row["floor_ms"]  # no call is free
        assert row["online_over_floor"] == pytest.approx(row["median_ms"] / row["floor_ms"])
    assert all(
        echo["overhead_low_ns"] <= echo["overhead_ns"] <= echo["overhead_high_ns"]
        for echo in content["echoes"]
    )
    assert content["circumstances"]["load_average_at_start"] >= 0
    for row in rows[:2]:  # one call after another, and no forward takes less than it is told
        assert row["ideal_ms"] < row["median_ms"]
    assert rows[0]["ideal_ms"] == pytest.approx(20.6 * 1.35 + 7 * 20.6)
    assert rows[2]["paper_speed_up_over_si"] == 1.92


def test_with_the_text_beyond_the_drafter_more_is_drafted_and_the_outputs_are_equal(tmp_path):
    file = tmp_path / "t.json"
    lookaheads = ("--si-lookaheads", "1", "--dsi-lookaheads", "2")
    ran = bench("--rows", ROW, "--max-tokens", "12", "--extended", *lookaheads, "--json", str(file))
    assert ran.returncode == 0, ran.stderr
    content = json.loads(file.read_text())
    (extended,) = content["extended"]
    (alone,) = (it for it in content["sweeps"] if it["strategy"] == "DSI")
    assert extended["strategy"] == "DSI + Max-Gram"
    assert extended["identical"]
    assert extended["drafted_tokens"] > alone["drafted_tokens"]


def test_online_and_simulated_runs_accept_the_same_draft_tokens(measured):
    _, content, _ = measured

    speculative = [row for row in content["sweeps"] if row["strategy"] == "SI"]
    assert [row["lookaheads"] for row in speculative] == [[1], [3]]
    for row in speculative:
        assert row["accepted_tokens"] == row["ideal_accepted_tokens"] > 0


def test_a_request_is_taken_apart_without_a_rest(measured):
    _, content, _ = measured

    for row in content["rows"][:3]:
        parts = dict(row["breakdown_ms"])
        assert parts.pop("total") == pytest.approx(sum(parts.values()))
        if row["strategy"] != "DSI":  # for which the planner may choose anew each time
            assert parts["ideal"] == pytest.approx(row["ideal_ms"])
            assert parts["bare"] == pytest.approx(row["floor_ms"] - row["ideal_ms"])


def test_tables_and_the_picture_are_there(measured):
    ran, content, picture = measured

    assert f"| {ROW} | non-SI | - |" in ran.stdout
    assert f"| {content['rows'][2]['speed_up_over_si']:.2f}x |" in ran.stdout
    assert "online ÷ floor: at worst" in ran.stdout
    assert "repeat 1 of 1" in ran.stderr
    ET.parse(picture)


def test_a_grid_is_measured_cell_by_cell(tmp_path):
    files = ("--json", str(tmp_path / "grid.json"), "--chart", str(tmp_path / "grid.svg"))
    ran = bench("--grid", "2", "--max-tokens", "4", *files)

    assert ran.returncode == 0, ran.stderr
    ET.parse(tmp_path / "grid.svg")
    rows = json.loads((tmp_path / "grid.json").read_text())["rows"]
    assert len(rows) == 4 * 3
    assert all(row["identical"] for row in rows)
    assert {row["drafter"] for row in rows} == {0.05, 1.0}
    assert ran.stdout.count("\n| 0% |") == 1
