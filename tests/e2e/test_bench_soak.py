"""`paceline bench soak`, short, with real processes. So short that memory says nothing yet."""

from __future__ import annotations

import json

from paceline_bench.soak.tables import LOG_MARK
from paceline_cli.__main__ import main

REQUESTS = 60
PROCESSES = ["orchestrator", "target-1", "target-0", "drafter-0", "client"]


def test_every_output_is_plain_decodings_and_nothing_is_open_between_rounds(tmp_path, capsys):
    results, log = tmp_path / "soak.json", tmp_path / "LOG.md"
    log.write_text(f"{LOG_MARK}\n")
    code = main(
        [
            *("bench", "soak", f"--requests={REQUESTS}", "--warm-up=20", "--leaving=0.3"),
            *("--limit-bytes=1e9", f"--json={results}", f"--log={log}"),
        ]
    )
    assert code == 0
    content = json.loads(results.read_text())
    assert content["wrong_count"] == 0
    assert [row["process"] for row in content["rows"]] == PROCESSES
    for row in content["rows"]:
        assert [row["readings"][0]["requests"], row["readings"][-1]["requests"]] == [0, REQUESTS]
        is_model_server = row["process"].startswith(("target", "drafter"))
        for reading in row["readings"]:
            assert reading["own_bytes"] > 0
            assert reading["descriptors"] > 0
            assert reading["sessions"] == (0 if is_model_server else None)
            assert (reading["tasks"] is None) == (row["process"] == "client")
    line, mark = log.read_text().splitlines()
    assert mark == LOG_MARK
    assert line in capsys.readouterr().out
