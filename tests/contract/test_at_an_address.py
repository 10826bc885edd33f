"""The contract of the model servers can be tested on any server that can be reached."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from support.processes import running
from support.system import simulated_model

SUITE = Path(__file__).with_name("model_servers")


def test_servers_at_an_address_are_held_to_the_contract_and_left_as_they_were():
    servers = [simulated_model(role, seconds=0) for role in ("target", "drafter")]
    options = [f"--{server.role}={server.address}" for server in servers]
    with running(*servers):
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", SUITE, *options],
            capture_output=True,
            text=True,
            timeout=250,
        )
        assert run.returncode == 0, run.stdout
        passed = re.search(r"(\d+) passed", run.stdout)
        assert passed is not None
        assert int(passed[1]) > 50
        for server in servers:
            assert server.metric("paceline_sessions_opened_total") > 0
            assert server.metric("paceline_sessions_active") == 0
