"""The sessions of a model server, and how long each is there. Used on the event loop only."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from typing import TYPE_CHECKING

from paceline.errors import CacheExhaustedError, SessionNotFoundError, SupersededError
from paceline_contract.shares import FairShares
from paceline_engine.sessions.kept_texts import KeptTexts
from paceline_engine.sessions.session import Session, wanted_lengths
from paceline_engine.terms.calls import SessionGrant

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Iterator

    from paceline.errors import PacelineError
    from paceline_engine.terms.calls import SessionSpec
    from paceline_engine.terms.model_cache import ModelCache

_RETRY_SECONDS = 1.0


class SessionTable:
    """All sessions of a server process, within its limits.

    Sessions and reserved tokens are divided fairly among the shares that sessions name
    (`FairShares`). A session's reservation is a step ahead of its sequence while there is room. A
    new session has to leave this room to the open sessions of its share, and to one session of each
    other share: so new work waits before running work does, and a share with many sessions cannot
    lock others out. Sequences of ended sessions are kept (`KeptTexts`) in unreserved memory.

    Args:
        incarnation: Names this server process, in every handle.
        session_limit: Sessions that can be open at once.
        token_budget: Tokens that all of them together can reserve.
        clock: Seconds that never go back; measures leases.
        keep_seconds: How long sequences of ended sessions are kept; 0: they are not.
        on_end: Called with each session that ends for any reason, and with its live call's
            error.

    Attributes:
        kept_budget: Tokens that kept sequences may have memory for, even if more is free.
        tokens_per_text: Tokens that each sequence counts for beside its own: a recurrent state
            takes memory however short the sequence is. Set it before the first opens.

    Invariants:
        Reserved and kept tokens together fit the budget.
        opened_count - released_count sessions are open; a session is released exactly once.
        A session with a live call never expires.
    """

    def __init__(
        self,
        *,
        incarnation: str,
        session_limit: int,
        token_budget: int,
        clock: Callable[[], float],
        keep_seconds: float = 0.0,
        on_end: Callable[[Session, PacelineError], None] = lambda *_: None,
    ) -> None:
        self._incarnation = incarnation
        self._places = FairShares(session_limit)
        self._tokens = FairShares(token_budget)
        self._clock = clock
        self._on_end = on_end
        self._kept = KeptTexts(seconds=keep_seconds, clock=clock)
        self.kept_budget = token_budget
        self.tokens_per_text = 0
        self._sessions: dict[str, Session] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self.opened_count = 0
        self.released_count = 0
        self.expired_count = 0
        self.reused_tokens = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(tuple(self._sessions.values()))

    @property
    def token_budget(self) -> int:
        """Tokens that all of them together can reserve. Lower it before the first opens."""
        return self._tokens.capacity

    @token_budget.setter
    def token_budget(self, token_budget: int) -> None:
        self._tokens.capacity = token_budget

    @property
    def reserved_tokens(self) -> int:
        """Tokens reserved by the open sessions."""
        return self._tokens.capacity - self._tokens.free

    @property
    def kept_tokens(self) -> int:
        """Tokens that memory of ended sessions is kept for."""
        return self._kept.token_count

    def open(
        self, spec: SessionSpec, new_cache: Callable[[SessionSpec], ModelCache]
    ) -> SessionGrant:
        """Reserve memory for a session and name it.

        Raises:
            CacheExhaustedError: there is no room, or no more for its share.
        """
        self.expire()
        if not self._places.allows(spec.share):
            raise CacheExhaustedError(
                f"{len(self)} of {self._places.capacity} sessions are open,"
                f" {self._places.held_by(spec.share)} of them this client's",
                retry_after_seconds=_RETRY_SECONDS,
            )
        wanted = wanted_lengths(spec.reserve_length, spec)
        reserved = next((each for each in wanted if self._leaves_room(spec.share, each)), None)
        if reserved is None:
            raise self._no_room(spec, spec.reserve_length + self.tokens_per_text)
        session_id = f"{self._incarnation}.{secrets.token_urlsafe(32)}"
        session = Session(session_id, spec, new_cache(spec))
        self._tokens.take(spec.share, self.tokens_per_text)
        self._resize(session, reserved)
        self._sessions[session_id] = session
        self._empty.clear()
        self._places.take(spec.share)
        self.opened_count += 1
        self.renew(session)
        return SessionGrant(session_id, spec.lease_seconds)

    def grow(self, session: Session, length: int) -> None:
        """Reserve memory for a session's sequence, and for a step more if there is room.

        A share's only session is refused only if the memory is not there at all.

        Raises:
            CacheExhaustedError: there is no room, or no more for its share. Nothing has changed.
        """
        if length <= session.needed_length:
            return
        share, held = session.spec.share, session.reserved_length
        self._tokens.give_back(share, held)
        wanted = wanted_lengths(length, session.spec)
        reserved = next((each for each in wanted if self._tokens.allows(share, each)), 0)
        self._tokens.take(share, held)
        if max(reserved, held) < length:
            raise self._no_room(session.spec, length - held)
        session.needed_length = length
        self._resize(session, max(reserved, held))

    def _leaves_room(self, share: str, length: int) -> bool:
        """Whether a new session leaves the room that open sessions lack.

        That is the sum over all sessions of its share, and the most of one session of each other.
        """
        missing: Counter[str] = Counter()
        for session in self._sessions.values():
            lacks, whose = session.missing_length, session.spec.share
            known = missing[whose]
            missing[whose] = known + lacks if whose == share else max(known, lacks)
        length += self.tokens_per_text
        is_there = length + missing.total() <= self._tokens.free
        return is_there and self._tokens.allows(share, length + missing[share])

    def _resize(self, session: Session, length: int) -> None:
        self._tokens.take(session.spec.share, length - session.reserved_length)
        session.reserved_length = length
        self._shrink_kept()
        session.cache.reserve(length)

    def _shrink_kept(self) -> None:
        self._kept.shrink(min(self._tokens.free, self.kept_budget))

    def _no_room(self, spec: SessionSpec, token_count: int) -> CacheExhaustedError:
        tokens = self._tokens
        return CacheExhaustedError(
            f"{token_count} tokens wanted, {tokens.free} of {tokens.capacity} free,"
            f" {tokens.held_by(spec.share)} this client's",
            retry_after_seconds=_RETRY_SECONDS,
        )

    def find(self, session_id: str, *, caller: str = "") -> Session:
        """Return an open session.

        Raises:
            SessionNotFoundError: it is unknown, closed, expired, or another process's or caller's.
        """
        session = self._sessions.get(session_id)
        if session is not None and self._is_over(session):
            self._expire(session)
            session = None
        if session is None or session.spec.owner != caller:
            foreign = not session_id.startswith(f"{self._incarnation}.")
            raise SessionNotFoundError(
                "the session is another server process's" if foreign else "there is no such session"
            )
        return session

    def begin(self, session: Session, prefix: array[int]) -> None:
        """Let a session begin with a kept sequence that has the same first tokens."""
        spec = session.spec
        try:
            source, length = self._kept.find(
                prefix, owner=spec.owner, share=spec.share, lora=spec.lora
            )
        except LookupError:
            return
        session.cache.begin_like(source)
        session.reused_count = source.reachable(min(length, len(prefix) - 1))
        self.reused_tokens += session.reused_count

    def renew(self, session: Session) -> None:
        """Renew its lease."""
        session.expires_at = self._clock() + session.spec.lease_seconds

    def close(self, session_id: str, error: PacelineError | None = None) -> Session | None:
        """Release a session, if there is one.

        Args:
            session_id: Its handle.
            error: Its live call's error; by default SupersededError.
        """
        session = self._sessions.pop(session_id, None)
        if session is None:
            return None
        spec, size = session.spec, session.reserved_length + self.tokens_per_text
        self._on_end(session, error or SupersededError("the session was closed"))
        self._places.give_back(spec.share)
        self._tokens.give_back(spec.share, size)
        self.released_count += 1
        session.cache.end()
        self._kept.keep(
            session.cache,
            session.held(),
            owner=spec.owner,
            share=spec.share,
            lora=spec.lora,
            size=size,
        )
        self._shrink_kept()
        if not self._sessions:
            self._empty.set()
        return session

    async def emptied(self) -> None:
        """Wait until no session is open."""
        await self._empty.wait()

    def expire(self) -> int:
        """Release every session whose lease is over, and return how many."""
        self._kept.expire()
        over = [session for session in self._sessions.values() if self._is_over(session)]
        for session in over:
            self._expire(session)
        return len(over)

    def _is_over(self, session: Session) -> bool:
        return session.live_call is None and self._clock() >= session.expires_at

    def _expire(self, session: Session) -> None:
        self.close(session.session_id)
        self.expired_count += 1
