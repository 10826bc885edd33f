"""Questions about a model that servers fail to answer; they get work all the same.

A server that does not tell its tokenizer or its chat template may still compute. So such a failure
never pauses the server. It is only not asked the same question for a while, and then after those
that failed less often.

A server that hesitates is not waited for alone: the next one is asked as well.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary

from paceline_orchestrator.fleet.pauses import pause_after

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable
    from typing import Any

    from paceline_orchestrator.fleet.server import ModelServer

_T = TypeVar("_T")

# A server that has failed more often is not waited for.
_FEW_FAILURES = 2
# Servers answer within milliseconds, unless they hang or are busy with something large.
_HESITATION_SECONDS = 1.0
_MOST_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class _Failures:
    process_name: str
    count: int
    ask_again_at: float


class Question:
    """One question, and the servers that failed to answer it.

    Incidents count, not calls: where many ask at once, and all hear of one failure, it is one.
    """

    def __init__(self) -> None:
        self._failures: WeakKeyDictionary[ModelServer, _Failures] = WeakKeyDictionary()

    def note_failure(self, server: ModelServer, *, asked_at: float) -> None:
        """Ask a server nothing for a while, each time for longer.

        Args:
            server: Which one failed.
            asked_at: When it was asked, on the monotonic clock. What was asked before the server
                could have been asked again is a part of its last failure.
        """
        last = self._of(server)
        if last is not None and asked_at < last.ask_again_at:
            return
        count = 1 + self._count(server)
        ask_again_at = time.monotonic() + pause_after(count)
        self._failures[server] = _Failures(server.process_name, count, ask_again_at)

    def note_answer(self, server: ModelServer) -> None:
        """Note that a server has answered, also that it has no such thing."""
        self._failures.pop(server, None)

    def in_turn(self, servers: Iterable[ModelServer]) -> list[ModelServer]:
        """Return those servers that may be asked now, first those that failed least often.

        Otherwise servers that fail only after a minute would be asked in turns for ever, and the
        one that would answer never.
        """
        now = time.monotonic()
        last = ((it, self._of(it)) for it in servers)
        return sorted(
            (it for it, failures in last if failures is None or now >= failures.ask_again_at),
            key=self._count,
        )

    async def ask(
        self,
        next_server: Callable[[], ModelServer | None],
        ask: Callable[[ModelServer], Coroutine[Any, Any, _T | None]],
    ) -> _T | None:
        """Ask one server after the other, up to four at a time, until one has an answer.

        The next one is asked as soon as one has no answer, or has hesitated for a second. Whoever
        still hesitates when another has answered has failed.

        Args:
            next_server: Returns whom to ask next; None: nobody for now.
            ask: Asks one; None is no answer.

        Returns:
            The first answer; None if there is none.
        """
        running: dict[asyncio.Task[_T | None], tuple[ModelServer, float]] = {}
        async with asyncio.TaskGroup() as tasks:
            while True:
                server = next_server() if len(running) < _MOST_AT_ONCE else None
                if server is not None:
                    task = tasks.create_task(ask(server), name=f"ask {server.name}")
                    running[task] = server, time.monotonic()
                if not running:
                    return None
                done, _ = await asyncio.wait(
                    running,
                    timeout=_HESITATION_SECONDS if server is not None else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for task in done:
                    del running[task]
                    if (answer := task.result()) is not None:
                        self._leave(running)
                        return answer

    def _leave(self, running: dict[asyncio.Task[_T | None], tuple[ModelServer, float]]) -> None:
        """Ask those no more that have not answered."""
        for task, (server, asked_at) in running.items():
            task.cancel()
            if time.monotonic() - asked_at >= _HESITATION_SECONDS:
                self.note_failure(server, asked_at=asked_at)

    def is_still_open(self, server: ModelServer) -> bool:
        """Whether it is worth waiting for a server's answer."""
        return self._count(server) <= _FEW_FAILURES

    def next_in_seconds(self, *, since: float) -> float | None:
        """Return in how many seconds a server may be asked that could not be asked at a time.

        Args:
            since: That time, on the monotonic clock.

        Returns:
            0 if one may be asked again already; None if there is none.
        """
        left = [it.ask_again_at for it in self._failures.values() if it.ask_again_at > since]
        return max(0.0, min(left) - time.monotonic()) if left else None

    def _count(self, server: ModelServer) -> int:
        failures = self._of(server)
        return failures.count if failures is not None else 0

    def _of(self, server: ModelServer) -> _Failures | None:
        """Return the failures of the process that is there now."""
        failures = self._failures.get(server)
        is_same = failures is not None and failures.process_name == server.process_name
        return failures if is_same else None
