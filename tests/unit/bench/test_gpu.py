"""The script that measures on a GPU runs to its end, as far as a CPU can tell."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.long
def test_a_rehearsal_on_a_cpu_measures_everything_that_a_cpu_has(tmp_path):
    found = tmp_path / "gpu.json"
    command = [ROOT / "bench/gpu.py", "--device", "cpu", "--tiny", "--json", found]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, timeout=300)
    told = json.loads(found.read_text())
    assert [row["model"] for row in told["forwards"]] == ["2x128"] * 2 + ["1x64"] * 2
    assert all(set(row["ms"]) == {"1", "9"} for row in told["forwards"] + told["sampling"])
    assert [row["count"] for row in told["texts"]] == [1, 4] * 2
    assert told["flips"][0]["tokens"] >= 96
