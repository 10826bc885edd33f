"""How long a request may take, and how long each of its calls."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError
from paceline_orchestrator.decoding.call import Sent
from paceline_orchestrator.decoding.rpcs import renew_session
from paceline_orchestrator.fleet.silence import Work

if TYPE_CHECKING:
    from paceline_contract.calls import PrefixCall
    from paceline_orchestrator.fleet.server import ModelServer
    from paceline_orchestrator.fleet.silence import Waiting
    from paceline_orchestrator.fleet.wire import ModelFacts

# A hung server is found out after this. A shorter time takes a busy machine for a hung server: with
# 0.25 s, four model processes on two busy cores were late now and then.
_LEAST_SECONDS = 1.0
# Where a session begins, memory is allocated and a prompt's cost is guessed from other lengths.
_LEAST_COLD_SECONDS = 2.0
# Of a server that has not said what its forwards cost.
_UNKNOWN_SECONDS = 10.0
_PATIENCE = 4


@dataclass(frozen=True, slots=True)
class Deadline:
    """The end of a request, on the monotonic clock."""

    at: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """Set it from now on."""
        return cls(time.monotonic() + seconds)

    @property
    def remaining_seconds(self) -> float:
        """What is left; never below 0."""
        return max(0.0, self.at - time.monotonic())


def patience_seconds(forward_ns: int | None, *, is_cold: bool = False) -> float:
    """Return after how long without an answer a server is asked whether it still has a call.

    A server that hangs may keep its connection alive and its health well, so that nothing else
    shows it. One that is busy with others says so, hence queues need no patience.

    Args:
        forward_ns: What the call's forwards should take; None if nothing is known of them.
        is_cold: Whether the session holds nothing yet.
    """
    if forward_ns is None:
        return _UNKNOWN_SECONDS
    least = _LEAST_COLD_SECONDS if is_cold else _LEAST_SECONDS
    return max(least, _PATIENCE * forward_ns / 1e9)


class Patience:
    """Waits for the answers of one session's calls, and has a late one asked for.

    Args:
        server: Who answers.
        limit_length: The most tokens that the session may hold.
        sampling_used: The sampling parameters that the request uses.
        model: The target model that the session works for; None: the server's.
        tolerance: How many times as long as others it may have a call in sight.
    """

    def __init__(
        self,
        server: ModelServer,
        *,
        limit_length: int = 0,
        sampling_used: frozenset[str] = frozenset(),
        model: ModelFacts | None = None,
        tolerance: float = 1.0,
    ) -> None:
        self._server = server
        self._limit_length = limit_length
        self._sampling_used = sampling_used
        self._model = model
        self._tolerance = tolerance
        self._newest = 0  # the sequence of the newest call
        self._waiting: Waiting | None = None  # for the answer to the newest call

    def begin(self, call: PrefixCall, rpc: Any, *, seconds: float, block_length: int = 0) -> Sent:
        """Begin to wait for the answer to a call that was sent just now, instead of older ones."""
        self._newest = call.sequence
        row_count = len(call.token_ids) + block_length
        self._waiting = self._server.silence.begin(
            rpc,
            patience_seconds=seconds,
            is_in_sight=partial(self._is_in_sight, call),
            instead_of=self._waiting,
            work=Work(
                row_count,
                call.base_length + row_count,
                limit_length=self._limit_length,
                sampling_used=self._sampling_used,
                model=self._model,
            ),
            tolerance=self._tolerance,
        )
        return Sent(call, rpc, self._waiting, at_ns=time.perf_counter_ns())

    def heard(self, sent: Sent, *, seconds: float | None = None) -> None:
        """Note an answer; seconds is how long the next one of a stream may take."""
        self._server.silence.heard(sent.waiting, patience_seconds=seconds)

    def seconds(
        self, call: PrefixCall | None = None, *, block_length: int = 0, steps: int = 1
    ) -> float:
        """Say how long an answer may take: to a call, or the next one of a stream."""
        latency = self._server.latency
        is_cold = call is not None and call.base_length == 0
        if is_cold and not latency.is_known:
            return patience_seconds(None)
        rows = (len(call.token_ids) if call is not None else 1) + block_length
        forward_ns = latency.expected_ns(rows) + (steps - 1) * latency.expected_ns(1)
        return patience_seconds(forward_ns, is_cold=is_cold)

    async def _is_in_sight(self, call: PrefixCall) -> bool:
        """Ask the server whether it has a call, or a newer one, and goes on with its work.

        One that was never sent it cannot have.
        """
        try:
            live = await renew_session(self._server, call.session_id)
        except PacelineError:
            return False
        return call.sequence <= live <= self._newest
