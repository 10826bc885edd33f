"""One request's session at one model server, whatever becomes of the server's memory of it."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paceline.errors import (
    PacelineError,
    PrefixMismatchError,
    PrefixNotHeldError,
    SessionNotFoundError,
    StaleCallError,
    SupersededError,
)
from paceline_contract.calls import PrefixCall, VerifyOptions
from paceline_orchestrator.decoding.answers import AnswerChecks
from paceline_orchestrator.decoding.call import CallUnderWay
from paceline_orchestrator.decoding.deadline import Patience
from paceline_orchestrator.decoding.rpcs import (
    read_decoded,
    read_drafts,
    read_verdict,
    renew_session,
    send_decode,
    send_draft,
    send_verify,
)
from paceline_orchestrator.decoding.session_tokens import HeldTokens, Window
from paceline_orchestrator.decoding.statistics import Fallback
from paceline_orchestrator.fleet.bad_answers import demand

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.errors import SessionError
    from paceline_contract.calls import DecodeOptions, DraftOptions
    from paceline_contract.proposal import Proposal
    from paceline_orchestrator.decoding.call import Sent
    from paceline_orchestrator.decoding.deadline import Deadline
    from paceline_orchestrator.decoding.exchange import Decoded, Drafted, Judged, SessionSpec
    from paceline_orchestrator.decoding.session_opener import Opening, SessionOpener
    from paceline_orchestrator.fleet.server import ModelServer
    from paceline_orchestrator.fleet.wire import ModelFacts

_CALL_SLACK_SECONDS = 1.0
# A server that loses a session so often, without a right answer between, is at fault: each time the
# whole text is sent again.
_MOST_REPAIRS = 30
# Calls that it says are superseded, where no newer one was sent. A liar says so as fast as it is
# asked.
_MOST_DROPPED = 2
_PLAINLY = VerifyOptions()


class RemoteSession:
    """A session that is opened at once, repaired when it must be, and closed behind its owner.

    Concurrency:
        One call at a time. The next may begin while the one before is being cancelled: its higher
        sequence supersedes that one at the server, in whichever order they arrive.

    Args:
        server: Where it is.
        spec: What it is for.
        opener: Opens and closes it.
        note_repair: Told of each repair: a lost session, or a prefix sent again.
        model: The target model that it works for, which others may have; None: the server's.
        tolerance: How many times as long as others its server may have a call in sight.

    Attributes:
        has_streamed: Whether a good message of a Draft or a Decode has come.
    """

    def __init__(
        self,
        server: ModelServer,
        spec: SessionSpec,
        *,
        opener: SessionOpener,
        deadline: Deadline,
        note_repair: Callable[[Fallback], None],
        model: ModelFacts | None = None,
        tolerance: float = 1.0,
    ) -> None:
        self.server = server
        self._spec = spec
        self._opener = opener
        self._deadline = deadline
        self._note_repair = note_repair
        self._opening = opener.open(server, spec)
        self._checks = AnswerChecks(server, spec)
        self._patience = Patience(
            server,
            limit_length=self.limit_length,
            sampling_used=spec.sampling_used,
            model=model,
            tolerance=tolerance,
        )
        self._held = HeldTokens()
        self._sequence = 0
        self._asked_at = time.monotonic()
        self._calls: set[CallUnderWay[Any]] = set()  # the newest, and those being cancelled
        # Since the last right answer.
        self._repair_count = self._dropped_count = 0
        self.has_streamed = False
        self._is_retired = False
        self._is_closed = False
        server.session_count += 1

    def close(self) -> None:
        """End it. Its calls must have been withdrawn."""
        self._is_closed = True
        self.server.session_count -= 1
        self._opener.close(self.server, self._opening)

    def retire(self) -> None:
        """End it as soon as the call that is under way, if one is, has ended."""
        self._is_retired = True
        if not self._calls:
            self.close()

    @property
    def tree_token_limit(self) -> int:
        """The most tokens of a tree that its server takes; 0 where it knows chains only."""
        return self.server.facts.tree_token_limit if self.server.facts is not None else 0

    @property
    def tree_depth_limit(self) -> int:
        """The most tokens of a path of such a tree."""
        return self.server.facts.tree_depth_limit if self.server.facts is not None else 0

    @property
    def limit_length(self) -> int:
        """The most tokens that it may hold."""
        return self._spec.limit_length or self._spec.reserve_length

    @property
    def is_retired(self) -> bool:
        """Whether nothing more shall be asked of it."""
        return self._is_retired

    @property
    def asked_at(self) -> float:
        """When its server was last asked to open it or to work, on the monotonic clock."""
        return self._asked_at

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
        if time.monotonic() - self._asked_at >= idle_seconds:
            with suppress(PacelineError):
                handle = await self.opened()
                await renew_session(self.server, handle)

    def verify(
        self,
        prefix: Sequence[int],
        proposal: Proposal,
        options: VerifyOptions = _PLAINLY,
        *,
        final_length: int,
    ) -> CallUnderWay[Judged]:
        """Judge a proposal after a prefix; see TargetService.Verify.

        Args:
            prefix: The tokens assumed right.
            proposal: The tokens to judge.
            options: How.
            final_length: How many tokens of the prefix can never change again.
        """

        def send(handle: str) -> Sent:
            call = self._next_call(handle, prefix)
            rpc = send_verify(
                self.server,
                call,
                proposal=proposal,
                options=options,
                timeout_seconds=self._call_seconds,
            )
            seconds = self._patience.seconds(call, block_length=len(proposal))
            return self._patience.begin(call, rpc, seconds=seconds, block_length=len(proposal))

        async def read(sent: Sent) -> Judged:
            judged = await read_verdict(sent.rpc, sent_ns=sent.at_ns, block_length=len(proposal))
            self._patience.heard(sent)
            self._checks.verdict(judged, sent.call, proposal, options=options)
            self._repair_count = self._dropped_count = 0
            self.server.latency.observe(judged.timing, elapsed_ns=judged.elapsed_ns)
            if sent.call.sequence == self._sequence:
                accepted = proposal.along(judged.accepted_path)
                self._held.confirm(prefix, accepted, final_length=final_length)
            return judged

        return CallUnderWay(self, send, read, is_repeatable=lambda: True)

    def draft(
        self,
        prefix: Sequence[int],
        options: DraftOptions,
        *,
        final_length: int,
        report: Callable[[Drafted], None],
    ) -> CallUnderWay[None]:
        """Draft after a prefix, and report tokens as they come; see DrafterService.Draft.

        Args:
            prefix: The tokens assumed right.
            options: How far, and how broadly.
            final_length: How many tokens of the prefix can never change again.
            report: Told of each message, while the call is awaited.
        """
        window = Window(prefix, options.max_tokens, final_length=final_length, width=options.width)
        steps = options.chunk_tokens

        def send(handle: str) -> Sent:
            call = self._next_call(handle, prefix)
            rpc = send_draft(self.server, call, options=options, timeout_seconds=self._call_seconds)
            seconds = self._patience.seconds(call, steps=steps)
            return self._patience.begin(call, rpc, seconds=seconds)

        async def read(sent: Sent) -> None:
            drafts = read_drafts(sent.rpc, options, sent_ns=sent.at_ns)
            async with aclosing(drafts) as messages:
                async for drafted in messages:
                    self._patience.heard(sent, seconds=self._patience.seconds(steps=steps))
                    chain = self._checks.draft(drafted, window=window)
                    proposal = drafted.proposal
                    self._take(drafted, proposal.along(chain), sent=sent, window=window)
                    if options.width == 1:  # the parents of a chain say nothing
                        proposal = replace(proposal, parents=())
                    report(replace(drafted, proposal=proposal, chain=chain))

        return CallUnderWay(self, send, read, is_repeatable=lambda: not window.found_count)

    def decode(
        self,
        prefix: Sequence[int],
        options: DecodeOptions,
        *,
        report: Callable[[Decoded], None],
    ) -> CallUnderWay[None]:
        """Decode after a prefix, and report tokens as they come; see TargetService.Decode.

        Args:
            prefix: The text, all of it final.
            options: How far.
            report: Told of each message, while the call is awaited.
        """
        window = Window(prefix, options.max_tokens, final_length=len(prefix))

        def send(handle: str) -> Sent:
            call = self._next_call(handle, prefix)
            rpc = send_decode(
                self.server, call, options=options, timeout_seconds=self._call_seconds
            )
            return self._patience.begin(call, rpc, seconds=self._patience.seconds(call))

        async def read(sent: Sent) -> None:
            decodes = read_decoded(sent.rpc, sent_ns=sent.at_ns, max_tokens=options.max_tokens)
            async with aclosing(decodes) as messages:
                async for decoded in messages:
                    seconds = self._patience.seconds() + options.interval_seconds
                    self._patience.heard(sent, seconds=seconds)
                    self._checks.decoded(decoded, options=options)
                    self._take(decoded, decoded.token_ids, sent=sent, window=window)
                    report(decoded)
            self._checks.end(window)

        return CallUnderWay(self, send, read, is_repeatable=lambda: not window.found_count)

    @property
    def handle(self) -> str:
        """Its handle, once it is open and a call can be sent; else empty."""
        return self._opening.result().session_id if self._opening.done() else ""

    def when_opened(self, callback: Callable[[RemoteSession, PacelineError | None], None]) -> None:
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
            # Shielded: this task may be cancelled, but the opening goes on and is closed later.
            opened = await asyncio.shield(opening)
            if opening is self._opening:  # else it was lost meanwhile, and is opened anew
                if opened.error is not None:
                    raise opened.error
                return opened.session_id

    def repair(self, error: SessionError, call: PrefixCall) -> None:
        """Make good what the server lost, so that the same call can be sent again.

        Raises:
            SessionError: the error itself, if there is nothing to make good; or if a newer call was
                sent, for which sending this one again would be the end.
            BadAnswerError: it cannot be so, or is so all the time.
        """
        is_over = self._is_retired or self._is_closed
        if is_over or call.sequence != self._sequence:
            raise error
        if isinstance(error, StaleCallError | SupersededError):
            # So says a session that is closed under its call: the next call finds it gone.
            self._dropped_count += 1
            demand(
                self._dropped_count < _MOST_DROPPED, "its session", "drops calls for no newer one"
            )
            raise error
        self._repair_count += 1
        demand(self._repair_count < _MOST_REPAIRS, "its session", "is lost all the time")
        match error:
            case SessionNotFoundError():
                self._note_repair(Fallback.SESSION_LOST)
                self._opener.forget(self.server, self._opening)
                self._opening = self._opener.open(self.server, self._spec)
                self._asked_at = time.monotonic()
            case PrefixNotHeldError() | PrefixMismatchError():
                self._note_repair(Fallback.PREFIX_RESENT)
            case _:
                raise error
        self._held.forget()

    def _next_call(self, handle: str, prefix: Sequence[int]) -> PrefixCall:
        """Say what the session shall hold, in as few tokens as it takes."""
        base_length, digest = self._held.begin(prefix)
        self._sequence += 1
        self._asked_at = time.monotonic()
        return PrefixCall(
            session_id=handle,
            sequence=self._sequence,
            base_length=base_length,
            base_digest=digest,
            token_ids=prefix[base_length:],
            fingerprint=self._spec.fingerprint,
        )

    @property
    def _call_seconds(self) -> float:
        """A call's own deadline: a little later than the request's, whose end withdraws it."""
        return self._deadline.remaining_seconds + _CALL_SLACK_SECONDS

    def _take(
        self, found: Drafted | Decoded, token_ids: Sequence[int], *, sent: Sent, window: Window
    ) -> None:
        """Take in a message of a stream."""
        self._checks.next(found, token_ids, call=sent.call, window=window)
        self._repair_count = self._dropped_count = 0
        self.has_streamed = True
        is_first = not window.found_count
        self.server.latency.observe(found.timing, elapsed_ns=found.elapsed_ns, is_first=is_first)
        if sent.call.sequence == self._sequence:
            if is_first:
                self._held.confirm(window.prefix, final_length=window.final_length)
            self._held.extend(token_ids)
        window.advance(len(token_ids))
