"""`paceline bench pair` with real processes, on tiny models. No word on speed."""

from __future__ import annotations

import json

import pytest

from paceline_cli.__main__ import main

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def result(tiny_pair, tmp_path_factory):
    directory = tmp_path_factory.mktemp("pair")
    prompts, kept = directory / "prompts.txt", directory / "pair.json"
    prompts.write_text("def draft(prefix):\nimport target\n")
    code = main(
        [
            "bench",
            "pair",
            f"--target-model={tiny_pair.target}",
            f"--drafter-model={tiny_pair.drafter}",
            f"--prompts={prompts}",
            "--parts=transformers,engine,services,sharing",
            *("--latency-prompts=1", "--latency-tokens=2", "--contest-tokens=12", "--repeats=1"),
            *("--lookaheads=3", f"--json={kept}"),
        ]
    )
    return code, json.loads(kept.read_text())


def test_the_services_give_the_texts_of_transformers(result):
    code, content = result
    assert code == 0
    assert [(row["group"], row["name"]) for row in content["rows"]] == [
        ("transformers", "bare loop"),
        ("transformers", "generate"),
        ("transformers", "generate, assisted, lookahead 3"),
        ("transformers", "generate, prompt lookup"),
        ("our engine, no services", "non-SI"),
        ("our engine, no services", "SI, lookahead 3"),
        ("the services", "non-SI"),
        ("the services", "SI, lookahead 3"),
        ("the services", "DSI"),
    ]
    assert all(row["identical"] for row in content["rows"])


def test_the_services_do_what_the_engine_does(result):
    rows = {(row["group"], row["name"]): row for row in result[1]["rows"]}
    for name in ("non-SI", "SI, lookahead 3"):
        engine, services = rows["our engine, no services", name], rows["the services", name]
        # A call that misses its time on a busy machine is made again: a forward more, never fewer.
        assert services["tokens_per_forward"] <= engine["tokens_per_forward"]
        assert services["tokens_per_forward"] == about(engine["tokens_per_forward"])
        if name != "non-SI":
            assert services["acceptance_rate"] == about(engine["acceptance_rate"])
        assert services["forward_ms_per_token"] > 0
        assert services["ttft_ms"] > 0


def about(value):
    """Return what a value of some 13 forwards may be if two or three of them were repeated."""
    return pytest.approx(value, rel=0.25)


def test_forwards_are_timed_alone_and_side_by_side(result):
    assert [row["texts"] for row in result[1]["sharing"]] == [1, 2]
    assert all(row["forward_ms"] > 0 for row in result[1]["sharing"])


def test_dsi_is_tried_on_1_to_n_targets_of_the_same_hardware(result):
    rows = result[1]["sharing_strategies"]
    names = ["non-SI", "SI", "DSI on 1 target", "DSI on 2 targets"]
    assert [row["name"] for row in rows] == names
    assert [row["targets"] for row in rows] == [1, 1, 1, 2]
    assert all(row["identical"] for row in rows)
