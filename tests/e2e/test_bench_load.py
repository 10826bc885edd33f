"""`paceline bench load`, small, with real processes: its rows hold together. No word on speed."""

from __future__ import annotations

import json

import pytest

from paceline_cli.__main__ import main

pytestmark = pytest.mark.long

TOKENS, TARGETS, STREAMS, ORCHESTRATORS = 6, 2, (1, 3), (1, 2)
REQUESTS_OF_A_STREAM = 2
OPTIONS = {
    "streams": ",".join(map(str, STREAMS)),
    "orchestrators": ",".join(map(str, ORCHESTRATORS)),
    "scaling-streams": "2",
    "strategies": "si,auto",
    "tokens": TOKENS,
    "targets": TARGETS,
    "requests": 1,
    "target-ms": 8,
    "drafter-ms": 1,
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    directory = tmp_path_factory.mktemp("load")
    files = {name: directory / f"load.{name}" for name in ("json", "svg")}
    options = [f"--{name}={value}" for name, value in OPTIONS.items()]
    code = main(["bench", "load", *options, f"--json={files['json']}", f"--chart={files['svg']}"])
    return code, json.loads(files["json"].read_text()), files["svg"].read_text()


def test_every_load_has_a_row_and_every_output_is_plain_decodings(results):
    code, content, _ = results
    assert code == 0
    assert [
        (row["orchestrator_count"], row["stream_count"], row["strategy"]) for row in content["rows"]
    ] == [
        (orchestrators, streams, strategy)
        for orchestrators in ORCHESTRATORS
        for streams in STREAMS
        for strategy in (("non-SI", "SI", "AUTO") if orchestrators == 1 else ("non-SI", "AUTO"))
    ]
    assert all(row["identical"] for row in content["rows"])
    assert content["system"]["targets"] == TARGETS


def test_one_orchestrator_and_two_are_loaded_beyond_what_they_may_use(results):
    scaling = results[1]["scaling"]
    assert scaling["orchestrator_share"] == 0.15
    assert [
        (row["orchestrator_count"], row["stream_count"], row["strategy"]) for row in scaling["rows"]
    ] == [(count, 2, strategy) for count in ORCHESTRATORS for strategy in ("non-SI", "SI")]
    assert all(row["identical"] for row in scaling["rows"])


def test_the_numbers_of_a_row_fit_together(results):
    for row in results[1]["rows"]:
        request_count = REQUESTS_OF_A_STREAM * row["stream_count"]
        assert sum(row["chosen"].values()) == request_count
        assert 1 / request_count <= row["fairness"] <= 1.0000001
        assert row["tokens_per_second"] > 0
        assert row["ttft_ms"]["p50"] > 0
        assert row["ttft_ms"]["p99"] is None  # there are too few
        assert 0 < row["memory_before_mib"] <= row["memory_peak_mib"]
        assert 0 <= row["given_up"] < 1
        assert row["orchestrator_ms_per_token"] >= 0
        if row["strategy"] == "non-SI":
            assert row["chosen"] == {"non-SI": request_count}
            assert row["speed_up"] == 1
            assert row["forwards_per_token"] >= 1 / row["stream_count"]  # they may share one
        if row["strategy"] == "SI":
            assert row["chosen"] == {"SI": request_count}
            assert row["forwards_per_token"] >= 1 / TOKENS / row["stream_count"]


def test_the_picture_is_drawn(results):
    assert "<!-- 2 x target (8 ms), 1 x drafter (1 ms), acceptance 80%, 6 tokens -->" in results[2]
