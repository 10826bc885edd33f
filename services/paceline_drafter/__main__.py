"""`python -m paceline_drafter`: serve a drafter until a signal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from paceline_drafter.servicer import ROLE
from paceline_model_server.application import serve

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str], *, program: str = "paceline serve drafter") -> int:
    """Parse settings, serve, and return the exit code."""
    return serve(ROLE, arguments, program=program)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
