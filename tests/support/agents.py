"""Packages and agents in an environment of their own, which `make test-agents` installs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

HOME = Path(__file__).parents[2] / "build/agents"
PYTHON = HOME / "bin/python"
NODE = shutil.which("node") or "node"


def installed(path: Path) -> None:
    """Skip the test where something could not be installed."""
    if not path.exists():
        pytest.skip(f"{path.relative_to(HOME)} is not installed: make test-agents")
