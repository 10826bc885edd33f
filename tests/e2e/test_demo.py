"""`make demo`, shortened: what everybody runs first."""

from __future__ import annotations

import subprocess
import sys
from xml.etree import ElementTree as ET

import pytest

import widen


@pytest.mark.long
def test_the_demo_streams_compares_and_draws(tmp_path):
    models = tmp_path / "models"
    widen.main(["--output", str(models)])
    command = [sys.executable, "-m", "paceline_cli", "demo", "--prompts=1", "--max-tokens=8"]
    shown = subprocess.run(
        [*command, f"--models={models}", f"--output-directory={tmp_path}"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    assert "Every output was identical to plain decoding." in shown.stdout
    race = f"up --http 127.0.0.1:8000 --models {models}"
    for part in ("1. Real models", "targets of 115 million weights", "2. SIMULATED", race):
        assert part in shown.stdout
    for name in ("timeline.svg", "timeline-simulated.svg"):
        assert ET.parse(tmp_path / name).getroot().tag.endswith("svg")
