"""When a client tries again, and when it gives up: deadlines, delays and their budget, no I/O."""

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

# A delay is lengthened by a random part, at most half of it and at most a second, so that clients
# that were refused at the same time do not return at the same time.
_LONGEST_JITTER_SECONDS = 1.0

# Longer than any generation, and short enough for every timer: Node's are limited to 24.8 days.
_LONGEST_TIMEOUT_SECONDS = 7 * 86400.0

# A draining orchestrator refuses for moments, until its name leads to another one.
_REFUSALS = 3

# A stream that a server refused unread is sent again so often (REFUSED_STREAM: too many streams on
# one connection): 13 s in all.
_RESENDS = 10

# REFUSED_STREAM, HTTP/2's error 7, in the messages of gRPC's libraries and of proxies.
_REFUSED_STREAM = re.compile(
    r"refused[ _]stream|stream refused|RST_STREAM.*error code:? 7\b", re.IGNORECASE
)

# Rounds over all orchestrators that bring no text, before a generation gives up. A generation that
# has begun tries longer, since its user would lose the text so far.
_ROUNDS, _ROUNDS_UNHEARD = 30, 2

# All streams of one connection can break at once, and resume at once. After that a client retries
# at most ten times a second, all its generations together.
_RETRIES_AT_ONCE, _RETRIES_PER_SECOND = 100, 10.0


def timeout_seconds(timeout: float) -> float:
    """Check a timeout: a number >= 0; more than a week counts as a week.

    Raises:
        InvalidFieldError: The timeout is negative or not a number.
    """
    if not (isinstance(timeout, int | float) and timeout >= 0):
        raise InvalidFieldError.of("timeout", f"must be a number of seconds >= 0, not {timeout!r}")
    return float(min(timeout, _LONGEST_TIMEOUT_SECONDS))


def attempt_count(resume_attempts: int | None) -> int | None:
    """Check a number of attempts; None: as many as are useful.

    Raises:
        InvalidFieldError: The number is negative or not whole.
    """
    if resume_attempts is None:
        return None
    if not (isinstance(resume_attempts, int) and resume_attempts >= 0):
        raise InvalidFieldError.of(
            "resume_attempts", f"must be a whole number >= 0, not {resume_attempts!r}"
        )
    return resume_attempts


def is_refused_stream(error: PacelineError) -> bool:
    """Whether the server refused a stream unread, on a connection that works."""
    is_transports = isinstance(error, ConnectionLostError)
    return is_transports and _REFUSED_STREAM.search(error.message) is not None


class RetryBudget:
    """Limits how often a client's generations retry, all of them together.

    A generation over the limit waits and does not fail: when an orchestrator ends, all its streams
    may continue at another one, but not all at the same moment.

    Concurrency: any thread may use it.

    Args:
        patience_seconds: How long one generation retries, counted from its last text.
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
        self._next_at = float("-inf")  # the next place, if retries came at the full rate

    def take(self, *, within_seconds: float) -> float | None:
        """Take the next place, and return the time until it; None, without a place, if too long."""
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
    """The deadline and the attempts of one generation, or of another call.

    Args:
        timeout_seconds: The time for all streams of the generation.
        resume_attempts: How often to resume after a `TryAgainError`. None: until all orchestrators
            have been asked 30 times without any text, or 2 times before the first text.
        endpoint_count: Number of orchestrators. The client waits only after all have been asked.
        clock: A monotonic clock, in seconds.
        chance: Draws from [0, 1).

    Attributes:
        asked: The endpoints that failed since the last text; the others are asked first.
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
        """Note that text has come: endpoints that failed earlier may be asked again."""
        self._is_heard, self._rounds, self._resend_count = True, 0, 0
        self._failed_at = None
        self.asked.clear()
        if self._resumptions_left is None:
            self._delay_seconds = _FIRST_DELAY_SECONDS

    def delay_seconds(
        self, error: PacelineError, *, was_refused: bool, endpoint: object = None
    ) -> float:
        """Return how long to wait before the generation continues after an error.

        Args:
            error: The error that ended the call.
            was_refused: Whether the call ended before any message. If the orchestrator is shutting
                down, the next call is then not counted as a resumption.
            endpoint: The endpoint that was asked.

        Raises:
            PacelineError: The same error, if another attempt is not allowed or not useful.
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
        """Return how long to wait before a refused stream is sent again.

        This is not a resumption. The pauses are random, so that refused streams return one by one;
        the server works, so the budget is not used.

        Args:
            error: The error that ended the call before any message.
            endpoint: The endpoint that was asked.

        Returns:
            Seconds; None if the stream was not refused, was refused too often, or no time is left.
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
        """Begin a round over all orchestrators; return whether it is allowed."""
        self._rounds += 1
        if self._is_heard:
            silent_seconds = self._clock() - (self._failed_at or 0.0)
            return self._rounds < _ROUNDS and silent_seconds < self._budget.patience_seconds
        return self._rounds < _ROUNDS_UNHEARD and not isinstance(error, OverloadedError)

    def _next_delay(self, error: PacelineError) -> float:
        """Return the server's own delay; without one, a delay that doubles each time."""
        own = self._delay_seconds
        self._delay_seconds = min(2 * own, _LONGEST_DELAY_SECONDS)
        told = error.retry_after_seconds
        return told if told is not None and told > 0 else own
