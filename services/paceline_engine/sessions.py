"""The sessions of a model server: what each holds, and how long. Used on the event loop only.

A session's token list and its KV cache are kept apart. The list is what the contract speaks of, and
changes here, in the order in which calls arrive. The cache belongs to the worker thread, and takes
from the list's next version whatever it has computed already (`ModelCache`).
"""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Any

from paceline.errors import (
    CacheExhaustedError,
    PrefixMismatchError,
    PrefixNotHeldError,
    SessionNotFoundError,
    StaleCallError,
)
from paceline.prefix import TokenPrefix
from paceline_engine.calls import PrefixCall, SessionGrant, SessionSpec

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Iterator, Sequence

    from paceline_engine.backends.base import ModelCache
    from paceline_engine.live_calls import LiveCall

__all__ = ["Session", "SessionTable"]

_RETRY_SECONDS = 1.0


class Session:
    """What a server holds for one request.

    A call goes through `fence`, `rebase`, and if it succeeds `hold`. In between, and for good if it
    fails, the session holds the first min(held, base_length) tokens.

    Attributes:
        session_id: The handle.
        spec: What it was opened for.
        cache: The model's side; for the worker thread.
        live_call: Its newest call while that is queued or running.
        expires_at: When it ends if nothing happens, on the table's clock.
    """

    def __init__(self, session_id: str, spec: SessionSpec, cache: ModelCache[Any]) -> None:
        self.session_id = session_id
        self.spec = spec
        self.cache = cache
        self.live_call: LiveCall | None = None
        self.expires_at = 0.0
        self._prefix = TokenPrefix()
        self._sequence = 0

    @property
    def held_length(self) -> int:
        """How many tokens it holds."""
        return len(self._prefix)

    def fence(self, sequence: int) -> None:
        """Let only newer calls pass.

        Raises:
            StaleCallError: this one is not newer than the newest.
        """
        if sequence <= self._sequence:
            raise StaleCallError(f"sequence {sequence} is not above {self._sequence}")
        self._sequence = sequence

    def rebase(self, call: PrefixCall) -> array[int]:
        """Forget all but the call's base, and return the whole prefix that it means.

        Raises:
            PrefixNotHeldError: fewer tokens are held than the base has.
            PrefixMismatchError: other tokens are held than the digest says.
        """
        held_length, base_length = self.held_length, call.base_length
        if base_length > held_length:
            raise PrefixNotHeldError(
                f"the session holds {held_length} tokens, not {base_length}",
                metadata={"held_length": str(held_length)},
            )
        self._prefix.truncate(base_length)
        if (base_length or call.base_digest) and self._prefix.digest() != call.base_digest:
            raise PrefixMismatchError(f"the first {base_length} tokens held are others")
        prefix = self._prefix.tokens()
        prefix.extend(call.token_ids)
        return prefix

    def hold(self, token_ids: Sequence[int]) -> None:
        """Append tokens."""
        self._prefix.extend(token_ids)


class SessionTable:
    """All sessions of a server process, within its limits.

    Attributes:
        token_budget: Tokens that all of them together can reserve. Lower it before the first opens.

    Invariants:
        opened_count - released_count sessions are open; a session is released exactly once.
        A session with a live call never expires.
    """

    def __init__(
        self, *, incarnation: str, session_limit: int, token_budget: int, clock: Callable[[], float]
    ) -> None:
        """Build it.

        Args:
            incarnation: Names this server process, in every handle.
            session_limit: Sessions that can be open at once.
            token_budget: See the attribute.
            clock: Seconds that never go back; measures leases.
        """
        self._incarnation = incarnation
        self._session_limit = session_limit
        self.token_budget = token_budget
        self._clock = clock
        self._sessions: dict[str, Session] = {}
        self._reserved_tokens = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self.opened_count = 0
        self.released_count = 0
        self.expired_count = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(tuple(self._sessions.values()))

    @property
    def reserved_tokens(self) -> int:
        """Tokens reserved by the open sessions."""
        return self._reserved_tokens

    def open(
        self, spec: SessionSpec, new_cache: Callable[[SessionSpec], ModelCache[Any]]
    ) -> SessionGrant:
        """Reserve memory for a session and name it.

        Raises:
            CacheExhaustedError: there is no room.
        """
        self.expire()
        if len(self._sessions) >= self._session_limit:
            raise CacheExhaustedError(
                f"{self._session_limit} sessions are open, the most there can be",
                retry_after_seconds=_RETRY_SECONDS,
            )
        free_tokens = self.token_budget - self._reserved_tokens
        if spec.reserve_length > free_tokens:
            raise CacheExhaustedError(
                f"{spec.reserve_length} tokens wanted, {free_tokens} of {self.token_budget} free",
                retry_after_seconds=_RETRY_SECONDS,
            )
        session_id = f"{self._incarnation}.{secrets.token_urlsafe(32)}"
        session = Session(session_id, spec, new_cache(spec))
        self._sessions[session_id] = session
        self._empty.clear()
        self._reserved_tokens += spec.reserve_length
        self.opened_count += 1
        self.renew(session)
        return SessionGrant(session_id, spec.lease_seconds, spec.reserve_length)

    def find(self, session_id: str) -> Session:
        """Return an open session.

        Raises:
            SessionNotFoundError: it is unknown, closed, expired, or another process's.
        """
        session = self._sessions.get(session_id)
        if session is not None and self._is_over(session):
            self._expire(session)
            session = None
        if session is None:
            foreign = not session_id.startswith(f"{self._incarnation}.")
            raise SessionNotFoundError(
                "the session is another server process's" if foreign else "there is no such session"
            )
        return session

    def renew(self, session: Session) -> None:
        """Start its lease anew."""
        session.expires_at = self._clock() + session.spec.lease_seconds

    def close(self, session_id: str) -> Session | None:
        """Release a session, if there is one."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._reserved_tokens -= session.spec.reserve_length
            self.released_count += 1
            if not self._sessions:
                self._empty.set()
        return session

    async def emptied(self) -> None:
        """Wait until no session is open."""
        await self._empty.wait()

    def expire(self) -> int:
        """Release every session whose lease is over, and say how many."""
        over = [session for session in self._sessions.values() if self._is_over(session)]
        for session in over:
            self._expire(session)
        return len(over)

    def _is_over(self, session: Session) -> bool:
        return session.live_call is None and self._clock() >= session.expires_at

    def _expire(self, session: Session) -> None:
        self.close(session.session_id)
        self.expired_count += 1
