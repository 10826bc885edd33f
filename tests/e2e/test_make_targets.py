"""Targets of the Makefile that must say something on every machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def make(*arguments):
    # In the environment that runs the tests, as it is.
    environment = Path(sys.prefix)
    words = (
        "make",
        "--no-print-directory",
        "--old-file",
        f"{environment}/.installed",
        f"VENV={environment}",
        *arguments,
    )
    return subprocess.run(
        words, cwd=ROOT, capture_output=True, check=True, text=True, timeout=120
    ).stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so it would measure")
def test_without_a_gpu_the_gpu_benchmark_says_so_and_is_no_failure():
    assert make("bench-gpu") == (
        f"bench-gpu: skipped, torch {torch.__version__} sees no CUDA device\n"
    )


def test_the_benchmarks_keep_their_results_where_the_pages_look_for_them():
    shown = make("--dry-run", "bench")
    for name in ("load", "pair", "table2"):
        assert (
            f"--json bench/results/{name}.json --chart bench/results/{name}.png"
            in shown.replace("\\\n  ", "")
        )
    assert shown.rstrip().endswith("bench/publish.py")
