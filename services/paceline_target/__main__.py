"""`python -m paceline_target`: serve a target until a signal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from paceline_model_server.application import serve
from paceline_target.servicer import ROLE

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str], *, program: str = "paceline serve target") -> int:
    """Parse settings, serve, and return the exit code."""
    return serve(ROLE, arguments, program=program)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
