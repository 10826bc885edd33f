"""`python -m paceline_orchestrator`: serve an orchestrator until a signal."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from paceline_orchestrator.application import OrchestratorApplication
from paceline_orchestrator.settings import OrchestratorSettings
from paceline_serving import lifecycle, telemetry
from paceline_serving.command_line import parse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_serving.lifecycle import ServerProcess


def main(arguments: Sequence[str], *, program: str = "paceline serve orchestrator") -> int:
    """Parse settings, serve, and return the exit code."""
    settings = parse(OrchestratorSettings, arguments, program=program)
    # The tokenizers library would work in threads of its own, as many as there are cores. A text
    # that it takes long over would hold up all others there.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    registry = telemetry.new_registry()

    def application(process: ServerProcess) -> OrchestratorApplication:
        return OrchestratorApplication(settings, process=process, registry=registry)

    return lifecycle.run(application, settings, registry=registry, name="orchestrator")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
