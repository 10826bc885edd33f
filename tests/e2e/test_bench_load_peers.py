"""`paceline bench load --backend transformers`, small, with real processes. No word on speed."""

from __future__ import annotations

import json

import pytest

from paceline_cli.__main__ import main

pytestmark = pytest.mark.long

TOKENS, STREAMS, ROUNDS, REQUESTS = 6, (1, 3), 2, 2
WHO = [
    ("the services", "non-SI"),
    ("the services", "SI"),
    ("the services", "DSI"),
    ("the services", "AUTO"),
    ("our engine, no services", "non-SI"),
    ("transformers", "generate"),
    ("transformers", "continuous batching"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    directory = tmp_path_factory.mktemp("load")
    files = {name: directory / f"load.{name}" for name in ("json", "svg")}
    options = {
        "backend": "transformers",
        "streams": ",".join(map(str, STREAMS)),
        "strategies": "si,dsi,auto",
        "tokens": TOKENS,
        "prompt-tokens": 12,
        "requests": REQUESTS,
        "rounds": ROUNDS,
        "json": files["json"],
        "chart": files["svg"],
    }
    code = main(["bench", "load", *(f"--{name}={value}" for name, value in options.items())])
    return code, json.loads(files["json"].read_text()), files["svg"].read_text()


def test_everybody_has_a_row_for_each_load_and_ours_are_plain_decodings(results):
    code, content, _ = results
    assert code == 0
    assert [(row["group"], row["name"], row["stream_count"]) for row in content["rows"]] == [
        (*who, streams) for streams in STREAMS for who in WHO
    ]
    assert all(row["identical"] for row in content["rows"])
    assert content["system"]["prompt_tokens"] == 12


def test_the_numbers_of_a_row_fit_together(results):
    for row in results[1]["rows"]:
        assert row["text_count"] == ROUNDS * max(REQUESTS, row["stream_count"])
        assert len(row["rounds_tokens_per_second"]) == ROUNDS
        assert row["tokens_per_second"] > 0
        assert row["ttft_ms"]["p50"] > 0
        assert row["itl_ms"]["p50"] > 0
        if row["stream_count"] == 1:
            assert row["to_one_stream"] == 1
        is_service = row["group"] == "the services"
        assert (row["to_engine"] is not None) == is_service
        assert (row["to_library"] is None) == (row["group"] == "transformers")
        assert (row["orchestrator_ms_per_token"] is not None) == is_service


def test_the_picture_is_drawn(results):
    assert (
        "<!-- 1 target, 1 drafter, 1 thread each; 12 tokens of prompt, 6 of text -->"
        in (results[2])
    )
