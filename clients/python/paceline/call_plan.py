"""When to give up and when to try again: times, delays and their budget, without I/O."""

from __future__ import annotations

import math
import random
import re
import threading
import time
from typing import TYPE_CHECKING

from paceline.errors import (
    ConnectionLostError,
    DrainingError,
    InvalidFieldError,
    OverloadedError,
    PacelineError,
    TryAgainError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_FIRST_DELAY_SECONDS, _LONGEST_DELAY_SECONDS = 0.1, 2.0

# A wait is longer by a random part: up to half of it, and up to a second. Clients that were refused
# together do not come back together.
_LONGEST_JITTER_SECONDS = 1.0

# More than any generation takes, and little enough for every timer: Node's end at 24.8 days.
_LONGEST_TIMEOUT_SECONDS = 7 * 86400.0

# An orchestrator that drains answers so for moments, until its name leads elsewhere.
_REFUSALS = 3

# A stream that a server refuses before it reads anything of it (REFUSED_STREAM: too many at once on
# one connection) is sent again as often, 13 s in all.
_RESENDS = 10

# How gRPC's libraries, and proxies, say REFUSED_STREAM, HTTP/2's error 7. No reason is beside it.
_REFUSED_STREAM = re.compile(
    r"refused[ _]stream|stream refused|RST_STREAM.*error code:? 7\b", re.IGNORECASE
)

# Where a stream goes on at others by itself, all of them are asked so often without any text: from
# one that has begun more is lost with it, and one that nobody has heard of is better told.
_ROUNDS, _ROUNDS_UNHEARD = 30, 2

# As many streams as one connection carries can break at once and all go on at once. After that a
# client knocks at most ten times a second, however many of its generations want to.
_RETRIES_AT_ONCE, _RETRIES_PER_SECOND = 100, 10.0


def timeout_seconds(timeout: float) -> float:
    """Check a timeout: any number from 0 on, of which more than a week is a week.

    Raises:
        InvalidFieldError: It is negative, or no number.
    """
    if not (isinstance(timeout, int | float) and timeout >= 0):
        raise InvalidFieldError.of("timeout", f"must be a number of seconds >= 0, not {timeout!r}")
    return float(min(timeout, _LONGEST_TIMEOUT_SECONDS))


def attempt_count(resume_attempts: int | None) -> int | None:
    """Check a number of attempts, or None: as many as make sense.

    Raises:
        InvalidFieldError: It is no whole number from 0 on.
    """
    if resume_attempts is None:
        return None
    if not (isinstance(resume_attempts, int) and resume_attempts >= 0):
        raise InvalidFieldError.of(
            "resume_attempts", f"must be a whole number >= 0, not {resume_attempts!r}"
        )
    return resume_attempts


def is_refused_stream(error: PacelineError) -> bool:
    """Whether a server took no more streams on a connection that stands: nobody began to work."""
    is_transports = isinstance(error, ConnectionLostError)
    return is_transports and _REFUSED_STREAM.search(error.message) is not None


class RetryBudget:
    """How often a client may try again, all its generations together.

    It makes them wait rather than fail: when an orchestrator dies, all its streams have a right to
    go on elsewhere, but not to knock at a closed door in chorus.

    Concurrency: any thread may use it.

    Args:
        patience_seconds: How long one generation asks on, after its last text.
        clock: A monotonic clock, in seconds.

    Attributes:
        patience_seconds: The same.
    """

    def __init__(
        self,
        *,
        patience_seconds: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.patience_seconds = patience_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._next_at = float("-inf")  # when one retry a time, without pause, would be due

    def take(self, *, within_seconds: float) -> float | None:
        """Take the next place, and return how long until it; None, and no place, if too long."""
        with self._lock:
            now = self._clock()
            earliest = now - (_RETRIES_AT_ONCE - 1) / _RETRIES_PER_SECOND
            at = max(self._next_at, earliest)
            wait_seconds = max(0.0, at - now)
            if wait_seconds >= within_seconds:
                return None
            self._next_at = at + 1 / _RETRIES_PER_SECOND
            return wait_seconds


class CallPlan:
    """One deadline and a number of tries for all streams of a generation.

    Args:
        timeout_seconds: The time for all of it.
        resume_attempts: How often to go on after an error that may pass. None: until all
            orchestrators have been asked 30 times and sent no text, or 2 times before any.
        endpoint_count: How many there are to ask. Where one is left, nothing is waited for.
        clock: A monotonic clock, in seconds.
        chance: Draws from [0, 1).

    Attributes:
        asked: Who has failed since the last text; the others come first.
    """

    def __init__(
        self,
        timeout_seconds: float,
        *,
        resume_attempts: int | None = 0,
        budget: RetryBudget,
        endpoint_count: int = 1,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._clock = clock
        self._chance = chance
        self._budget = budget
        self._deadline = clock() + timeout_seconds
        self._resumptions_left = resume_attempts
        self._refusals_left = _REFUSALS
        self._resend_count = 0
        self._delay_seconds = _FIRST_DELAY_SECONDS
        self._endpoint_count = endpoint_count
        self._rounds = 0
        self._is_heard = False
        self._failed_at: float | None = None  # since then no text has come
        self.asked: set[object] = set()

    @property
    def remaining_seconds(self) -> float:
        """The time left for the next call."""
        return max(0.0, self._deadline - self._clock())

    def hear(self) -> None:
        """Text has come: whoever failed before may do better now."""
        self._is_heard, self._rounds, self._resend_count = True, 0, 0
        self._failed_at = None
        self.asked.clear()
        if self._resumptions_left is None:
            self._delay_seconds = _FIRST_DELAY_SECONDS

    def delay_seconds(
        self, error: PacelineError, *, was_refused: bool, endpoint: object = None
    ) -> float:
        """How long to wait before going on after an error.

        Args:
            error: Why the call ended.
            was_refused: Nothing had come. If the orchestrator is shutting down, asking another one
                is then no resumption, and not counted as one.
            endpoint: Who was asked.

        Raises:
            PacelineError: The same error, if going on makes no sense.
        """
        if self._failed_at is None:
            self._failed_at = self._clock()
        if was_refused and (pause := self.resend_seconds(error, endpoint=endpoint)) is not None:
            return pause
        self.asked.add(endpoint)
        another_is_left = len(self.asked) < self._endpoint_count
        if not self._may_go_on(error, was_refused=was_refused, another_is_left=another_is_left):
            raise error
        delay = 0.0
        if not another_is_left:
            self.asked.clear()
            delay = self._next_delay(error)
            delay += self._chance() * min(delay / 2, _LONGEST_JITTER_SECONDS)
        remaining = self.remaining_seconds
        wait = self._budget.take(within_seconds=remaining) if delay < remaining else None
        if wait is None:
            raise error
        return max(delay, wait)

    def resend_seconds(self, error: PacelineError, *, endpoint: object = None) -> float | None:
        """How long to wait before a refused stream is sent again, which is no resumption.

        The pauses are random and no place of the budget is taken: the server is well, and those
        that it refused come back one by one.

        Args:
            error: Why the call ended, of which nothing had come.
            endpoint: Who was asked.

        Returns:
            The seconds; None if it was not refused, or was too often, or there is no time.
        """
        if not is_refused_stream(error):
            return None
        delay = min(_FIRST_DELAY_SECONDS * 2.0**self._resend_count, _LONGEST_DELAY_SECONDS)
        pause = delay * (0.5 + self._chance())
        if self._resend_count == _RESENDS or pause >= self.remaining_seconds:
            return None
        self._resend_count += 1
        self.asked.add(endpoint)
        if len(self.asked) < self._endpoint_count:
            return 0.0
        self.asked.clear()
        return pause

    def _may_go_on(self, error: PacelineError, *, was_refused: bool, another_is_left: bool) -> bool:
        if isinstance(error, DrainingError) and was_refused and self._refusals_left > 0:
            self._refusals_left -= 1
            return True
        if not isinstance(error, TryAgainError):
            return False
        if self._resumptions_left is None:
            return another_is_left or self._begin_round(error)
        self._resumptions_left -= 1
        return self._resumptions_left >= 0

    def _begin_round(self, error: PacelineError) -> bool:
        """Say whether all are to be asked once more."""
        self._rounds += 1
        if self._is_heard:
            silent_seconds = self._clock() - (self._failed_at or 0.0)
            return self._rounds < _ROUNDS and silent_seconds < self._budget.patience_seconds
        return self._rounds < _ROUNDS_UNHEARD and not isinstance(error, OverloadedError)

    def _next_delay(self, error: PacelineError) -> float:
        """As long as the server says; else longer each time."""
        own = self._delay_seconds
        self._delay_seconds = min(2 * own, _LONGEST_DELAY_SECONDS)
        told = error.retry_after_seconds
        return told if told is not None and told > 0 else own
