"""One request's session at one model server, whatever becomes of the server's memory of it."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from paceline.errors import (
    InternalError,
    PacelineError,
    PrefixMismatchError,
    PrefixNotHeldError,
    SessionNotFoundError,
)
from paceline.v1.drafter_service_pb2 import DraftRequest
from paceline.v1.session_service_pb2 import SessionCall
from paceline.v1.target_service_pb2 import VerifyRequest
from paceline_orchestrator.calls.call import CallUnderWay, Sent
from paceline_orchestrator.calls.deadline import patience_seconds
from paceline_orchestrator.calls.held_tokens import HeldTokens
from paceline_orchestrator.fleet.wire import answer, answers, read_timing
from paceline_protocol.proposal import Proposal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.errors import SessionError
    from paceline.v1.drafter_service_pb2 import DraftResponse
    from paceline.v1.sampling_pb2 import SparseDistribution
    from paceline.v1.session_service_pb2 import SessionSpec
    from paceline.v1.target_service_pb2 import VerifyResponse
    from paceline_orchestrator.calls.deadline import Deadline
    from paceline_orchestrator.calls.keeper import Opening, SessionKeeper
    from paceline_orchestrator.fleet.server import ModelServer
    from paceline_orchestrator.fleet.wire import Timing

__all__ = ["Drafted", "Judged", "Session"]


_CALL_SLACK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Judged:
    """A target's verdict, and what it took."""

    accepted_path: tuple[int, ...]
    next_token: int
    logprobs: tuple[float, ...]
    timing: Timing
    elapsed_ns: int


@dataclass(frozen=True, slots=True)
class Drafted:
    """Draft tokens, and what they took since those before them."""

    proposal: Proposal
    timing: Timing
    elapsed_ns: int


@dataclass(slots=True)
class _Draft:
    """What a draft was asked for, and how many tokens it has found so far."""

    prefix: Sequence[int]
    chunk_tokens: int
    final_length: int
    report: Callable[[Drafted], None]
    found_count: int = 0


class Session:
    """A session that is opened at once, repaired when it must be, and closed behind its owner.

    Concurrency:
        One call at a time. The next may begin while the one before is being cancelled: its higher
        sequence supersedes that one at the server, in whichever order they arrive.

    Args:
        server: Where it is.
        spec: What it is for.
        keeper: Opens and closes it.
        deadline: The request's.
        note_repair: Told of each repair: "session_lost" or "prefix_resent".
    """

    def __init__(
        self,
        server: ModelServer,
        spec: SessionSpec,
        *,
        keeper: SessionKeeper,
        deadline: Deadline,
        note_repair: Callable[[str], None],
    ) -> None:
        self.server = server
        self._spec = spec
        self._keeper = keeper
        self._deadline = deadline
        self._note_repair = note_repair
        self._opening = keeper.open(server, spec)
        self._held = HeldTokens()
        self._sequence = 0
        self._last_call_at = time.monotonic()
        self._calls: set[CallUnderWay[Any]] = set()  # the newest, and those being cancelled
        self._is_retired = False
        self._is_closed = False
        server.session_count += 1

    def close(self) -> None:
        """End it. Its calls must have been withdrawn."""
        self._is_closed = True
        self.server.session_count -= 1
        self._keeper.close(self.server, self._opening)

    def retire(self) -> None:
        """End it as soon as the call that is under way, if one is, has ended."""
        self._is_retired = True
        if not self._calls:
            self.close()

    def begin(self, call: CallUnderWay[Any]) -> None:
        """Note that a call is under way."""
        self._calls.add(call)
        self.server.call_count += 1

    def end(self, call: CallUnderWay[Any]) -> None:
        """Note that a call is answered, has failed, or was withdrawn; the first time counts."""
        if call not in self._calls:
            return
        self._calls.remove(call)
        self.server.call_count -= 1
        if self._is_retired and not self._is_closed and not self._calls:
            self.close()

    async def renew(self, *, idle_seconds: float) -> None:
        """Give it another lease if its last call began longer ago than that."""
        if time.monotonic() - self._last_call_at >= idle_seconds:
            with suppress(PacelineError):
                await self._keeper.renew(self.server, await self.opened())

    def verify(
        self,
        prefix: Sequence[int],
        proposal: Proposal,
        *,
        depth: int = 0,
        logprobs: bool = False,
        final_length: int,
    ) -> CallUnderWay[Judged]:
        """Judge a proposal after a prefix; see TargetService.Verify.

        Args:
            prefix: The tokens assumed right.
            proposal: The tokens to judge.
            depth: How far this runs ahead.
            logprobs: Whether they are wanted.
            final_length: How many tokens of the prefix can never change again.
        """

        def send(handle: str) -> Sent:
            call = self._next_call(handle, prefix)
            request = VerifyRequest(
                call=call,
                draft_token_ids=proposal.token_ids,
                draft_distributions=cast("Sequence[SparseDistribution]", proposal.distributions),
                speculation_depth=depth,
                logprobs=logprobs,
            )
            rpc = self.server.target.Verify(request, timeout=self._call_seconds)
            return self._sent(call, rpc, patience=self._patience(call, block_length=len(proposal)))

        async def read(sent: Sent) -> Judged:
            call, response = sent.call, await answer(sent.rpc)
            self.server.silence.heard(sent.waiting)
            judged = self._judged(response, time.perf_counter_ns() - sent.at_ns)
            if (response.sequence, response.prefix_length) != (call.sequence, len(prefix)) or not (
                response.accepted_count <= len(proposal) and self._is_token(response.next_token_id)
            ):
                raise InternalError(f"{self.server.name} answered what it was not asked")
            if call.sequence == self._sequence:
                self._held.believe(prefix, proposal.token_ids, final_length=final_length)
            return judged

        return CallUnderWay(self, send, read, is_repeatable=lambda: True)

    def draft(
        self,
        prefix: Sequence[int],
        *,
        max_tokens: int,
        chunk_tokens: int = 1,
        final_length: int,
        report: Callable[[Drafted], None],
    ) -> CallUnderWay[None]:
        """Draft after a prefix, and report tokens as they come; see DrafterService.Draft.

        Args:
            prefix: The tokens assumed right.
            max_tokens: The window.
            chunk_tokens: How many of its tokens may travel together.
            final_length: How many tokens of the prefix can never change again.
            report: Told of each message, while the call is awaited.
        """
        draft = _Draft(prefix, chunk_tokens, final_length, report)

        def send(handle: str) -> Sent:
            call = self._next_call(handle, prefix)
            request = DraftRequest(call=call, max_tokens=max_tokens, chunk_tokens=chunk_tokens)
            rpc = self.server.drafter.Draft(request, timeout=self._call_seconds)
            return self._sent(call, rpc, patience=self._patience(call, steps=chunk_tokens))

        read = partial(self._read_draft, draft)
        return CallUnderWay(self, send, read, is_repeatable=lambda: not draft.found_count)

    @property
    def handle(self) -> str:
        """Its handle, once it is open and a call can be sent; else empty."""
        return self._opening.result().session_id if self._opening.done() else ""

    def when_opened(self, callback: Callable[[Session, PacelineError | None], None]) -> None:
        """Have it called in a later turn of the loop: with no error, or with why it is not open."""

        def tell(opening: asyncio.Task[Opening]) -> None:
            if not opening.cancelled():
                callback(self, opening.result().error)

        self._opening.add_done_callback(tell)

    async def opened(self) -> str:
        """Wait until it is open, and return its handle.

        Raises:
            PacelineError: It could not be opened.
        """
        while True:
            opening = self._opening
            # Shielded: whoever waits may be cancelled, the opening goes on and is closed later.
            opened = await asyncio.shield(opening)
            if opening is self._opening:  # else it was lost meanwhile, and is opened anew
                if opened.error is not None:
                    raise opened.error
                return opened.session_id

    def repair(self, error: SessionError, call: SessionCall) -> None:
        """Make good what the server lost, so that the same call can be sent again.

        Raises:
            SessionError: the error itself, if there is nothing to make good; or if a newer call was
                sent, for which sending this one again would be the end.
        """
        is_over = self._is_retired or self._is_closed
        if is_over or call.sequence != self._sequence:
            raise error
        match error:
            case SessionNotFoundError():
                self._note_repair("session_lost")
                self._opening = self._keeper.open(self.server, self._spec)
            case PrefixNotHeldError() | PrefixMismatchError():
                self._note_repair("prefix_resent")
            case _:
                raise error
        self._held.forget()

    def _next_call(self, handle: str, prefix: Sequence[int]) -> SessionCall:
        """Say what the session shall hold, in as few tokens as it takes."""
        base_length, digest = self._held.begin(prefix)
        self._sequence += 1
        self._last_call_at = time.monotonic()
        return SessionCall(
            session_id=handle,
            sequence=self._sequence,
            base_length=base_length,
            base_digest=digest,
            token_ids=prefix[base_length:],
            expected_model_fingerprint=self._spec.expected_model_fingerprint,
        )

    @property
    def _call_seconds(self) -> float:
        """A call's own deadline: a little later than the request's, whose end withdraws it."""
        return self._deadline.remaining_seconds + _CALL_SLACK_SECONDS

    def _sent(self, call: SessionCall, rpc: Any, *, patience: float) -> Sent:
        waiting = self.server.silence.begin(
            rpc, patience_seconds=patience, is_in_sight=partial(self._is_in_sight, call)
        )
        return Sent(call, rpc, waiting)

    async def _is_in_sight(self, call: SessionCall) -> bool:
        """Ask the server whether it has a call and goes on with its work."""
        try:
            live = await self._keeper.renew(self.server, call.session_id)
        except PacelineError:
            return False
        return live == call.sequence

    def _patience(
        self, call: SessionCall | None = None, *, block_length: int = 0, steps: int = 1
    ) -> float:
        """How many seconds an answer may take: to a call, or the next one of a stream."""
        latency = self.server.latency
        is_cold = call is not None and call.base_length == 0
        if is_cold and not latency.is_known:
            return patience_seconds(None)
        rows = (len(call.token_ids) if call is not None else 1) + block_length
        forward_ns = latency.expected_ns(rows) + (steps - 1) * latency.expected_ns(1)
        return patience_seconds(forward_ns, is_cold=is_cold)

    async def _read_draft(self, draft: _Draft, sent: Sent) -> None:
        last_ns, steps = sent.at_ns, draft.chunk_tokens
        async for message in answers(sent.rpc):
            self.server.silence.heard(sent.waiting, patience_seconds=self._patience(steps=steps))
            now_ns = time.perf_counter_ns()
            self._take_drafted(draft, message, sent.call, elapsed_ns=now_ns - last_ns)
            last_ns = now_ns

    def _take_drafted(
        self, draft: _Draft, message: DraftResponse, call: SessionCall, *, elapsed_ns: int
    ) -> None:
        is_first, length = not draft.found_count, len(draft.prefix) + draft.found_count
        drafted = self._drafted(
            message, call.sequence, length, elapsed_ns=elapsed_ns, is_first=is_first
        )
        if call.sequence == self._sequence:
            if is_first:
                self._held.believe(draft.prefix, final_length=draft.final_length)
            self._held.extend(drafted.proposal.token_ids)
        draft.found_count += len(drafted.proposal)
        draft.report(drafted)

    def _judged(self, response: VerifyResponse, elapsed_ns: int) -> Judged:
        timing = read_timing(response.timing)
        self.server.latency.observe(timing, elapsed_ns=elapsed_ns)
        return Judged(
            accepted_path=tuple(range(response.accepted_count)),
            next_token=response.next_token_id,
            logprobs=tuple(response.logprobs),
            timing=timing,
            elapsed_ns=elapsed_ns,
        )

    def _drafted(
        self,
        message: DraftResponse,
        sequence: int,
        length: int,
        *,
        elapsed_ns: int,
        is_first: bool,
    ) -> Drafted:
        if (message.sequence, message.start_length) != (sequence, length) or not all(
            map(self._is_token, message.token_ids)
        ):
            raise InternalError(f"{self.server.name} answered what it was not asked")
        timing = read_timing(message.timing)
        self.server.latency.observe(timing, elapsed_ns=elapsed_ns, is_first=is_first)
        return Drafted(
            proposal=Proposal(tuple(message.token_ids), distributions=tuple(message.distributions)),
            timing=timing,
            elapsed_ns=elapsed_ns,
        )

    def _is_token(self, token_id: int) -> bool:
        facts = self.server.facts
        return facts is not None and token_id < facts.vocabulary_size
