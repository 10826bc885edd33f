"""Questions about a model that servers fail to answer; they get work all the same.

A server that does not tell its tokenizer or its chat template may still compute. So such a failure
never pauses the server. It is only not asked the same question for a while.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from paceline_orchestrator.fleet.pauses import pause_after

if TYPE_CHECKING:
    from paceline_orchestrator.fleet.server import ModelServer

# A server that has failed more often is not waited for.
_FEW_FAILURES = 2


@dataclass(frozen=True, slots=True)
class _Failures:
    count: int
    ask_again_at: float


class Question:
    """One question, and the servers that failed to answer it."""

    def __init__(self) -> None:
        self._failures: WeakKeyDictionary[ModelServer, _Failures] = WeakKeyDictionary()

    def note_failure(self, server: ModelServer) -> None:
        """Ask a server nothing for a while, each time for longer."""
        count = 1 + self._count(server)
        self._failures[server] = _Failures(count, time.monotonic() + pause_after(count))

    def note_answer(self, server: ModelServer) -> None:
        """Note that a server has answered, also that it has no such thing."""
        self._failures.pop(server, None)

    def may_be_put_to(self, server: ModelServer) -> bool:
        """Whether a server may be asked now."""
        failures = self._failures.get(server)
        return failures is None or time.monotonic() >= failures.ask_again_at

    def is_still_open(self, server: ModelServer) -> bool:
        """Whether it is worth waiting for a server's answer."""
        return self._count(server) <= _FEW_FAILURES

    @property
    def next_in_seconds(self) -> float | None:
        """In how many seconds a server may be asked again that may not be asked now; None: none."""
        now = time.monotonic()
        left = [it.ask_again_at - now for it in self._failures.values()]
        return min((it for it in left if it > 0), default=None)

    def _count(self, server: ModelServer) -> int:
        failures = self._failures.get(server)
        return failures.count if failures is not None else 0
