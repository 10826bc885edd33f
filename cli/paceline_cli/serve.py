"""`paceline serve ROLE`: run one server; the options are the server's own."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_ROLES = ("drafter", "target", "orchestrator", "gateway")

_HELP = """\
usage: paceline serve {drafter,target,orchestrator,gateway} [options]

Run one server until SIGTERM or Ctrl-C.

  paceline serve drafter --help         and likewise for the others: all options

examples:
  paceline serve drafter --model models/python-drafter --listen 127.0.0.1:50071
  paceline serve target --model models/python-target --listen 127.0.0.1:50061
  paceline serve orchestrator --targets 127.0.0.1:50061 \\
    --drafters 127.0.0.1:50071
  paceline serve gateway --orchestrators 127.0.0.1:50050 --listen 127.0.0.1:8000
"""


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the server's exit code."""
    role, *rest = arguments or ["--help"]
    if role in {"-h", "--help"}:
        print(_HELP, end="")
        return 0
    if role not in _ROLES:
        print(f"paceline serve: {role!r} is none of {', '.join(_ROLES)}", file=sys.stderr)
        return 2
    server = import_module(f"paceline_{role}.__main__")
    code: int = server.main(rest, program=f"paceline serve {role}")
    return code
