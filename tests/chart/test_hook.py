"""What `helm test` would run, run here: the command, arguments and environment as rendered."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.manifests import install

BIN = Path(sys.executable).parent


def environment_of(pod, **changes):
    own = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}
    path = f"{BIN}{os.pathsep}{own['PATH']}"
    return {**own, "PATH": path, **pod.environment, **changes}


def run_test_hook(values, **changes):
    pod = install({"test": {"maxTokens": 12, **values}}).pod("-test")
    command = [*pod.server["command"], *pod.server["args"]]
    environment = environment_of(pod, **changes)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


def test_helm_test_generates_text_with_every_strategy_and_finds_it_identical(system):
    ran = run_test_hook({}, PACELINE_ADDRESS=system.orchestrators[0].address)
    assert ran.returncode == 0, ran.stderr
    for strategy in ("si", "dsi", "auto"):
        assert f"{strategy}: identical to plain decoding" in ran.stdout


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [('echo "text of $strategy"', "differs from plain decoding"), ("true", "gave no text")],
)
def test_helm_test_fails_if_a_text_differs_or_there_is_none(tmp_path, answer, complaint):
    stand_in = tmp_path / "paceline"
    stand_in.write_text(
        f'#!/bin/sh\ncase "$1" in health|info) exit 0;; esac\nfor strategy; do :; done\n{answer}\n'
    )
    stand_in.chmod(0o755)
    ran = run_test_hook({}, PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert ran.returncode == 1
    assert complaint in ran.stderr


def test_helm_test_passes_any_prompt_on_as_it_is(system):
    prompt = 'it\'s "quoted" $(id) `id` \\ {{ .Values }}\n\tand goes on'
    pod = install({"test": {"prompt": prompt}}).pod("-test")
    assert pod.environment["PROMPT"] == prompt
    address = system.orchestrators[0].address
    assert run_test_hook({"prompt": prompt}, PACELINE_ADDRESS=address).returncode == 0
