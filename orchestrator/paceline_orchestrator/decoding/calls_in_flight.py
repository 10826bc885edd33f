"""The calls of one request that are under way: each a task that owns its RPC."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from paceline.errors import PacelineError
from paceline_contract.calls import DecodeOptions, DraftOptions, VerifyOptions
from paceline_contract.limits import MOST_CHUNK_TOKENS
from paceline_contract.proposal import Proposal
from paceline_orchestrator.fleet.bad_answers import BadAnswerError
from paceline_protocol.messages import (
    BlockVerified,
    DecodeEnded,
    DraftEnded,
    Event,
    PromoteVerify,
    StartCall,
    StartDecode,
    StartDraft,
    StartVerify,
    StopCall,
    TokensDecoded,
    TokensDrafted,
    call_name,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline_orchestrator.decoding.call import CallUnderWay
    from paceline_orchestrator.decoding.decided_tokens import DecidedTokens, LikeliestByPosition
    from paceline_orchestrator.decoding.exchange import Decoded, Drafted, Judged
    from paceline_orchestrator.decoding.recorder import CallRecord, Recorder
    from paceline_orchestrator.decoding.session import RemoteSession
    from paceline_orchestrator.fleet.pool import ServerPool
    from paceline_orchestrator.fleet.server import ModelServer

_log = logging.getLogger(__name__)

COURTESY_SECONDS = 0.002
"""Cancels wait so long: new calls reach their servers before others are woken to drop work."""

# For each call under way between two messages of a decode: twice what a message costs here, so that
# half of a core is left for the rest, however many streams there are.
_MESSAGE_SECONDS = 0.0005
_LONGEST_INTERVAL_SECONDS = 0.05
# A server whose calls wait longer than this has a queue.
_QUEUEING_NS = 1_000_000


@dataclass(slots=True, eq=False)
class _Running:
    """A call under way, and the call that it replaced at a new depth, if it replaced one."""

    call: StartCall
    session: RemoteSession
    _: KW_ONLY
    sent: CallUnderWay[Any]
    record: CallRecord
    replaced: _Running | None = None
    task: asyncio.Task[None] = field(init=False)

    def withdraw(self) -> None:
        """Cancel the task, then the RPC: so the task ends before it sees the RPC's error."""
        self.task.cancel()
        self.sent.cancel()
        if self.replaced is not None:
            self.replaced.withdraw()


class CallsInFlight:
    """Starts and withdraws calls, and hands their answers and failures on.

    An answer is handed on in the turn of the event loop in which it arrives. A cancel goes out
    `COURTESY_SECONDS` after the call that makes it necessary. Metrics and the health of servers
    wait for `count_verdicts`.

    Args:
        tasks: What waits for answers runs here.
        recorder: Told of everything.
        pool: Told which servers are well.
        decided: Told what targets decide; knows which tokens are final.
        logprobs: Whether verdicts shall carry log probabilities.
        top_logprobs: How many of the likeliest tokens verdicts shall tell at each position.
        likeliest: Told of these tokens; None if none are asked for.
        answered: Takes an answer.
        failed: Takes a call that failed, its session, and the error.
    """

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        *,
        recorder: Recorder,
        pool: ServerPool,
        decided: DecidedTokens,
        logprobs: bool,
        top_logprobs: int,
        likeliest: LikeliestByPosition | None,
        answered: Callable[[Event], None],
        failed: Callable[[StartCall, RemoteSession, PacelineError], None],
    ) -> None:
        self._tasks = tasks
        self._recorder = recorder
        self._pool = pool
        self._decided = decided
        self._logprobs = logprobs
        self._top_logprobs = top_logprobs
        self._likeliest = likeliest
        self._answered = answered
        self._failed = failed
        self._running: dict[str, _Running] = {}
        self._stale: list[_Running] = []
        self._dropping: asyncio.TimerHandle | None = None
        self._judged: deque[tuple[RemoteSession, Judged]] = deque()

    def start(self, call: StartCall, session: RemoteSession) -> None:
        """Send a call."""
        match call:
            case StartVerify():
                self._start_verify(call, session)
            case StartDraft():
                self._start_draft(call, session)
            case StartDecode():
                self._start_decode(call, session)

    def promote(self, command: PromoteVerify) -> None:
        """Send a verification that still waits in a server's queue again, with its new depth.

        Only where the old call surely waits: a forward under way is worth more than a better place
        in the queue. The server hands the old call's work over to the new call, and ends the old
        one. The old call is not cancelled here: the cancel would arrive before the new call.
        """
        running = self._running.get(call_name(command))
        if running is None:
            return
        queue_ns = running.session.server.latency.queue_ns
        waited_ns = time.perf_counter_ns() - running.record.started_ns
        if queue_ns < _QUEUEING_NS or waited_ns > queue_ns / 2:
            return
        self._end(running)
        running.sent.release()
        call = replace(cast("StartVerify", running.call), depth=command.depth)
        self._start_verify(call, running.session, replaced=running)

    def withdraw(self, command: StopCall, *, by_rejection: bool) -> None:
        """Withdraw a call, unless it has ended."""
        running = self._running.pop(call_name(command), None)
        if running is None:
            return
        if not by_rejection:
            self._note_unanswered(running)
        self._let_go(running)
        self._recorder.cancelled(running.record, by_rejection=by_rejection)

    def count_verdicts(self) -> None:
        """Count the verdicts that came since the last time."""
        while self._judged:
            self.count_verdict(*self._judged.popleft())

    def count_verdict(self, session: RemoteSession, judged: Judged) -> None:
        """Count a verdict, and that its server is well."""
        self._recorder.judged(judged)
        self._pool.report_success(session.server)

    def close(self) -> None:
        """Count what came, and withdraw everything at once."""
        self.count_verdicts()
        self._drop_stale()
        for running in self._running.values():
            self._note_unanswered(running)
            running.withdraw()

    # --- starting -----------------------------------------------------------------------------

    def _start_verify(
        self, call: StartVerify, session: RemoteSession, *, replaced: _Running | None = None
    ) -> None:
        asked = _within(call, session)
        sent = session.verify(
            asked.prefix,
            asked.proposal,
            VerifyOptions(
                depth=call.depth,
                logprobs=self._logprobs,
                top_logprobs=self._top_logprobs,
                anticipate=call.anticipate,
                propose=call.propose,
            ),
            final_length=self._decided.final_length,
        )
        record = self._recorder.verifying(session.server.name, asked)
        self._follow(
            _Running(call, session, sent=sent, record=record, replaced=replaced),
            partial(self._take_verdict, call, session=session, asked=asked.proposal, record=record),
        )

    def _start_draft(self, call: StartDraft, session: RemoteSession) -> None:
        server = session.server
        record = self._recorder.drafting(server.name, call, models=server.model_names)

        def report(drafted: Drafted) -> None:
            if not record.is_running:
                return  # withdrawn a moment before
            self._recorder.drafted(record, drafted)
            self._answered(TokensDrafted(call.draft_id, drafted.proposal))

        sent = session.draft(
            call.prefix,
            DraftOptions(
                max_tokens=call.max_tokens,
                chunk_tokens=min(call.chunk_tokens, MOST_CHUNK_TOKENS),
                width=call.width if session.tree_token_limit else 1,
                branch_count=call.branch_count if session.tree_token_limit else 0,
            ),
            final_length=self._decided.final_length,
            report=report,
        )
        self._follow(
            _Running(call, session, sent=sent, record=record),
            partial(self._take_end, DraftEnded(call.draft_id), session=session),
        )

    def _start_decode(self, call: StartDecode, session: RemoteSession) -> None:
        record = self._recorder.decoding(session.server.name, call)
        text = call.prefix

        def report(decoded: Decoded) -> None:
            nonlocal text
            if not record.is_running:
                return  # withdrawn a moment before
            self._recorder.decoded(record, decoded)
            self._decided.add(decoded.start_length, decoded.token_ids)
            if self._likeliest is not None:
                told = decoded.top_logprobs
                self._likeliest.add(text, decoded.token_ids, likeliest=told)
                text = (*text, *decoded.token_ids)
            self._answered(TokensDecoded(call.decode_id, decoded.token_ids, decoded.logprobs))
            if session.is_retired:
                self._break_off(call)

        sent = session.decode(
            call.prefix,
            DecodeOptions(
                max_tokens=call.max_tokens,
                end_token_ids=call.end_ids,
                logprobs=self._logprobs,
                top_logprobs=self._top_logprobs,
                interval_seconds=min(
                    _MESSAGE_SECONDS * self._pool.call_count, _LONGEST_INTERVAL_SECONDS
                ),
            ),
            report=report,
        )
        self._follow(
            _Running(call, session, sent=sent, record=record),
            partial(self._take_end, DecodeEnded(call.decode_id), session=session),
        )

    # --- ending -------------------------------------------------------------------------------

    def _follow(self, running: _Running, take: Callable[[Any], None]) -> None:
        name = call_name(running.call)
        # First, for it fails where the request is ending: what runs has a task.
        running.task = self._tasks.create_task(self._wait(running, take), name=name)
        self._running[name] = running

    async def _wait(self, running: _Running, take: Callable[[Any], None]) -> None:
        try:
            answer = await running.sent
        except Exception as error:  # noqa: BLE001 - see below
            failure = _understood(error, running.session.server)
            if self._retire(running):
                self._failed(running.call, running.session, failure)
        else:
            if self._retire(running):
                take(answer)

    def _take_verdict(
        self,
        call: StartVerify,
        judged: Judged,
        *,
        session: RemoteSession,
        asked: Proposal,
        record: CallRecord,
    ) -> None:
        path = judged.accepted_path
        decided = (*asked.along(path), judged.next_token)
        if asked is not call.proposal:
            path = call.proposal.trunk[: len(path)]
        self._decided.add(len(call.prefix), decided)
        if self._likeliest is not None:
            self._likeliest.add(call.prefix, decided, likeliest=judged.top_logprobs)
        if judged.proposal.forced:
            self._recorder.guessed(record, (*call.prefix, *decided), judged.proposal)
        self._judged.append((session, judged))
        self._answered(
            BlockVerified(
                call.verify_id,
                path,
                judged.next_token,
                logprobs=judged.logprobs,
                proposal=judged.proposal,
            )
        )

    def _take_end(
        self, ended: DraftEnded | DecodeEnded, _: None, *, session: RemoteSession
    ) -> None:
        self._answered(ended)
        self._pool.report_success(session.server)

    def _retire(self, running: _Running) -> bool:
        """Take a call that has ended off the list; False if it was withdrawn a moment before."""
        name = call_name(running.call)
        if self._running.get(name) is not running:
            return False
        del self._running[name]
        self._end(running)
        if running.replaced is not None:
            self._drop_later(running.replaced)
        return True

    def _break_off(self, call: StartDecode) -> None:
        """End a decode between two tokens, so that it goes on where its slot's work goes now."""
        running = self._running.pop(call_name(call), None)
        if running is not None:
            self._let_go(running)
            self._answered(DecodeEnded(call.decode_id))

    def _let_go(self, running: _Running) -> None:
        running.sent.release()
        self._drop_later(running)
        self._end(running)

    def _note_unanswered(self, running: _Running) -> None:
        """Let a request that ends early not hide that a server is silent."""
        if running.sent.end_unanswered():
            self._pool.suspect(running.session.server)

    def _end(self, running: _Running) -> None:
        match running.call:
            case StartVerify():
                self._recorder.verification_ended(running.record)
            case StartDraft():
                self._recorder.draft_ended(running.record)
            case StartDecode():
                self._recorder.decode_ended(running.record)

    def _drop_later(self, running: _Running) -> None:
        self._stale.append(running)
        if self._dropping is None:
            loop = asyncio.get_running_loop()
            self._dropping = loop.call_later(COURTESY_SECONDS, self._drop_stale)

    def _drop_stale(self) -> None:
        if self._dropping is not None:
            self._dropping.cancel()
            self._dropping = None
        for running in self._stale:
            running.withdraw()
        self._stale.clear()


def _understood(error: Exception, server: ModelServer) -> PacelineError:
    """Return the error of a call as a failure of its server.

    An error that no check foresaw costs the request this server, but not the client's stream.
    """
    if isinstance(error, PacelineError):
        return error
    _log.error("an answer of %s could not be read", server.name, exc_info=error)
    return BadAnswerError("an answer could not be read")


def _within(call: StartVerify, session: RemoteSession) -> StartVerify:
    """Ask for the chain alone where a server does not judge so large or so deep a tree."""
    proposal = call.proposal
    fits = len(proposal) <= session.tree_token_limit and proposal.depth <= session.tree_depth_limit
    if fits or not proposal.parents:
        return call
    return replace(call, proposal=Proposal(proposal.along(proposal.trunk)))
