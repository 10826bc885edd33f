"""Which languages can be tested on this machine."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

_CLIENTS = Path(__file__).parents[3] / "clients"


def missing(why: str) -> None:
    """Skip the test, or fail it where CLIENT_TOOLCHAINS=required says that nothing is skipped."""
    is_required = os.environ.get("CLIENT_TOOLCHAINS") == "required"
    (pytest.fail if is_required else pytest.skip)(why)


def needs_toolchain(language: str) -> None:
    """Go on only if a language's compiler, interpreter and libraries are there."""
    command = ["make", "--silent", "-C", _CLIENTS / language, "toolchain"]
    asked = subprocess.run(command, capture_output=True, check=False, text=True, timeout=60)
    if asked.returncode:
        missing((asked.stdout + asked.stderr).partition("\n")[0])
