"""`python -m paceline_gateway`: serve a gateway until a signal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from paceline_gateway.process import HttpProcess
from paceline_gateway.settings import GatewaySettings
from paceline_serving import telemetry
from paceline_serving.command_line import parse
from paceline_serving.process import run_process

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str], *, program: str = "paceline serve gateway") -> int:
    """Parse settings, serve, and return the exit code."""
    settings = parse(GatewaySettings, arguments, program=program)
    registry = telemetry.new_registry()
    return run_process(lambda: HttpProcess(settings, registry=registry), settings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
