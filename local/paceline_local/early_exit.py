"""The end of a server that was to go on, in words for a person."""

from __future__ import annotations

import signal
import textwrap
from typing import TYPE_CHECKING

from paceline.errors import PacelineError
from paceline_serving.one_line import on_one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

_FAILED = "failed to start: "  # as `paceline_serving.process` writes it
_LOG_LINES = 8


class ServerExitedError(PacelineError):
    """A server's process ended early.

    The text has several lines, for a terminal: first the reason, then the last lines of the log.
    Each line is printable, whatever the server wrote.
    """

    def __init__(self, name: str, *, code: int, log: str) -> None:
        last = log.splitlines()[-_LOG_LINES:]
        reason = next((line for line in reversed(last) if line.startswith(_FAILED)), None)
        if reason is not None:
            last.remove(reason)
            head = f"{name} {on_one_line(reason)}"
        elif code < 0:
            head = f"{name} was killed by {signal.Signals(-code).name}"
        else:
            head = f"{name} exited with {code}"
        super().__init__(f"{head}\nits last log lines:\n{_shown(last)}" if last else head)


def last_lines(log: str) -> str:
    """Return the last lines of a log, indented and printable."""
    return _shown(log.splitlines()[-_LOG_LINES:] or ["(nothing)"])


def _shown(lines: Sequence[str]) -> str:
    """Indent lines, and escape in each what a terminal would obey."""
    return textwrap.indent("\n".join(map(on_one_line, lines)), "    ")
