"""What servers saw of a request: proof that a strategy happened, and not a silent fallback."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import contextmanager
from itertools import combinations
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from support.processes import ServerProcess

_WITHDRAWN = ("cancelled", "superseded")


class Evidence:
    """Counts what model servers noted of their calls, for as long as it is asked to gather.

    Attributes:
        draft_count: Draft calls.
        drafters_used: The most drafters that were asked for drafts of one request.
        accepted_count: Draft tokens that targets accepted.
        tree_count: Answered verifications of trees.
        runner_up_count: Tokens that targets accepted beside a drafter's first choice.
        overlap_count: Pairs of answered verifications that different processes computed at once.
        targets_used: The most targets that answered verifications of one request.
        withdrawn: Calls that servers saw end before their answer, by method.
    """

    def __init__(
        self, *, targets: Sequence[ServerProcess], drafters: Sequence[ServerProcess]
    ) -> None:
        self._targets = targets
        self._drafters = drafters
        self.draft_count = 0
        self.drafters_used = 0
        self.accepted_count = 0
        self.tree_count = 0
        self.runner_up_count = 0
        self.overlap_count = 0
        self.targets_used = 0
        self.withdrawn: Counter[str] = Counter()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Count the calls that begin inside the block: one request, alone in the system."""
        since_ns = time.monotonic_ns()  # the clock of the machine, the same in every process
        yield
        drafts = [_calls(server, since_ns) for server in self._drafters]
        verifications = [_calls(server, since_ns) for server in self._targets]
        self._count(drafts, verifications)

    def _count(
        self, drafts: list[list[dict[str, Any]]], verifications: list[list[dict[str, Any]]]
    ) -> None:
        everything = [call for calls in (*drafts, *verifications) for call in calls]
        answered = [[_span(call) for call in calls if _is_ok(call)] for calls in verifications]
        self.draft_count += sum(map(len, drafts))
        self.drafters_used = max(self.drafters_used, sum(map(bool, drafts)))
        self.accepted_count += sum(call["accepted"] for calls in verifications for call in calls)
        judged = [call for calls in verifications for call in calls]
        self.tree_count += sum(call["is_tree"] for call in judged)
        self.runner_up_count += sum(call["runners_up"] for call in judged)
        self.targets_used = max(self.targets_used, sum(map(bool, answered)))
        self.withdrawn += Counter(
            call["method"] for call in everything if call["outcome"] in _WITHDRAWN
        )
        self.overlap_count += sum(
            one[0] < other[1] and other[0] < one[1]
            for left, right in combinations(answered, 2)
            for one in left
            for other in right
        )


def _calls(server: ServerProcess, since_ns: int) -> list[dict[str, Any]]:
    return [call for call in server.calls() if call["start_ns"] >= since_ns]


def _is_ok(call: dict[str, Any]) -> bool:
    return bool(call["outcome"] == "ok")


def _span(call: dict[str, Any]) -> tuple[int, int]:
    """Return when the call's forward ran: it ends just before the call does."""
    return call["end_ns"] - call["forward_ns"], call["end_ns"]
