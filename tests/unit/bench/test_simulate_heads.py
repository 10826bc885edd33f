"""Heads at the target and as services, simulated: known times, and what is printed."""

from __future__ import annotations

import json

import pytest

from paceline_bench.simulate.heads import HeadJob, PublishedHead, compare_places
from paceline_cli.__main__ import main
from paceline_protocol.laboratory.oracles import FeatureHeadOracle

FIRST_ONLY = HeadJob(
    head=PublishedHead("right once", (1.0, 0.0)),
    latency=0.25,
    target_counts=(3,),
    decay=1.0,
    token_count=40,
    repeats=2,
)


def test_a_head_that_is_right_once_after_each_verdict_gives_two_tokens_a_round_wherever_it_is():
    """A round is a forward and a draft; none can be drafted ahead, with however many targets."""
    gains = compare_places(FIRST_ONLY)
    assert [(gain.place, gain.strategy, gain.target_count, gain.gpu_count) for gain in gains] == [
        ("at the target", "self-SI", 1, 1),
        ("a service", "SI", 1, 1),
        ("a service", "SI ahead", 1, 2),
        ("a service", "DSI", 3, 4),
    ]
    for gain in gains:
        assert gain.over_plain == pytest.approx(2 / 1.25, rel=0.05)
        assert gain.over_self == pytest.approx(1, rel=0.05)
        assert gain.per_gpu == gain.over_plain / gain.gpu_count


def test_a_verdict_about_a_wrong_text_tells_a_head_nothing():
    oracle = FeatureHeadOracle((1.0, 0.0), seed=0, length=9)
    assert oracle.prompt(1) == (0,)
    assert oracle.draft(0, (0,)) == 2
    oracle.judge((0, 3, 5), ())
    assert oracle.draft(0, (0, 2)) == 5, "the second token rests on the head's own states"
    oracle.judge((0,), (2,))
    assert oracle.draft(0, (0, 2, 4)) == 6


def test_rates_are_those_of_a_token_whose_predecessors_are_right_and_fall_beyond_the_published():
    job = HeadJob(
        head=PublishedHead("", (0.8, 0.6, 0.3)),
        latency=0.05,
        target_counts=(),
        decay=0.5,
        token_count=1,
        repeats=1,
    )
    assert job.rates[:5] == pytest.approx((0.8, 0.75, 0.5, 0.25, 0.125))


def test_the_command_prints_a_row_for_each_head_and_place(capsys, tmp_path):
    file = tmp_path / "heads.json"
    sizes = ["--sp=2", "--tokens=10", "--repeats=1", "--head-latency=0.1"]
    assert main(["simulate", "heads", *sizes, f"--json={file}"]) == 0
    printed, rows = capsys.readouterr().out, json.loads(file.read_text())["rows"]
    assert "a forward of the head takes 0.1 of the target's" in printed
    assert len(rows) == 5 * 4
    assert all(f"{row['over_plain']:.2f}" in printed for row in rows)
