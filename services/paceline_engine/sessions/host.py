"""The model host: everything a model server does, behind plain Python calls.

The servicers turn requests into these calls and the answers into responses; nothing here knows
gRPC. The caller checks the model fingerprint that a request expects.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from paceline.errors import (
    DrainingError,
    LoadingError,
    OverloadedError,
    SessionNotFoundError,
)
from paceline_contract.calls import DecodeOptions, DraftOptions, PrefixCall, VerifyOptions
from paceline_contract.proposal import NOTHING, Proposal
from paceline_engine.scheduling.accounting import HostLimits, HostStatistics
from paceline_engine.scheduling.latencies import LatencyMeter, measure
from paceline_engine.scheduling.worker import ModelWorker
from paceline_engine.sessions.host_calls import HostCalls
from paceline_engine.sessions.live_calls import LiveCalls
from paceline_engine.sessions.session_table import SessionTable
from paceline_engine.terms import validation
from paceline_engine.terms.backend import (
    Backend,
    DeviceLostError,
    Interrupt,
    ModelLoadError,
    TokenMemory,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from paceline_contract.sampling import Grammar
    from paceline_engine.terms.backend import ChatTemplate
    from paceline_engine.terms.calls import (
        Decoded,
        Drafted,
        ModelDescription,
        SessionGrant,
        SessionSpec,
        Verdict,
    )
    from paceline_engine.terms.latencies import ModelLatencies

__all__ = ["HostLimits", "HostStatistics", "ModelHost"]

_log = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0
# An orchestrator waits 2 s for a session before it calls the server silent.
_COMPILING_SECONDS = 1.0
_DEFAULT_LIMITS = HostLimits()
_PLAIN = VerifyOptions()


class ModelHost:
    """One model, its sessions, and the thread that computes.

    Concurrency: every method belongs to the event loop on which `start` was awaited, and none
    blocks it; only `statistics` may be called from anywhere. Calls of one session supersede each
    other, calls of different sessions take turns.

    Cancellation: leaving `verify` or `draft` by a cancel, or closing the generator of `draft`,
    withdraws the call: it leaves the queue, or its forward is given up.

    Attributes:
        incarnation: Names this process in session handles.
        limits: The host's limits; `start` may lower the token budget.
    """

    def __init__(
        self,
        load_backend: Callable[[], Backend],
        *,
        limits: HostLimits = _DEFAULT_LIMITS,
        on_device_lost: Callable[[DeviceLostError], None] = lambda _: None,
        incarnation: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Build it; nothing is loaded before `start`.

        Args:
            load_backend: Loads the model; called on the worker thread.
            limits: The host's limits.
            on_device_lost: Called once, on the loop, when the process has to end.
            incarnation: Names this process in session handles; random by default.
            clock: Seconds that never go back; measures leases.
        """
        self.incarnation = incarnation or secrets.token_hex(8)
        self.limits = limits
        self._load_backend = load_backend
        self._on_device_lost = on_device_lost
        self._backend: Backend | None = None
        self._sessions = SessionTable(
            incarnation=self.incarnation,
            session_limit=limits.session_limit,
            token_budget=limits.token_budget,
            clock=clock,
            keep_seconds=limits.keep_seconds,
            on_end=lambda session, error: self._live.leave(session, error),
        )
        self._meter = LatencyMeter()
        self._counts = HostStatistics()
        self._worker = ModelWorker(
            queue_limit=limits.queue_limit,
            meter=self._meter,
            on_forward=self._counts.count_forward,
            on_device_lost=self._lose_device,
        )
        self._turns_to_compile: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._compilations: set[asyncio.Task[None]] = set()
        self._live = LiveCalls(self._worker, counts=self._counts, sessions=self._sessions)
        self._calls = HostCalls(
            self._sessions,
            self._live,
            meter=self._meter,
            counts=self._counts,
            serving=self._serving,
        )
        self._ready = False
        self._reaper: asyncio.TimerHandle | None = None

    # --- life ---------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the model, run it warm, and serve.

        Raises:
            ModelLoadError: the model cannot be served.
        """
        self._worker.start()
        try:
            backend = await self._worker.run(lambda _: self._load_backend())
            await self._worker.run(lambda interrupt: self._warm_up(backend, interrupt))
            if self.limits.fits_memory:
                self._fit_budget(await self._worker.run(lambda _: backend.token_memory()))
        except BaseException:
            await self._worker.stop()
            raise
        self._backend = self._worker.backend = backend
        self._ready = True
        self._reap()

    async def settled(self) -> None:
        """Wait until every session is closed, or its lease is over."""
        await self._sessions.emptied()

    async def stop(self) -> None:
        """Refuse new calls, end the live ones and all sessions, and stop the thread."""
        if self._reaper is not None:
            self._reaper.cancel()
        self.end_sessions()
        await self._worker.stop()
        await self._live.all_left()

    def end_sessions(self) -> None:
        """End all sessions and their live calls; these and later calls get DrainingError."""
        self._ready = False
        for session in self._sessions:
            self._sessions.close(session.session_id, DrainingError("the server is shutting down"))

    @property
    def ready(self) -> bool:
        """Whether calls are taken."""
        return self._ready

    def _warm_up(self, backend: Backend, interrupt: Interrupt) -> None:
        backend.measure(interrupt)
        if self.limits.warm_up_rounds:
            measure(backend, self._meter, rounds=self.limits.warm_up_rounds, interrupt=interrupt)

    def _fit_budget(self, memory: TokenMemory | None) -> None:
        if memory is None:
            return
        token_budget = min(self.limits.token_budget, memory.token_count)
        if token_budget <= memory.tokens_per_text:
            raise ModelLoadError(
                f"the model leaves no memory for sessions: {memory.free_bytes} bytes are free, and"
                f" a token takes {memory.bytes_per_token}"
                + (f", and a text {memory.bytes_per_text} more" if memory.bytes_per_text else "")
            )
        self._sessions.tokens_per_text = memory.tokens_per_text
        self.limits = replace(self.limits, token_budget=token_budget)
        self._sessions.token_budget = token_budget
        self._sessions.kept_budget = int(token_budget * memory.kept_share)
        _log.info("token budget", extra={"token_budget": token_budget, **asdict(memory)})

    def _reap(self) -> None:
        self._sessions.expire()
        loop = asyncio.get_running_loop()
        self._reaper = loop.call_later(self.limits.reap_seconds, self._reap)

    def _lose_device(self, error: DeviceLostError) -> None:
        self._ready = False
        self._on_device_lost(error)

    # --- what it is ---------------------------------------------------------------------------

    @property
    def description(self) -> ModelDescription:
        """The model.

        Raises:
            LoadingError: it is not loaded yet.
        """
        return self._loaded().description

    def tokenizer_bytes(self) -> bytes | None:
        """Return the tokenizer.json, or None if the model has none.

        Raises:
            LoadingError: the model is not loaded yet.
        """
        return self._loaded().tokenizer

    def chat_template(self) -> ChatTemplate | None:
        """Return the model's chat template, or None if it only continues text.

        Raises:
            LoadingError: the model is not loaded yet.
        """
        return self._loaded().chat_template

    def latencies(self) -> ModelLatencies:
        """Return the times of forwards, measured at the start and while serving."""
        stages = self._backend.stage_measures if self._backend else ()
        return replace(self._meter.latencies(), stages=stages)

    def overdue_seconds(self) -> float:
        """How long the running forward has taken, if it counts as hung; else 0."""
        return self._worker.overdue_ns / 1e9

    def spec_of(self, session_id: str, *, caller: str = "") -> SessionSpec:
        """Return a session's specification.

        Raises:
            SessionNotFoundError: there is no such session, or it is not the caller's.
        """
        return self._sessions.find(session_id, caller=caller).spec

    def statistics(self) -> HostStatistics:
        """Return the counts, as a copy."""
        return replace(
            self._counts,
            sessions_open=len(self._sessions),
            tokens_reserved=self._sessions.reserved_tokens,
            queue_length=self._worker.queue_length,
            forwards_running=int(self._worker.busy),
            sessions_opened=self._sessions.opened_count,
            sessions_released=self._sessions.released_count,
            sessions_expired=self._sessions.expired_count,
            tokens_kept=self._sessions.kept_tokens,
            tokens_reused=self._sessions.reused_tokens,
            forwards_interrupted=self._worker.interrupted_count,
            forwards_wasted=self._worker.waste.forward_count,
            wasted_ns=self._worker.waste.forward_ns,
            freeing_ns=self._worker.waste.freeing_ns,
            layers_run=self._backend.layers_run if self._backend else 0,
            model_forwards=self._backend.model_forwards if self._backend else (),
        )

    # --- sessions -----------------------------------------------------------------------------

    async def prepare_session(self, spec: SessionSpec) -> None:
        """Compile the grammar of a session that is about to be opened, if it has one.

        A tenant's grammars are compiled one after another, beside the event loop and beside the
        model, so that nobody else waits for them.

        Raises:
            InvalidFieldError, UnsupportedError, LoadingError, DrainingError.
        """
        if (grammar := spec.sampling.grammar) is None:
            return
        with self._counts.refusals():
            backend = self._serving()
            validation.check_spec(spec, backend.description)
            try:
                async with asyncio.timeout(_COMPILING_SECONDS):
                    await self._compile(backend, grammar, share=spec.share)
            except TimeoutError:
                raise OverloadedError(
                    "this client's grammars are still being compiled",
                    retry_after_seconds=_COMPILING_SECONDS,
                ) from None

    def open_session(self, spec: SessionSpec) -> SessionGrant:
        """Reserve memory for a session and name it.

        Raises:
            InvalidFieldError, UnsupportedError, CacheExhaustedError, LoadingError, DrainingError.
        """
        with self._counts.refusals():
            backend = self._serving()
            validation.check_spec(spec, backend.description)
            return self._sessions.open(spec, backend.new_cache)

    def renew_session(self, session_id: str, *, caller: str = "") -> float:
        """Renew a session's lease, and return its seconds.

        Raises:
            SessionNotFoundError: there is no such session, or it is not the caller's.
        """
        session = self._sessions.find(session_id, caller=caller)
        self._sessions.renew(session)
        return session.spec.lease_seconds

    def live_sequence(self, session_id: str, *, caller: str = "") -> int | None:
        """Return the sequence of a session's call that can expect an answer; None if none can.

        Raises:
            SessionNotFoundError: there is no such session.
        """
        session = self._sessions.find(session_id, caller=caller)
        return None if self._worker.overdue_ns else session.live_sequence

    def close_session(self, session_id: str, *, caller: str = "") -> None:
        """End a session and its live call. One that is unknown, or not the caller's, is fine."""
        with suppress(SessionNotFoundError):
            self._sessions.find(session_id, caller=caller)
            self._sessions.close(session_id)

    # --- calls --------------------------------------------------------------------------------

    async def verify(
        self, call: PrefixCall, proposal: Proposal = NOTHING, *, options: VerifyOptions = _PLAIN
    ) -> Verdict:
        """Judge a proposal: `HostCalls.verify`."""
        return await self._calls.verify(call, proposal, options=options)

    def decode(self, call: PrefixCall, options: DecodeOptions) -> AsyncGenerator[Decoded]:
        """Choose the tokens that follow a prefix: `HostCalls.decode`."""
        return self._calls.decode(call, options)

    def draft(self, call: PrefixCall, options: DraftOptions) -> AsyncGenerator[Drafted]:
        """Draft the tokens that follow a prefix: `HostCalls.draft`."""
        return self._calls.draft(call, options)

    async def _compile(self, backend: Backend, grammar: Grammar, *, share: str) -> None:
        if backend.knows_grammar(grammar):
            return
        turn = self._turns_to_compile.setdefault(share, asyncio.Lock())
        await turn.acquire()
        compiling = asyncio.create_task(asyncio.to_thread(backend.compile_grammar, grammar))
        self._compilations.add(compiling)
        # The thread goes on if the caller leaves, and has its tenant's turn until it ends.
        compiling.add_done_callback(partial(self._end_compilation, turn))
        await asyncio.shield(compiling)

    def _end_compilation(self, turn: asyncio.Lock, compiling: asyncio.Task[None]) -> None:
        turn.release()
        self._compilations.discard(compiling)
        if not compiling.cancelled():
            compiling.exception()  # the caller may have left

    def _loaded(self) -> Backend:
        if self._backend is None:
            raise LoadingError("the model is still loading", retry_after_seconds=_RETRY_SECONDS)
        return self._backend

    def _serving(self) -> Backend:
        backend = self._loaded()
        if not self._ready:
            raise DrainingError("the server is shutting down")
        return backend
