"""A model host without a model or a thread: the promises of the protos in a hundred lines."""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.errors import (
    CacheExhaustedError,
    DrainingError,
    LoadingError,
    PacelineError,
    PrefixMismatchError,
    PrefixNotHeldError,
    SessionNotFoundError,
    StaleCallError,
    SupersededError,
)
from paceline_contract.calls import (
    CallTiming,
    DecodeOptions,
    DraftOptions,
    LikeliestTokens,
    PrefixCall,
    VerificationRule,
    VerifyOptions,
)
from paceline_contract.proposal import Proposal
from paceline_contract.shares import FairShares
from paceline_engine.sessions.host import HostLimits, HostStatistics
from paceline_engine.terms import validation
from paceline_engine.terms.calls import (
    Decoded,
    Drafted,
    ModelDescription,
    SessionGrant,
    SessionSpec,
    Verdict,
)
from paceline_engine.terms.latencies import ForwardLatency, ModelLatencies
from support.prefix_digest import prefix_digest
from support.trees import with_runners_up

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from paceline_engine.terms.backend import ChatTemplate

_ONE_FORWARD = CallTiming(queue_ns=1000, forward_ns=2000, forward_count=1, row_count=1)


@dataclass
class _Session:
    spec: SessionSpec
    reserved_length: int
    held: list[int] = field(default_factory=list)
    sequence: int = 0
    waiting: asyncio.Future[None] | None = None


class FakeHost:
    """Continues a text by hashing it; a drafter is always right.

    Args:
        stalls: Whether a session's forwards after its first wait until they are superseded or
            cancelled.
        loads: Whether `start` succeeds at once; else it waits for `finish_loading`.
    """

    def __init__(
        self, *, limits: HostLimits | None = None, stalls: bool = False, loads: bool = True
    ) -> None:
        self.incarnation = "fake"
        self.limits = limits or HostLimits()
        self.tokenizer: bytes | None = json.dumps({"model": {"vocab": {}}}).encode()
        self.template: ChatTemplate | None = None
        self.overdue = 0.0
        self.finish_loading = asyncio.Event()
        if loads:
            self.finish_loading.set()
        self._ready = False
        self._is_over = False
        self._stalls = stalls
        self._sessions: dict[str, _Session] = {}
        self._counts = HostStatistics()
        self._places = FairShares(self.limits.session_limit)
        self._tokens = FairShares(self.limits.token_budget)
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def is_stalled(self) -> bool:
        """Whether a call waits that will never be answered."""
        return any(
            session.waiting is not None and not session.waiting.done()
            for session in self._sessions.values()
        )

    async def start(self) -> None:
        await self.finish_loading.wait()
        self._ready = True

    async def settled(self) -> None:
        await self._empty.wait()

    def end_sessions(self) -> None:
        self._is_over = True
        for session_id, session in tuple(self._sessions.items()):
            self._end_waiting(session, DrainingError("the server is shutting down"))
            self.close_session(session_id, caller=session.spec.owner)

    async def stop(self) -> None:
        self.end_sessions()

    @property
    def description(self) -> ModelDescription:
        if not self._ready:
            raise LoadingError("not yet", retry_after_seconds=1.0)
        return ModelDescription(
            name="fake",
            revision="1",
            fingerprint="fake-fingerprint",
            tokenizer_fingerprint=hashlib.sha256(self.tokenizer or b"").hexdigest(),
            vocabulary_size=300,
            eos_token_ids=(0,),
            context_length=4096,
            backend="fake",
            dtype="none",
            device="none",
            layer_count=0,
            cancels_between_layers=True,
            shares_forwards=False,
            takes_trees=True,
            is_invariant=False,
            verification_rules=(VerificationRule.EXACT,),
            self_draft_depth=2,
            self_draft_kind="simulated",
        )

    def tokenizer_bytes(self) -> bytes | None:
        return self.tokenizer

    def chat_template(self) -> ChatTemplate | None:
        return self.template

    def latencies(self) -> ModelLatencies:
        return ModelLatencies((ForwardLatency(1, 1000),), 10, 20)

    def overdue_seconds(self) -> float:
        return self.overdue

    def statistics(self) -> HostStatistics:
        self._counts.sessions_open = len(self._sessions)
        return self._counts

    def open_session(self, spec: SessionSpec) -> SessionGrant:
        self._refuse_when_over()
        validation.check_spec(spec, self.description)
        if not self._places.allows(spec.share):
            raise CacheExhaustedError("full", retry_after_seconds=1.0)
        self._reserve(spec.share, spec.reserve_length)
        self._places.take(spec.share)
        self._counts.sessions_opened += 1
        session_id = f"{self.incarnation}.{self._counts.sessions_opened}"
        self._sessions[session_id] = _Session(spec, spec.reserve_length)
        self._empty.clear()
        return SessionGrant(session_id, spec.lease_seconds)

    def renew_session(self, session_id: str, *, caller: str = "") -> float:
        return self._find(session_id, caller).spec.lease_seconds

    def live_sequence(self, session_id: str, *, caller: str = "") -> int | None:
        session = self._find(session_id, caller)
        is_live = session.waiting is not None and not session.waiting.done()
        return session.sequence if is_live else None

    def close_session(self, session_id: str, *, caller: str = "") -> None:
        session = self._sessions.get(session_id)
        if session is not None and session.spec.owner == caller:
            del self._sessions[session_id]
            self._places.give_back(session.spec.share)
            self._tokens.give_back(session.spec.share, session.reserved_length)
            self._counts.sessions_released += 1
            self._supersede(session)
        if not self._sessions:
            self._empty.set()

    def spec_of(self, session_id: str, *, caller: str) -> SessionSpec:
        return self._find(session_id, caller).spec

    async def verify(
        self, call: PrefixCall, proposal: Proposal, *, options: VerifyOptions
    ) -> Verdict:
        self._refuse_when_over()
        session = self._find(call.session_id, call.caller)
        spec = session.spec
        size = self.description.vocabulary_size
        validation.check_call(call, limit_length=spec.longest_length, vocabulary_size=size)
        validation.check_proposal(
            call, proposal, options=options, spec=spec, model=self.description
        )
        if proposal.distributions:
            validation.check_distributions(proposal, vocabulary_size=size)
        self._grow(session, call.prefix_length + len(proposal))
        prefix = await self._forward(session, call)
        held = list(prefix)

        def choose(row: int, _: int) -> int:
            held.extend(proposal.along([row - 1] if row else []))
            return self._next(held)

        path, next_token = proposal.follow(choose)
        session.held = held
        proposes = options.propose and spec.rule is VerificationRule.EXACT
        return Verdict(
            prefix_length=len(prefix),
            accepted_path=path,
            next_token=next_token,
            held_length=len(held),
            logprobs=self._logprobs(held, len(path) + 1) if options.logprobs else (),
            timing=_ONE_FORWARD,
            proposal=self._proposal([*held, next_token]) if proposes else Proposal(),
            top_logprobs=tuple(
                self._likeliest(held[:length], options.top_logprobs)
                for length in range(len(prefix), len(held) + 1)
                if options.top_logprobs
            ),
        )

    async def decode(self, call: PrefixCall, options: DecodeOptions) -> AsyncGenerator[Decoded]:
        self._refuse_when_over()
        session = self._find(call.session_id, call.caller)
        limit_length = session.spec.longest_length
        size = self.description.vocabulary_size
        validation.check_call(call, limit_length=limit_length, vocabulary_size=size)
        validation.check_decoding(call, options, limit_length=limit_length, vocabulary_size=size)
        self._grow(session, call.prefix_length + options.max_tokens)
        text = await self._forward(session, call)
        for found_count in range(options.max_tokens):
            if found_count:
                await self._wait(session)
            text.append(self._next(text))
            session.held = list(text)
            logprobs = self._logprobs(text[:-1], 1) if options.logprobs else ()
            likeliest = self._likeliest(text[:-1], options.top_logprobs)
            told = (likeliest,) if likeliest else ()
            yield Decoded(len(text) - 1, (text[-1],), logprobs, _ONE_FORWARD, told)
            if text[-1] in options.end_token_ids:
                break

    async def draft(self, call: PrefixCall, options: DraftOptions) -> AsyncGenerator[Drafted]:
        """Draft a chain, and runners-up that are always wrong; nothing follows on those."""
        self._refuse_when_over()
        session = self._find(call.session_id, call.caller)
        spec = session.spec
        size = self.description.vocabulary_size
        validation.check_call(call, limit_length=spec.longest_length, vocabulary_size=size)
        validation.check_drafting(call, options, spec=spec, model=self.description)
        self._grow(session, call.prefix_length + options.max_tokens)
        text = await self._forward(session, call)
        drafted = 0
        while drafted < options.max_tokens:
            if drafted:
                await self._wait(session)
            start = len(text)
            for _ in range(min(options.chunk_tokens, options.max_tokens - drafted)):
                text.append(self._next(text))
                drafted += 1
            session.held = list(text)
            chunk = Proposal(tuple(text[start:]))
            if (width := options.width) > 1:
                chunk = with_runners_up(chunk, start - call.prefix_length, width=width, size=size)
            yield Drafted(start, chunk, _ONE_FORWARD)

    async def _forward(self, session: _Session, call: PrefixCall) -> list[int]:
        """Fence, rebase and take a turn; return the prefix."""
        if call.sequence <= session.sequence:
            raise StaleCallError("stale")
        session.sequence = call.sequence
        self._supersede(session)
        if call.base_length > len(session.held):
            raise PrefixNotHeldError("not held", metadata={"held_length": str(len(session.held))})
        first = session.sequence == 1
        session.held = session.held[: call.base_length]
        if call.base_digest and call.base_digest != prefix_digest(session.held):
            raise PrefixMismatchError("other tokens")
        prefix = [*session.held, *call.token_ids]
        if not first:
            await self._wait(session)
        self._counts.forwards += 1
        return prefix

    async def _wait(self, session: _Session) -> None:
        if self._stalls:
            session.waiting = asyncio.get_running_loop().create_future()
            try:
                await session.waiting
            except asyncio.CancelledError:
                self._counts.calls_cancelled += 1
                raise

    def _supersede(self, session: _Session) -> None:
        self._end_waiting(session, SupersededError("a newer call replaced this one"))

    def _end_waiting(self, session: _Session, error: PacelineError) -> None:
        if session.waiting is not None and not session.waiting.done():
            session.waiting.set_exception(error)

    def _refuse_when_over(self) -> None:
        if self._is_over:
            raise DrainingError("the server is shutting down")

    def _find(self, session_id: str, caller: str) -> _Session:
        session = self._sessions.get(session_id)
        if session is None or session.spec.owner != caller:
            raise SessionNotFoundError("there is no such session")
        return session

    def _grow(self, session: _Session, length: int) -> None:
        if length > session.reserved_length:
            self._reserve(session.spec.share, length - session.reserved_length)
            session.reserved_length = length

    def _reserve(self, share: str, token_count: int) -> None:
        if not self._tokens.allows(share, token_count):
            raise CacheExhaustedError("full", retry_after_seconds=1.0)
        self._tokens.take(share, token_count)

    def _proposal(self, text: Sequence[int]) -> Proposal:
        """Propose two tokens after a text, which are right, and one beside them."""
        first = self._next(text)
        beside = (first + 1) % self.description.vocabulary_size
        return Proposal((first, beside, self._next([*text, first])), (0, 0, 1))

    def _logprobs(self, held: Sequence[int], count: int) -> tuple[float, ...]:
        """Return another number for each of the last held tokens, and for the one after them."""
        text = [*held, self._next(held)]
        ends = range(len(text) - count + 1, len(text) + 1)
        return tuple(-1.0 - self._next(text[:end]) for end in ends)

    def _likeliest(self, text: Sequence[int], count: int) -> LikeliestTokens:
        """Return its next token and those after it by number, each less likely."""
        size = self.description.vocabulary_size
        first, (said,) = self._next(text), self._logprobs(text, 1)
        return tuple(((first + rank) % size, said - rank) for rank in range(count))

    def _next(self, text: Sequence[int]) -> int:
        digest = hashlib.sha256(repr(list(text)).encode()).digest()
        return int.from_bytes(digest[:4], "little") % self.description.vocabulary_size
