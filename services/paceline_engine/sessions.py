"""The sessions of a model server: what each holds, and how long. Used on the event loop only.

A session's token list and its KV cache are kept apart. The list is what the contract speaks of, and
changes here, in the order in which calls arrive. The cache belongs to the worker thread, and takes
from the list's next version whatever it has computed already (`ModelCache`).
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from typing import TYPE_CHECKING

from paceline.errors import (
    CacheExhaustedError,
    PrefixMismatchError,
    PrefixNotHeldError,
    SessionNotFoundError,
    StaleCallError,
    SupersededError,
)
from paceline.prefix import TokenPrefix
from paceline.shares import FairShares
from paceline_engine.calls import PrefixCall, SessionGrant, SessionSpec
from paceline_engine.kept_texts import KeptTexts

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Iterator, Sequence

    from paceline.errors import PacelineError
    from paceline_engine.jobs import Job
    from paceline_engine.live_calls import LiveCall
    from paceline_engine.model_cache import ModelCache

__all__ = ["Session", "SessionTable"]

_RETRY_SECONDS = 1.0

# Seconds of a fast stream, and little memory if it ends at once.
_STEP_TOKENS = 256


class Session:
    """What a server holds for one request.

    A call goes through `fence`, `rebase`, and if it succeeds `hold`. In between, and for good if it
    fails, the session holds the first min(held, base_length) tokens.

    Attributes:
        spec: What it was opened for.
        needed_length: The longest text that it was asked to hold.
        reserved_length: Tokens that memory is reserved for: as many, and if there was room a step
            more. `SessionTable` counts them.
        cache: The model's side; for the worker thread.
        live_call: Its newest call while that is queued or running.
        ahead: What the model goes on with by itself after its last call.
        reused_count: Tokens of its first prefix that a kept text has; `SessionTable` sets it.
        expires_at: When it ends if nothing happens, on the table's clock.
    """

    def __init__(self, session_id: str, spec: SessionSpec, cache: ModelCache) -> None:
        self.session_id = session_id
        self.spec = spec
        self.needed_length = spec.reserve_length
        self.reserved_length = spec.reserve_length
        self.cache = cache
        self.live_call: LiveCall | None = None
        self.ahead: Job | None = None
        self.reused_count = 0
        self.expires_at = 0.0
        self._prefix = TokenPrefix()
        self._sequence = 0

    @property
    def is_new(self) -> bool:
        """Whether it has had no call yet."""
        return not self._sequence

    @property
    def held_length(self) -> int:
        """How many tokens it holds."""
        return len(self._prefix)

    @property
    def live_sequence(self) -> int:
        """The sequence of its call that is queued or running; 0 if none is."""
        return self._sequence if self.live_call is not None else 0

    @property
    def missing_length(self) -> int:
        """How many tokens its reservation lacks of being a step ahead."""
        return _a_step_beyond(self.needed_length, self.spec) - self.reserved_length

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

    def held(self) -> array[int]:
        """Return a copy of the tokens it holds."""
        return self._prefix.tokens()

    def take_reused(self) -> int:
        """Return how many tokens a kept text has of it: to the first that is answered, else 0."""
        count, self.reused_count = self.reused_count, 0
        return count


class SessionTable:
    """All sessions of a server process, within its limits.

    Sessions and reserved tokens are shared fairly among the shares that sessions name
    (`FairShares`). What a session reserves keeps a step ahead of its text while there is room, and
    a new session has to leave that room to the open ones of its share, and to one of each other
    share: so new work waits before running work, and a share with many sessions locks nobody out.
    What ended sessions have computed is kept (`KeptTexts`) in what nobody reserves.

    Attributes:
        kept_budget: Tokens that these may have memory for, even where more is free.

    Invariants:
        What is reserved and what is kept fit the budget together.
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
        """Build it.

        Args:
            incarnation: Names this server process, in every handle.
            session_limit: Sessions that can be open at once.
            token_budget: Tokens that all of them together can reserve.
            clock: Seconds that never go back; measures leases.
            keep_seconds: How long texts of ended sessions are kept; 0: they are not.
            on_end: Called with each session that ends, however that comes, and with what its live
                call is to be told.
        """
        self._incarnation = incarnation
        self._places = FairShares(session_limit)
        self._tokens = FairShares(token_budget)
        self._clock = clock
        self._on_end = on_end
        self._kept = KeptTexts(seconds=keep_seconds, clock=clock)
        self.kept_budget = token_budget
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
        wanted = (_a_step_beyond(spec.reserve_length, spec), spec.reserve_length)
        reserved = next((each for each in wanted if self._leaves_room(spec.share, each)), None)
        if reserved is None:
            raise self._no_room(spec, spec.reserve_length)
        session_id = f"{self._incarnation}.{secrets.token_urlsafe(32)}"
        session = Session(session_id, spec, new_cache(spec))
        self._resize(session, reserved, held=0)
        self._sessions[session_id] = session
        self._empty.clear()
        self._places.take(spec.share)
        self.opened_count += 1
        self.renew(session)
        return SessionGrant(session_id, spec.lease_seconds, reserved)

    def grow(self, session: Session, length: int) -> None:
        """Reserve what a session needs for a text, and a step more where there is room for it.

        A share's only session is refused only what is not there.

        Raises:
            CacheExhaustedError: there is no room, or no more for its share. Nothing has changed.
        """
        if length <= session.needed_length:
            return
        share, held = session.spec.share, session.reserved_length
        self._tokens.give_back(share, held)
        wanted = (_a_step_beyond(length, session.spec), length)
        reserved = next((each for each in wanted if self._tokens.allows(share, each)), 0)
        self._tokens.take(share, held)
        if max(reserved, held) < length:
            raise self._no_room(session.spec, length - held)
        session.needed_length = length
        self._resize(session, max(reserved, held), held=held)

    def _leaves_room(self, share: str, length: int) -> bool:
        """Whether a new session leaves what open ones lack: its own share's all, others' one."""
        missing: Counter[str] = Counter()
        for session in self._sessions.values():
            lacks, whose = session.missing_length, session.spec.share
            missing[whose] = (
                missing[whose] + lacks if whose == share else max(missing[whose], lacks)
            )
        is_there = length + missing.total() <= self._tokens.free
        return is_there and self._tokens.allows(share, length + missing[share])

    def _resize(self, session: Session, length: int, *, held: int) -> None:
        self._tokens.take(session.spec.share, length - held)
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
        if session is not None and session.spec.owner != caller:
            session = None
        if session is None:
            foreign = not session_id.startswith(f"{self._incarnation}.")
            raise SessionNotFoundError(
                "the session is another server process's" if foreign else "there is no such session"
            )
        return session

    def begin(self, session: Session, prefix: array[int]) -> None:
        """Let a session's first prefix begin with what is kept of such a text."""
        spec = session.spec
        try:
            source, length = self._kept.find(prefix, owner=spec.owner, share=spec.share)
        except LookupError:
            return
        session.cache.begin_like(source)
        session.reused_count = min(length, len(prefix) - 1)
        self.reused_tokens += session.reused_count

    def renew(self, session: Session) -> None:
        """Start its lease anew."""
        session.expires_at = self._clock() + session.spec.lease_seconds

    def close(self, session_id: str, error: PacelineError | None = None) -> Session | None:
        """Release a session, if there is one.

        Args:
            session_id: Its handle.
            error: What its live call is told; by default that the session was closed.
        """
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._on_end(session, error or SupersededError("the session was closed"))
            self._places.give_back(session.spec.share)
            self._tokens.give_back(session.spec.share, session.reserved_length)
            self.released_count += 1
            self._keep_text(session)
            if not self._sessions:
                self._empty.set()
        return session

    def _keep_text(self, session: Session) -> None:
        session.cache.end()
        self._kept.keep(
            session.cache,
            session.held(),
            owner=session.spec.owner,
            share=session.spec.share,
            size=session.reserved_length,
        )
        self._shrink_kept()

    async def emptied(self) -> None:
        """Wait until no session is open."""
        await self._empty.wait()

    def expire(self) -> int:
        """Release every session whose lease is over, and say how many."""
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


def _a_step_beyond(length: int, spec: SessionSpec) -> int:
    # A tree's branches can need more than the longest text.
    return max(length, min(length + _STEP_TOKENS, spec.longest_length))
