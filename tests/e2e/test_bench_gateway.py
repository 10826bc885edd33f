"""`paceline bench gateway`, short, with real processes: it says nothing of times here."""

from __future__ import annotations

import json

from paceline_cli.__main__ import main


def test_both_doors_give_the_same_texts_and_are_compared(tmp_path, capsys):
    results = tmp_path / "gateway.json"
    code = main(
        [
            *("bench", "gateway", "--streams=1,3", "--tokens=32", "--repeats=2"),
            *("--target-ms=1", f"--json={results}"),
        ]
    )
    assert code == 0
    rows = json.loads(results.read_text())["rows"]
    assert [row["stream_count"] for row in rows] == [1, 3]
    for row in rows:
        assert row["identical"]
        for name in ("first", "token"):
            assert row[name]["gRPC_ms"] > 0
            assert row[name]["HTTP_ms"] > 0
            assert len(row[name]["ratios"]) == 2
    # Processes count their CPU time in ticks of 10 ms.
    for process in ("gateway", "orchestrator"):
        assert sum(row[f"{process}_ms_per_token"] for row in rows) > 0
    assert capsys.readouterr().out.count("identical") == 2
