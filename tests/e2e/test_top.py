"""`paceline top` beside `paceline up`, told nothing but where the orchestrator is."""

import json
import os
import subprocess
import sys

import pytest

PACELINE = (sys.executable, "-m", "paceline_cli")


@pytest.fixture
def environment(tmp_path):
    return {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}


@pytest.fixture
def address(environment):
    """Run a system of stand-ins for models, and say where its orchestrator is."""
    command = (*PACELINE, "up", "--backend", "simulated", "--listen", "127.0.0.1:0")
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    printed = []
    for line in process.stdout:
        printed.append(line)
        if "Ctrl-C" in line:
            break
    found = next(line.split()[1] for line in printed if line.startswith("orchestrator"))
    assert f"  paceline top --address {found}\n" in printed
    yield found
    process.terminate()
    process.communicate()


def paceline(*arguments, environment):
    command = (*PACELINE, *arguments)
    ran = subprocess.run(
        command, capture_output=True, check=True, text=True, env=environment, timeout=120
    )
    return ran.stdout


def test_top_shows_what_every_server_did(address, environment):
    generate = ("generate", "x", "--address", address, "--strategy", "dsi", "--max-tokens", "40")
    paceline(*generate, environment=environment)
    look = ("top", "--address", address, "--once", "--interval", "0.2")

    text = paceline(*look, environment=environment)
    for name in ("target-0", "target-1", "drafter-0"):
        assert any(line.split()[:2] == [name, "used"] for line in text.splitlines())
    assert any(line.split()[:2] == ["orchestrator", "up"] for line in text.splitlines())

    seen = json.loads(paceline(*look, "--json", environment=environment))
    assert 1 <= seen["totals"]["targets_per_stream"] <= 2
    assert 0 <= seen["totals"]["acceptance_rate"] <= 1
    assert seen["totals"]["speed_up"] > 0
    assert 0 <= seen["totals"]["wasted_share"] <= 1
    assert seen["totals"]["first_token_seconds"] > 0
    pools = {pool["role"]: pool for pool in seen["pools"]}
    assert {role: pool["ready_count"] for role, pool in pools.items()} == {
        "target": 2,
        "drafter": 1,
        "orchestrator": 1,
    }
    assert pools["target"]["figures"]["sessions"] == 0
    assert pools["target"]["figures"]["forward_seconds"] > 0
