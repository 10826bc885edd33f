"""The script that measures on a GPU runs to its end, as far as a CPU can tell."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_a_rehearsal_on_a_cpu_measures_everything_that_a_cpu_has(tmp_path):
    found = tmp_path / "gpu.json"
    command = [ROOT / "bench/gpu.py", "--device", "cpu", "--tiny", "--json", found]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, timeout=300)
    told = json.loads(found.read_text())
    assert set(told["2x128, after 64: ms by rows"]) == {"1", "9"}
    assert told["bundled target in float32: other tokens in blocks, of"][1] >= 96
    assert "2x128, 4 texts of 30: ms" in told
